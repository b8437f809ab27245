"""How far each router is from the proven optimum, beside the figures of a published reproduction.

    python benchmarks/optimality_gap.py       # synthetic DeepSeek-V3 traffic, published figures
    python benchmarks/optimality_gap.py FILE  # recorded top-k ids, or one step of counts
    python benchmarks/optimality_gap.py --tokens 32 --run 1 --plot gap.svg
                                              # also draws what `eplb-opt gap` measures

Prints a table in Markdown: the mean over layers and batches of the fullest GPU's activated
replicas. The grid is that of an independent reproduction of METRO (arXiv 2512.09277): DeepSeek-V3,
EPLB placements, EP 8/16/32 at 1.25 and 1.5 slots per expert; eight data sets, 32 tokens a batch,
155 live experts. Our popularity is more skewed, so that it takes 53 tokens, in runs of 8 from one
generation, for as many live experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import typer
from numpy.typing import NDArray

import eplb_opt as eo
from eplb_opt.plots import plot_gap
from eplb_opt.routers import Context, RoutingMethod, Solve, Traits, finish

# (EP, replication): live experts / G, then the methods in the order of METHODS.
PUBLISHED = {
    (8, 1.25): (19.4, 23.81, 24.53, 25.30, 22.14, 20.61, 20.36),
    (8, 1.5): (19.4, 24.17, 25.52, 27.02, 21.25, 20.25, 19.84),
    (16, 1.25): (9.7, 13.66, 13.85, 14.33, 12.57, 11.69, 11.56),
    (16, 1.5): (9.7, 13.91, 14.32, 15.37, 11.84, 10.91, 10.31),
    (32, 1.25): (4.8, 8.00, 8.05, 8.32, 7.40, 6.90, 6.86),
    (32, 1.5): (4.8, 8.46, 8.55, 9.04, 7.06, 6.27, 5.95),
}


@dataclass(frozen=True, slots=True)
class OneReplica:
    """Every expert served by one replica, the same for all: as if there were no others."""

    traits: ClassVar[Traits] = Traits("one fixed replica of every expert, drawn by seed")

    seed: int = 0

    def bind(self, placement: eo.Placement, objective: eo.Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        layers, slots = placement.expert_of.shape
        rng = np.random.default_rng(self.seed)
        replica = (rng.random(placement.copies.shape) * placement.copies).astype(np.int64)
        layer, expert = np.nonzero(placement.copies)
        slot = placement.logical_to_physical[layer, expert, replica[layer, expert]]

        def solve(tokens: NDArray[np.int64], out: eo.Routing, _: Context) -> None:
            demand = tokens.reshape(-1, layers, placement.num_experts)
            routed = np.zeros((len(demand), layers, slots), np.int64)
            routed[:, layer, slot] = demand[:, layer, expert]
            finish(out, routed)

        return solve


METHODS: dict[str, str | RoutingMethod] = {
    "one fixed replica": OneReplica(),
    "nearest": "nearest",
    "random": "random",
    "METRO, id order": "metro",
    "METRO, single copies first": "metro:order=single-copy-first",
    "optimum": "optimal",
}


def main(
    file: Annotated[Path | None, typer.Argument(help="Top-k ids or one step of counts.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per batch.")] = 53,
    run: Annotated[
        int, typer.Option(help="Tokens of one generation side by side, without FILE.")
    ] = 8,
    steps: Annotated[int, typer.Option(help="Batches.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw gap against replication here.")] = None,
) -> None:
    """Print the table; with --plot, draw the default methods and deployments on that traffic."""
    traffic = file or replace(eo.Workload.preset("deepseek-v3"), generation_tokens=run)
    study = eo.optimality_gap(
        traffic,
        gpus=[8, 16, 32],
        replication=[1.25, 1.5],
        methods=list(METHODS.values()),
        tokens=tokens,
        steps=steps,
    )
    print(f"{study.traffic}; {study.batches} batches of {tokens} tokens, {study.layers} layers,")
    print(f"{study.rows[0].live_experts:.0f} live experts.", end="")
    print("\n" if file else " Published figures in brackets (155).\n")
    print(f"| EP, replication | even | {' | '.join(METHODS)} |")
    print("|---" * (len(METHODS) + 2) + "|")
    for at in range(0, len(study.rows), len(METHODS)):
        rows = study.rows[at : at + len(METHODS)]
        key = (rows[0].gpus, rows[0].replication)
        figures = [rows[0].even, *(row.makespan for row in rows)]
        cells = [f"{figure:.2f}" for figure in figures]
        if file is None:
            cells = [f"{c} ({p:.2f})" for c, p in zip(cells, PUBLISHED[key], strict=True)]
        print(f"| {key[0]}, {key[1]:g} | {' | '.join(cells)} |")
    if plot is not None:
        plot_gap(eo.optimality_gap(traffic, tokens=tokens, steps=steps), plot)


if __name__ == "__main__":
    typer.run(main)
