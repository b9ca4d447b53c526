"""The page of the exactness matrix, from its lines: kinds of plans down, models across, a table for each number of processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from autopar.measure import EXACT

Line = dict[str, Any]


def passed(line: Line) -> bool:
    """Whether the case is exact, or the model does not admit it."""
    return "reason" in line or ("failure" not in line and line["error"] <= EXACT)


def write_page(lines: list[Line], path: Path, kinds: list[str]) -> None:
    path.write_text(page(lines, kinds))


def page(lines: list[Line], kinds: list[str]) -> str:
    """The results as a document. ``kinds`` gives the order of the rows; mixtures are a list of their own."""
    tried = {line["kind"] for line in lines}
    kinds = [kind for kind in kinds if kind in tried]
    ran = [line for line in lines if "reason" not in line]
    exact = sum(map(passed, ran))
    worst = max((line["error"] for line in ran if "failure" not in line), default=0.0)
    models = list(dict.fromkeys(line["model"] for line in lines))
    versions = ", ".join(sorted({line["torch"] for line in lines}))
    stages = sum(line.get("stages_typed", 0) for line in ran)
    stages_64 = sum(line.get("stages_typed_at_64", 0) for line in ran)
    notes: dict[str, int] = {}
    tables = [_table(lines, kinds, models, count, notes) for count in sorted({line["devices"] for line in lines})]
    mixtures = [line for line in lines if line["kind"].startswith("mixture ")]
    reasons = "\n".join(f"{number}. {reason}" for reason, number in notes.items())
    return f"""# Exactness

Each number is the largest error of a training step's loss and gradients under a plan, against eager PyTorch on one device, in float64:
`max|g - g0| / max(max|g0|, 1e-6 max|all gradients|)` over all parameters, and the loss's relative error. Below {EXACT:.0e} the two are
the same up to rounding. {exact} of {len(ran)} cases are below; the largest error is {worst:.1e}. The cases are {len(models)} models under
{len(kinds)} kinds of plans, and {len(mixtures)} random plans. A number in brackets refers to the reason, at the end of the page, why a
kind is not valid for a model. A dot is a case that was not run yet (`make report NAME=exactness` runs the missing ones).

The models are small, with features that are easy to get wrong: masked labels distributed unevenly over microbatches and slices, tied and
fused weights, biases, padding. Each program was also type-checked ({stages} stages), a quarter of them also for 64 devices ({stages_64}
stages).
{_compiled(ran)}
{"".join(tables)}## Mixtures

A seeded generator (`autopar/verify/mixtures.py`) draws mesh, stage boundaries, schedule, microbatches, and each layer's roles, ZeRO stage
and recomputation. `python tests/reports exactness --mixtures 500 --seed 7` draws others.

| model | processes | plan | error |
|---|---|---|---|
{"".join(_mixture(line, notes) for line in mixtures)}
## Kinds that are not valid for a model

{reasons or "None."}

Made by `make report NAME=exactness` with torch {versions}, gloo, on CPUs, from the lines of [exactness.jsonl](exactness.jsonl), each with a
fingerprint of the code that produced it: {_codes(lines)}. Do not edit.
"""


def _codes(lines: list[Line]) -> str:
    """The fingerprints of the code, and the number of lines of each, most first."""
    counts = Counter(line.get("code", "unknown") for line in lines)
    return ", ".join(f"`{code}` ({count} lines)" for code, count in counts.most_common())


def _compiled(ran: list[Line]) -> str:
    """How many programs with compiled layers there are, and what compiled them."""
    backends = [line["backend"] for line in ran if "backend" in line]
    if not backends:
        return ""
    counts = ", ".join(f"{backends.count(name)} by `{name}`" for name in sorted(set(backends)))
    return f"Layers of {len(backends)} programs are compiled: {counts}.\n"


def _table(lines: list[Line], kinds: list[str], models: list[str], count: int, notes: dict[str, int]) -> str:
    found = {(line["model"], line["kind"]): line for line in lines if line["devices"] == count}
    rows = [kind for kind in kinds if any((model, kind) in found for model in models)]
    if not rows:
        return ""
    text = [f"## {count} processes" if count > 1 else "## One process", ""]
    text += [f"| plan | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for kind in rows:
        text.append(f"| {kind} | {' | '.join(_cell(found.get((model, kind)), notes) for model in models)} |")
    return "\n".join(text) + "\n\n"


def _cell(line: Line | None, notes: dict[str, int]) -> str:
    if line is None:
        return "·"
    if "reason" in line:
        return f"[{notes.setdefault(line['reason'], len(notes) + 1)}]"
    if "failure" in line:
        return "**" + line["failure"].replace("|", "/") + "**"
    return f"{line['error']:.1e}" if passed(line) else f"**{line['error']:.1e}** in {line['where']}"


def _mixture(line: Line, notes: dict[str, int]) -> str:
    return f"| {line['model']} | {line['devices']} | {line.get('plan', '')} | {_cell(line, notes)} |\n"
