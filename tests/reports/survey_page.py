"""The page of a survey, from its lines: counts by group, the outcome of every model, and the plans that are not valid for a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.measure import EXACT

Line = dict[str, Any]
OUTCOMES = ("exact", "refused", "failed", "traceback", "dead", "wrong")


NUMBERS = {2: "two", 4: "four"}


def write_page(lines: list[Line], path: Path, known: int, devices: int) -> None:
    path.write_text(page(lines, known, path.stem, devices))


def page(lines: list[Line], known: int, name: str, devices: int) -> str:
    """The results of the report ``name`` as a document; ``known`` is how many models there are, run or not."""
    count = {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in OUTCOMES}
    ran = sum(map(_ran, lines))
    worst = max((line["error"] for line in lines if line["outcome"] == "exact"), default=0.0)
    groups = list(dict.fromkeys(line["group"] for line in lines))
    return f"""# {name.capitalize().replace("-", ": ")}

{len(lines)} of {known} models, with their libraries' own code: tiny configurations, random weights, a fixed batch. For each model, the
loss and every gradient of the captured graph on one device, and of programs on {NUMBERS[devices]} processes under a few kinds of plans,
are compared in float64 with eager PyTorch: {ran} plans.

| outcome | meaning |
|---|---|
| exact | all kinds that are valid for the model differ by less than {EXACT:.0e} (the largest: {worst:.1e}) |
| refused | autopar reports, before anything runs, why it cannot capture the model |
| failed | a plan was found, but its program did not run |
| traceback | an exception other than autopar's own errors |
| dead | a process died or hung |
| wrong | the numbers differ |

| group | models | {" | ".join(OUTCOMES)} | plans |
|---|---|{"---|" * len(OUTCOMES)}---|
{"".join(_group(group, lines) for group in groups)}{_total(count, len(lines), ran)}

*Plans* is how many of the tried kinds ran and were exact{EXPERTS if _tell_experts(lines) else ""}.

| model | outcome | plans |{" experts |" if _tell_experts(lines) else ""} seconds | error, or reason |
|---|---|---|{"---|" if _tell_experts(lines) else ""}---|---|
{"".join(_row(line, experts=_tell_experts(lines)) for line in lines)}
{_not_admitted(lines)}Made by `make report NAME={name}` from the lines of [{name}.jsonl]({name}.jsonl). Do not edit.
"""


def _total(count: dict[str, int], models: int, ran: int) -> str:
    return f"| **all** | {models} | {' | '.join(str(count[outcome]) for outcome in OUTCOMES)} | {ran} |"


def _group(group: str, lines: list[Line]) -> str:
    mine = [line for line in lines if line["group"] == group]
    numbers = [sum(line["outcome"] == outcome for line in mine) for outcome in OUTCOMES]
    return f"| {group} | {len(mine)} | {' | '.join(map(str, numbers))} | {sum(map(_ran, mine))} |\n"


def _ran(line: Line) -> int:
    return sum("error" in plan for _, plan in _plans(line))


def _plans(line: Line) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((kind, plan) for kind, plan in line.get("plans", {}).items() if kind != "one device")


def _row(line: Line, *, experts: bool) -> str:
    outcome = line["outcome"] if line["outcome"] == "exact" else f"**{line['outcome']}**"
    why = f"{line['error']:.1e}" if line["outcome"] == "exact" else _cell(line["reason"])
    exact = sum(plan.get("error", 1.0) <= EXACT for _, plan in _plans(line))
    plans = f"{exact} of {len(list(_plans(line)))}"
    recognised = f" {line.get('experts') or '-'} |" if experts else ""
    return f"| {line['model']} | {outcome} | {plans} |{recognised} {line['seconds']:.0f} | {why} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split())[:400].replace("|", "/")


EXPERTS = "; *experts* is the number of experts in a layer (-: no layer was recognised as a mixture, so experts are not distributed)"


def _tell_experts(lines: list[Line]) -> bool:
    return any("experts" in line for line in lines)


def _not_admitted(lines: list[Line]) -> str:
    """The kinds of plans that are not valid for a model, by the reason that autopar gives; nothing if all are."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for kind, plan in _plans(line):
            if "reason" in plan:
                by_reason.setdefault((line["model"], _cell(plan["reason"])), []).append(kind)
    if not by_reason:
        return ""
    rows = "".join(f"| {model} | {'; '.join(kinds)} | {why} |\n" for (model, why), kinds in by_reason.items())
    return f"Kinds that are not valid for a model:\n\n| model | kinds | reason |\n|---|---|---|\n{rows}\n"
