"""Route batch after batch as a server does: a placement bound once, an answer reused.

A `Router` checks the placement and the method once. `route` then overwrites the same answer: no
allocation, no Python per layer. What it costs and what it gives are printed at the end.
"""

from __future__ import annotations

import time

import numpy as np

import eplb_opt as eo

GPUS, SLOTS_PER_GPU, BATCHES, TOKENS = 32, 12, 100, 32


def main() -> None:
    """Serve decode batches of DeepSeek-V3 on DeepSeek's own placement."""
    traffic = eo.Workload.preset("deepseek-v3", "decode")
    plan = eo.solve_placement(traffic.popularity, num_gpus=GPUS, slots_per_gpu=SLOTS_PER_GPU)
    topk_ids = traffic.draw(TOKENS, BATCHES)  # [batches, layers, rows, k]
    tokens = eo.count_tokens(topk_ids, plan.placement.num_experts)

    for method in ("optimal", "metro", "uniform"):
        router = eo.Router(plan.placement, method=method)
        out = router.allocate(tokens.shape[1:])
        makespans, seconds = [], []
        for batch in tokens:
            began = time.perf_counter()
            router.route(batch, out=out)
            seconds.append(time.perf_counter() - began)
            makespans.append(out.makespan.copy())
        p50, p99 = np.percentile(makespans, [50, 99])  # over batches and layers
        microseconds = np.median(seconds) / plan.placement.num_layers * 1e6
        print(
            f"{method:8} activated on the fullest GPU: p50 {p50:g}, p99 {p99:g};"
            f" {microseconds:.1f} µs a layer"
        )

    best = eo.solve_routing(plan.placement, tokens[-1])
    physical = best.assign(topk_ids[-1])  # what the dispatch needs: a slot per token and expert
    print(f"layer 0, token 0: experts {topk_ids[-1, 0, 0]} in the slots {physical[0, 0]}")


if __name__ == "__main__":
    main()
