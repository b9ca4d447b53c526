"""The page of recorded collectives, from its lines."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autopar.checks.nccl.graph import MODES
from autopar.units import size

Line = dict[str, Any]


def passed(line: Line) -> bool:
    """Whether nothing was found; of a planted fault, whether it was; or whether the model does not admit the kind."""
    if "failure" in line:
        return False
    return "reason" in line or (bool(line["found"]) if line.get("part") == "faults" else not line["findings"])


def page(lines: list[Line]) -> str:
    """The results as a document."""
    programs = [line for line in lines if line["part"] == "programs" and "reason" not in line]
    faults = [line for line in lines if line["part"] == "faults"]
    large = [line for line in lines if line["part"] == "large"]
    ranks = sum(line.get("ranks", 0) for line in programs)
    operations = sum(line.get("operations", 0) for line in programs)
    clean = sum(map(passed, programs))
    versions = ", ".join(sorted({line["torch"] for line in lines}))
    codes = ", ".join(f"`{code}` ({n} lines)" for code, n in Counter(line.get("code") for line in lines).most_common())
    return f"""# Collectives

Every rank of {len(programs)} programs is recorded on CPUs without communication (`autopar verify --collectives`): {ranks:,} ranks,
{operations:,} collectives and transfers. {clean} programs pass all of these checks:

- all members of a communicator issue the same operations, with the same counts, dtypes, reduce ops and roots;
- no order of events deadlocks in any of {len(MODES)} modes: {"; ".join(mode.name for mode in MODES)};
- losses and parameters after the steps are bitwise the same whether results arrive at once or only at the wait;
- no buffer is written while an operation uses it, and every result is waited for;
- operands are contiguous, and of a dtype that NCCL supports.

*lazy*: a send or a receive outside of a batch uses a communicator of its two ranks. *connecting at first use*: the host waits for all
members when a communicator is first used. *device_id*: communicators connect when they are created, and all transfers of a group share one.
*in order*: a device runs its operations one at a time, in issue order (NCCL may run two at once if the device has room for both kernels).

{_table(programs)}
## Problems

{_findings(programs)}
## Large plans by their distinct ranks

Ranks of one pipeline position do the same, each in its own groups, so one rank of each position is recorded. At the first and the last
position, ranks at both ends and in the middle of every axis are recorded, too, and must do the same. They run at their real sizes, on
tensors without values.

| model | devices | plan | ranks | operations | problems | time | memory of a process |
|---|---|---|---|---|---|---|---|
{"".join(map(_large, large))}
## Injected faults

{sum(map(passed, faults))} of {len(faults)} are detected.

| fault | program | detected as |
|---|---|---|
{"".join(map(_fault, faults))}
Made by `make report NAME=collectives` with torch {versions}, on CPUs, from the lines of [collectives.jsonl](collectives.jsonl), each with a
fingerprint of the code that produced it: {codes}. Do not edit.
"""


def _table(programs: list[Line]) -> str:
    """For every model, its programs by the number of ranks."""
    devices = sorted({line["devices"] for line in programs})
    text = f"| model | {' | '.join(f'{n} ranks' for n in devices)} |\n|---|{'---|' * len(devices)}\n"
    for model in dict.fromkeys(line["model"] for line in programs):
        cells = []
        for count in devices:
            mine = [line for line in programs if line["model"] == model and line["devices"] == count]
            wrong = sum(not passed(line) for line in mine)
            cells.append("" if not mine else f"{len(mine)}{f', **{wrong} not clean**' if wrong else ''}")
        text += f"| {model} | {' | '.join(cells)} |\n"
    return text


def _findings(programs: list[Line]) -> str:
    wrong = [line for line in programs if not passed(line)]
    if not wrong:
        return "None.\n"
    return "".join(
        f"* {line['model']}, {line['kind']}: {line.get('failure') or line['findings'][0]}\n" for line in wrong
    )


def _large(line: Line) -> str:
    if "failure" in line:
        return f"| {line['model']} | {line['kind']} | | | | **{line['failure']}** | | |\n"
    found = "; ".join(line["findings"]) or "none"
    cells = [line["model"], f"{line['devices']:,}", line["plan"], str(line["ranks"]), f"{line['operations']:,}", found]
    return f"| {' | '.join(cells)} | {line['check_s']:.0f} s | {size(line['memory_bytes'])} |\n"


def _fault(line: Line) -> str:
    found = (line.get("failure") or "; ".join(line["found"]) or "**nothing**").replace("|", "/")
    return f"| {line['kind'].removeprefix('fault: ')} | {line['model']} | {found} |\n"
