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

Every rank of a program is recorded on CPUs without communication, for two steps, and a simulation of NCCL's rules orders the events, as in
`autopar verify --collectives`. No GPU is involved. *Now* is the emitted program; *before* is the same program with the change that each
section describes reverted.

## Ring attention over two axes

Events that never complete if the host waits for all members of a communicator at its first use. Before, no group was used before the first
step, and on entry to the ring only the ranks that move a chunk issued a batch of transfers. In the cases without a hang, the other ranks
first use the group at a later step of the ring, in time.

| rings | ranks | events, before | hang | events, now | hang |
|---|---|---|---|---|---|
{tables["rings"]}
## Chimera

Events that never complete if a device runs its collectives and transfers one at a time, in issue order, without or with `device_id`. (NCCL
runs two communicators concurrently only if the device has room for both kernels.) Before, the gradient all-reduces over both copies of a
stage started during the backward pass of each copy, so two ranks issued all-reduces and transfers in opposite orders, and transfers were
one-sided batches on the pipeline's group. Now all ranks issue all-reduces and transfers in the same order.

| program | ranks | events, before | hang | events, now | hang |
|---|---|---|---|---|---|
{tables["chimera"]}
## Waits in pipeline schedules

The critical path of a step in seconds, if the forward pass of a stage takes 1 s, its backward pass 2 s (1 s each for input and weight
gradients where the schedule splits them), and a transfer 0.02 s or 0.5 s. Before, transfers were batches, which a group runs on one
communicator in issue order: those of Chimera always, those of torch's schedules with torch before 2.13 or with `device_id`. Now each pair
of ranks that exchanges tensors has its own group, with any torch. *Without transfers* is the critical path of the schedule alone, which the
cost model uses.

| schedule | ranks | microbatches | without transfers | 0.02 s, before | now | 0.5 s, before | now |
|---|---|---|---|---|---|---|---|
{tables["makespans"]}
## File descriptors of asynchronous saves

The number of file descriptors in each process that the process group of the saving thread opens. Before, every process was connected to
every other one; now two processes connect when they exchange data.

| group of | before | now |
|---|---|---|
{tables["files"]}
## FSDP2 between microbatches

The critical path of a step of eight layers on two ranks, in seconds: the forward pass of a layer takes 1 s, its backward pass 2 s, an
all-gather of its parameters 0.5 s and a reduce-scatter of its gradients 1 s, on FSDP2's streams. Before, FSDP2 treated each backward pass
as the last one of the step: the compute stream waited for the last reduction of a microbatch, and for the first all-gather of the next
one.

| program | computation alone | before | now |
|---|---|---|---|
{tables["fsdp"]}
Made by `make report NAME=collective-waits` with torch {versions}, on CPUs, from the lines of
[collective-waits.jsonl](collective-waits.jsonl), each with a fingerprint of the code that produced it: {codes}. Do not edit.
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
