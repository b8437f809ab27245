"""Choose a router for a deployment: the simplest that is good enough, by batch size.

A kernel's time comes from a profile: what reading one expert's weights costs, and what one token
costs. The map routes drawn batches by every choice, prices the slowest GPU, and names the simplest
choice within 1 % of the least time. Below the crossing METRO is the better of the two pure rules,
above it token balance; the last column is what knowing both gains over the better of them.
"""

from __future__ import annotations

import eplb_opt as eo
from eplb_opt.regime import regime_map


def main() -> None:
    """Map DeepSeek-V3 decode on 16 GPUs with 32 redundant slots, under a kernel of one's own."""
    kernel = eo.Objective(
        name="our kernel, microseconds",
        pieces=(eo.Piece(offset=12, activation=15), eo.Piece(offset=12, token=0.1)),
    )
    regimes = regime_map(
        eo.Workload.preset("deepseek-v3", "decode"),
        gpus=[16],
        redundant=[32],
        tokens_per_gpu=[16, 64, 256, 512],
        objective=kernel,
        layers=4,
    )
    for row in regimes.rows:
        gain = min(row.ratio("metro"), row.ratio("token-balance")) - 1
        print(
            f"{row.tokens_per_gpu:4} tokens per GPU: serve with {row.best:13}"
            f" {row.time(row.best):6.1f} µs; makespan {row.makespan:6.1f} µs, gains {gain:5.1%}"
        )
    (crossover,) = regimes.crossovers
    print(
        f"METRO and token balance cross at {crossover.tokens_per_gpu:.0f} tokens per GPU,"
        f" TEMPO's boundary is {crossover.flip:.0f}"
    )


if __name__ == "__main__":
    main()
