"""The automatic layout on every cell of the published sweep (``make report NAME=published``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from places import EVIDENCE, GROUNDTRUTH

from autopar.bench.published import CellResult, published, summary

FILE = GROUNDTRUTH / "layout_sweep.jsonl"
SCORED_GPUS = 128  # cells of more GPUs are reported apart: that network's sends between stages are not modelled (evidence/validation.md)

HEAD = """# The automatic layout against 995 published ones

A cell of [layout_sweep.jsonl](groundtruth/layout_sweep.jsonl) is one model on one number of H100 nodes, measured with nanotron. For each
cell, pins restrict the search to the measured layouts (data, tensor and pipeline degree, ZeRO stage, microbatches; no recomputation),
with that trainer's kernels and overlap. The search chooses one of them, and its pipeline stages. Layouts that exceed the memory limit
with the trainer's own stages are excluded, because these stages were measured. *Regret* is the measured time of the chosen layout divided
by the best measured time, minus one. If the chosen layout failed in the sweep (out of memory or another crash), the table says so, and
the regret is that of the layout with the shortest predicted time among those that ran. Constants of the cost model were fitted to these
rows, so the figures are in-sample ([validation](validation.md)).
"""


def markdown(cells: Sequence[CellResult]) -> str:
    """The cells as a table of a page."""
    rows = [
        "| cell | GPUs | layouts that ran | automatic layout | measured | best layout | measured | regret |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        mine = "failed" if c.choice.measured_s is None else f"{c.choice.measured_s:.3g} s"
        note = f" (of {_layout(c.ran.id, c.name)}, the next that ran)" if c.failed else ""
        rows.append(
            f"| {c.name} | {c.devices} | {c.measured} of {c.layouts} | {_layout(c.choice.id, c.name)} | {mine} "
            f"| {_layout(c.best.id, c.name)} | {c.best.measured_s:.3g} s | {c.regret:.1%}{note} |"
        )
    return "\n".join(rows) + "\n"


def _layout(identity: str, cell: str) -> str:
    return identity.removeprefix(f"{cell}-")


def page(cells: list[CellResult]) -> str:
    """The page that is made of the results."""
    text = HEAD
    for title, some in (
        ("Up to 16 nodes", [c for c in cells if c.devices <= SCORED_GPUS]),
        ("32 nodes and more", [c for c in cells if c.devices > SCORED_GPUS]),
    ):
        if some:
            s = summary(some)
            text += (
                f"\n## {title}\n\nRegret {s['mean_regret']:.1%} on average and {s['worst_regret']:.1%} at worst over "
            )
            text += f"{s['cells']} cells; {s['failed']} of the chosen layouts failed in the sweep.\n\n{markdown(some)}"
    return text + "\nMade by `make report NAME=published`. Do not edit.\n"


def main() -> None:
    def show(what: str, done: int, total: int) -> None:
        print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    cells = published(FILE, show)
    (EVIDENCE / "published.jsonl").write_text("".join(json.dumps(cell.to_json()) + "\n" for cell in cells))
    (EVIDENCE / "published.md").write_text(page(cells))


if __name__ == "__main__":
    main()
