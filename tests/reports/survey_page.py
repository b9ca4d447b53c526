"""The page of a survey, from its lines: counts by group, then every model with what came of it and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.measure import EXACT

Line = dict[str, Any]
OUTCOMES = ("exact", "refused", "failed", "traceback", "dead", "wrong")


def write_page(lines: list[Line], path: Path, known: int) -> None:
    path.write_text(page(lines, known, path.stem))


def page(lines: list[Line], known: int, name: str) -> str:
    """The results of the report ``name`` as a document; ``known`` is how many models there are, run or not."""
    count = {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in OUTCOMES}
    plans = [plan for line in lines for kind, plan in line.get("plans", {}).items() if kind != "one device"]
    ran = sum("error" in plan for plan in plans)
    worst = max((line["error"] for line in lines if line["outcome"] == "exact"), default=0.0)
    groups = list(dict.fromkeys(line["group"] for line in lines))
    return f"""# {name.capitalize().replace("-", ": ")}

{len(lines)} of {known} models, as their libraries ship them: tiny configurations, drawn weights, a batch that is always the same. Of each,
the loss and every gradient of the captured graph on one device, and of its programs on two processes under a few kinds of
plans, are compared in float64 with eager PyTorch: {ran} plans. *Exact* means that all that a model admits differ by less than
{EXACT:.0e} (the largest: {worst:.1e}); *refused* that autopar says, before anything is run,
why it cannot capture the model; *failed* that a plan was
offered and then did not run; *traceback* that an exception came out that is none of autopar's; *dead* that a process died or did not end;
*wrong* that the numbers differ.

| group | models | {" | ".join(OUTCOMES)} | plans |
|---|---|{"---|" * len(OUTCOMES)}---|
{"".join(_group(group, lines) for group in groups)}{_total(count, len(lines), ran)}

| model | outcome | plans | seconds | why |
|---|---|---|---|---|
{"".join(_row(line) for line in lines)}
Made by `make report NAME={name}` from the lines of [{name}.jsonl]({name}.jsonl). Do not edit.
"""


def _total(count: dict[str, int], models: int, ran: int) -> str:
    return f"| **all** | {models} | {' | '.join(str(count[outcome]) for outcome in OUTCOMES)} | {ran} |"


def _group(group: str, lines: list[Line]) -> str:
    mine = [line for line in lines if line["group"] == group]
    numbers = [sum(line["outcome"] == outcome for line in mine) for outcome in OUTCOMES]
    return f"| {group} | {len(mine)} | {' | '.join(map(str, numbers))} | {sum(map(_ran, mine))} |\n"


def _ran(line: Line) -> int:
    return sum("error" in plan for kind, plan in line.get("plans", {}).items() if kind != "one device")


def _row(line: Line) -> str:
    outcome = line["outcome"] if line["outcome"] == "exact" else f"**{line['outcome']}**"
    why = (
        f"{line['error']:.1e}"
        if line["outcome"] == "exact"
        else " ".join(line["reason"].split())[:400].replace("|", "/")
    )
    return f"| {line['model']} | {outcome} | {_ran(line)} | {line['seconds']:.0f} | {why} |\n"
