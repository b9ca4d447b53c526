"""The page of hangs and waits, before and now, from its lines."""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]
AT_FIRST_USE = "lazy, connecting at first use"
IN_ORDER = ("in order", "in order with device_id")


def passed(line: Line) -> bool:
    """Whether a case was measured, and the program as it is now has no event that never comes."""
    return "failure" not in line and not any(line["after"].get("stuck", {}).values())


def page(lines: list[Line]) -> str:
    """The results as a document."""
    parts: dict[str, list[Line]] = {}
    for line in lines:
        parts.setdefault(line["part"], []).append(line)
    versions = ", ".join(sorted({line["torch"] for line in lines}))
    codes = ", ".join(f"`{code}`" for code in sorted({line.get("code", "") for line in lines}))
    tables = {part: "".join(map(_ROWS[part], parts.get(part, []))) for part in _ROWS}
    return f"""# Hangs and waits under NCCL, before and now

Every rank of a program is recorded on CPUs without communication, for two steps, and the order of its events follows from NCCL's rules, as
in `autopar verify --collectives`. *Before* are today's programs, changed back in the places that each section names.

## Ring attention over two axes

Events that never come if the host waits for all members of a communicator when it is first used. Before, no group was used before the first
step, and chunks were exchanged on entry to the ring by batches of transfers, on those ranks alone that move one. Where no event was lost,
the ranks that move nothing come to their first use of the group in time, at a later step of the ring.

| rings | ranks | events, before | never come | events, now | never come |
|---|---|---|---|---|---|
{tables["rings"]}
## Chimera

Events that never come if a device runs its collectives and transfers one after the other, in the order of their issue, without or with
`device_id`. NCCL runs two communicators at a time only where the device has room for both kernels. Before, the sums over both copies of a
stage started under the backward pass of each copy, so that two ranks issued sums and transfers in opposite orders, and transfers were
one-sided batches on the pipeline's group. Now sums and transfers are in one order on all ranks.

| program | ranks | events, before | never come | events, now | never come |
|---|---|---|---|---|---|
{tables["chimera"]}
## Seconds of a step

The longest path through the events of a step if the forward pass of a stage takes 1 s, its backward pass 2 s (in two halves of 1 s where
the schedule splits it), and a transfer the seconds in the table's head. Before, Chimera's transfers were batches, which a group runs on one
communicator in the order of their issue, and those of torch's schedules were too under a torch before 2.13, or with `device_id`; the column
shows that. Now each pair of ranks that exchanges tensors has a group, under any torch. *Order alone* is the schedule without transfers, as
it is priced.

| schedule | ranks | microbatches | order alone | 0.02 s, before | now | 0.5 s, before | now |
|---|---|---|---|---|---|---|---|
{tables["makespans"]}
## Descriptors of asynchronous saves

Descriptors that the process group of the thread that saves opens in a process. Before, every process was connected to every other one; now
two processes connect when they exchange something.

| group of | before | now |
|---|---|---|
{tables["files"]}
## FSDP2 between microbatches

The longest path in the same way on two ranks, through eight layers: the forward pass of a layer takes 1 s, its backward pass 2 s, a gather
of its parameters 0.5 s and a reduction of its gradients 1 s, on the streams that FSDP2 gives them. Before, FSDP2 took each backward pass
for the step's last one: the compute stream waited for the last reduction of a microbatch, and for the first gather of the next one.

| program | computation | before | now |
|---|---|---|---|
{tables["fsdp"]}
Made by `make report NAME=collective-waits` with torch {versions}, on CPUs, from the lines of
[collective-waits.jsonl](collective-waits.jsonl), which have a fingerprint of the code that they are of: {codes}. Do not edit.
"""


def _row(line: Line, *cells: Any) -> str:
    found = (f"**{line['failure'].replace('|', '/')}**",) if "failure" in line else cells
    return f"| {' | '.join([line['case'], *map(_text, found)])} |\n"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _stuck(line: Line, *modes: str) -> str:
    """The line's row: events that never come in each of ``modes``, before; and now, in any mode."""
    if "failure" in line:
        return _row(line)
    before, after = line["before"], line["after"]
    lost = ", ".join(dict.fromkeys(_text(before["stuck"][mode]) for mode in modes))
    return _row(line, line["ranks"], before["events"], lost, after["events"], max(after["stuck"].values()))


def _rings(line: Line) -> str:
    return _stuck(line, AT_FIRST_USE)


def _chimera(line: Line) -> str:
    return _stuck(line, *IN_ORDER)


def _makespan(line: Line) -> str:
    if "failure" in line:
        return _row(line)
    times = [line[when][link] for link in line["before"] for when in ("before", "after")]
    return _row(line, line["ranks"], line["microbatches"], line["schedule_s"], *times)


def _files(line: Line) -> str:
    return _row(line) if "failure" in line else _row(line, *(line[when]["descriptors"] for when in ("before", "after")))


def _fsdp(line: Line) -> str:
    if "failure" in line:
        return _row(line)
    return _row(line, line["computed_s"], *(line[when]["seconds"] for when in ("before", "after")))


_ROWS = {"rings": _rings, "chimera": _chimera, "makespans": _makespan, "files": _files, "fsdp": _fsdp}
