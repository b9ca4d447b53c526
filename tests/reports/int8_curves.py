"""Loss curves with saved activations in 8 bits: ``make report NAME=int8-activations``.

It writes ``docs/evidence/int8-activations.{jsonl,svg,md}``. The model, the text and the training are those of ``precision_curves``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from places import EVIDENCE
from precision_curves import IN_8_BITS, REFERENCE, WAYS, WINDOW, draw, furthest, smoothed, train_apart

RESULTS = EVIDENCE / "int8-activations.jsonl"


def page(lines: list[dict[str, Any]]) -> str:
    """The page that is made of the results."""
    by_name = {line["precision"]: line for line in lines}
    first = by_name[REFERENCE]
    parts = [
        "# Saved activations in 8 bits\n",
        f"A decoder of {first['parameters'] / 1e6:.1f} million parameters learns to predict the bytes of Python's standard library, "
        f"{len(first['losses'])} steps of {first['tokens_per_step']:,}",
        f"bytes, as an emitted program on one device ({first['device']}, torch {first['torch']}, Python {first['python']}): with and "
        'without `allow={"int8_activations"}, saved="int8"`,',
        "from the same values, on the same batches.\n",
        "![loss by step](int8-activations.svg)\n",
        f"Curves are smoothed by means over {WINDOW} steps. *Largest difference* is to the curve of the same precision with "
        "unrounded saved "
        "activations.",
        "*Activations* are the predicted bytes that are saved from the forward to the backward pass, including those of the loss layer.\n",
        "| curve | activations | first loss | last loss | last smoothed loss | largest difference | at step | share of the loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        base = by_name[line["precision"].partition(",")[0]]
        step, difference = furthest(line, base)
        share = abs(difference) / smoothed(base["losses"])[step]
        apart = f"{difference:+.4f} | {step} | {share:.2%}" if line is not base else "- | - | -"
        parts.append(
            f"| {line['precision']} | {line['activations_bytes'] / 1e6:.1f} MB | {line['losses'][0]:.4f} | {line['losses'][-1]:.4f} "
            f"| {smoothed(line['losses'])[-1]:.4f} | {apart} |"
        )
    return "\n".join([*parts, "", "Made by `make report NAME=int8-activations`. Do not edit."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--page", action="store_true", help="make the page anew, train nothing")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="where the results and the page go")
    asked = parser.parse_args()
    results = asked.folder / RESULTS.name
    if not asked.page:
        lines = [train_apart(way, asked.steps) for way in (*WAYS[:2], *IN_8_BITS)]
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    results.with_suffix(".md").write_text(page(lines))
    draw(lines, results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
