"""Hangs and waits of emitted programs under NCCL, before they were fixed and now: ``make report NAME=collective-waits``.

Programs are emitted, every rank is recorded on CPUs (``autopar.verify.recording``), and the events' order under NCCL's rules is computed
(``autopar.checks.nccl.graph``). *Before*: the emitted folder is changed back to what programs did (``plant``).

*Rings.* Ring attention over two axes: events that never come where communicators are made at their first use.
*Chimera.* The same where a device runs its collectives strictly in the order of their issue.
*Makespans.* Seconds of a step if a stage's forward pass takes 1 s, its backward pass 2 s, and a transfer those of ``LINKS``.
*Files.* Descriptors of the process group of asynchronous saves.
*FSDP2.* The same of four microbatches under ZeRO 3, with the seconds of a layer and of its collectives.

One JSON line a case, with a fingerprint of the code: a run does what the file lacks for this code. Ends with status 1 if a case fails, or
if a program as it is now has events that never come.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_scale import measure_files
from collective_waits_page import page, passed
from exactness import KINDS
from places import EVIDENCE, TESTS, file_of
from recorded import RINGS, Case, captured
from results import Results, options, quiet

from autopar.checks.nccl.graph import MODES, EventGraph, Key, NcclMode
from autopar.checks.nccl.records import TRANSFERS, Operation, RankTrace
from autopar.errors import LaunchError
from autopar.schedules import Schedule
from autopar.schedules.step_time import timeline
from autopar.verify import kind
from autopar.verify.recording import Recorded, Workers, record, record_folder

RESULTS = EVIDENCE / "collective-waits.jsonl"
Line = dict[str, Any]
PARTS = ("rings", "chimera", "makespans", "files", "fsdp")
SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Of a stage's actions (``autopar.program.tracing.WORDS``)."""
LINKS = (0.02, 0.5)
"""Seconds of a transfer between two stages."""
COLLECTIVE_SECONDS = {"all_gather": 0.5, "reduce_scatter": 1.0}
"""Of a layer's parameters and gradients under FSDP2."""


# -- changes of emitted folders ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """``old`` is replaced by ``new`` in the program's ``file``; without ``old``, ``new`` is added at its end. Folders without the file
    ``having`` are left as they are."""

    file: str
    old: str
    new: str
    having: str = ""

    def make(self, folder: Path) -> None:
        if self.having and not file_of(folder, self.having).exists():
            return
        path = file_of(folder, self.file)
        text = path.read_text()
        if self.old:
            assert text.count(self.old) == 1, (self.file, self.old, text.count(self.old))
            path.write_text(text.replace(self.old, self.new))
        else:
            path.write_text(f"{text}\n\n{self.new}")


RING_BEFORE = (
    Edit("world.py", "    _warm_up(groups, here)\n", ""),
    Edit(
        "kernels_ring.py",
        "",
        '''\
def _rearrange(self, parts, held, wanted):
    """Batches of transfers, on the ranks alone that move something."""
    me = self.index(self.coordinates)
    mine = dict(zip(held[me], (part.contiguous() for part in parts), strict=True))
    where = {part: self.at(i) for i, numbers in enumerate(held) for part in numbers}
    goal = {part: self.at(i) for i, numbers in enumerate(wanted) for part in numbers}
    for axis, group in enumerate(self.groups):
        operations, arrived = [], {}
        for part in sorted(where):
            source = where[part]
            target = (*source[:axis], goal[part][axis], *source[axis + 1 :])
            where[part] = target
            if source == target:
                continue
            if source == self.coordinates:
                operations.append(dist.P2POp(dist.isend, mine.pop(part), group=group, group_peer=target[axis]))
            elif target == self.coordinates:
                arrived[part] = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.irecv, arrived[part], group=group, group_peer=source[axis]))
        _wait(dist.batch_isend_irecv(operations) if operations else [])
        mine |= arrived
    return [mine[part] for part in wanted[me]]


Ring.rearrange = _rearrange
''',
    ),
)
"""No group is used before the first step, and ring attention exchanges chunks by batches on the ranks that move one."""

CHIMERA_BEFORE = (
    Edit(
        "chimera.py",
        "links={dist.get_group_rank(group, rank): link for rank, link in world.links.items()}",
        "links=group",
    ),
    Edit("chimera.py", "                self._reduce(step.stage)\n", "                pass\n"),
    Edit(
        "chimera.py",
        "",
        """\
def _transfer(self, way, tensors, step):
    moves = [dist.P2POp(way, tensor, group=self._links, group_peer=step.peer) for tensor in tensors]
    return dist.batch_isend_irecv(moves) if moves else []


ScheduleChimera._transfer = _transfer
""",
    ),
    Edit("reductions.py", "(found, []) if chimera else ({}, ordered)", "({}, ordered)"),
    Edit("processes.py", "mine = dist.group.WORLD\n", "mine = dist.new_group(row, timeout=self._timeout)\n"),
    Edit("fsdp.py", "tuple(axis for axis in placement.copies if axis != MIRROR)", "placement.copies", having="fsdp.py"),
    Edit(
        "world.py",
        "tuple(axis for axis in own.copies if axis != MIRROR or own.zero < 2)",
        "own.copies",
        having="fsdp.py",
    ),
)
"""Transfers are one-sided batches on the pipeline's group, and the sums over both copies start under the backward pass of each, those of
layers under FSDP2 by FSDP2 itself. A group of all ranks is not the world's."""

NO_LINKS = (Edit("world.py", "if program.has_links else {}", "if False else {}"),)
"""All transfers of a pipeline are on its group."""

MARKED = (
    Edit(
        "tracing.py",
        "",
        f"""\
import functools


@functools.cache
def _alone():
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def begin_step():
    dist.all_reduce(torch.zeros(1), group=_alone())


def compute(kind):
    dist.all_reduce(torch.zeros({SECONDS}[kind]), group=_alone())
""",
    ),
    Edit(
        "trainer.py",
        "",
        """\
from .tracing import begin_step

_step = Trainer.step


def _begun(self, batch):
    begin_step()
    return _step(self, batch)


Trainer.step = _begun
""",
    ),
)
"""A computation is a reduction by a rank alone of as many numbers as it takes seconds; another one marks the start of a step."""

TIMED = (
    *MARKED,
    Edit(
        "tracing.py",
        "",
        """\
import contextlib


@contextlib.contextmanager
def action(kind, stage, microbatch):
    yield
    compute(kind)
""",
    ),
)
"""A stage's actions are computations, which begin when what they need has arrived."""

LAYERS_TIMED = (
    *MARKED,
    Edit(
        "fsdp.py",
        "",
        """\
from .tracing import compute


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        compute("B")
        return grad


_init = ShardedGroup.__init__


def _timed_init(self, *args):
    _init(self, *args)
    forward = self.module.forward

    def timed(*args, **options):
        compute("F")
        return _Backward.apply(forward(*args, **options)).clone()

    self.module.forward = timed


ShardedGroup.__init__ = _timed_init
""",
    ),
)
"""Layers under FSDP2 are computations, between the gather of their parameters and the reduction of their gradients."""


def plant(edits: Sequence[Edit], folder: Path) -> None:
    for edit in edits:
        edit.make(folder)


# -- time ------------------------------------------------------------------------------------------------------------------


def planted_by(operation: Operation) -> str:
    """The function that issued an operation."""
    return operation.place.split(",")[0].rpartition(" in ")[2]


def last_step(trace: RankTrace) -> RankTrace:
    """What a rank does from the start of its last step. In the first one torch's pipelines connect."""
    events = list(trace.events)
    begins = [i for i, each in enumerate(events) if isinstance(each, Operation) and planted_by(each) == "begin_step"]
    return replace(trace, events=tuple(events[begins[-1] :]))


class Timed(EventGraph):
    """A graph of the last step of ``traces`` in which operations take ``seconds``, by their kind, and computations theirs (``MARKED``)."""

    def __init__(self, traces: Mapping[int, RankTrace], mode: NcclMode, seconds: Mapping[str, float]) -> None:
        self._of_kind = seconds
        self._seconds: dict[int, float] = {}
        self.computed_s: dict[int, float] = dict.fromkeys(traces, 0.0)
        super().__init__({rank: last_step(trace) for rank, trace in traces.items()}, mode)

    def issued(self, key: Key, number: int, rank: int, issued: Any) -> None:
        super().issued(key, number, rank, issued)
        operation = issued.operation
        self._seconds[issued.end] = self._of_kind.get(operation.kind, 0.0)
        if planted_by(operation) == "compute":
            (operand,) = operation.operands
            self._seconds[issued.end] = operand.shape[0]
            self.computed_s[rank] += operand.shape[0]

    def makespan(self) -> float:
        """The longest path, in seconds."""
        after: list[list[int]] = [[] for _ in self.nodes]
        for node, before in enumerate(self.before):
            for each in before:
                after[each].append(node)
        missing = [len(before) for before in self.before]
        ready = [node for node, count in enumerate(missing) if not count]
        ends, done = [0.0] * len(self.nodes), 0
        while ready:
            node = ready.pop()
            done += 1
            ends[node] += self._seconds.get(node, 0.0)
            for each in after[node]:
                ends[each] = max(ends[each], ends[node])
                missing[each] -= 1
                if not missing[each]:
                    ready.append(each)
        assert done == len(self.nodes), "events that never come have no time"
        return max(ends)


# -- lines -----------------------------------------------------------------------------------------------------------------


def traces_of(case: Case, edits: Sequence[Edit], workers: Workers) -> Mapping[int, RankTrace]:
    given = captured(case.model)
    plan = case.plan(given.graph)
    recorded = record(given.graph, plan, given.state, given.batch, workers, case.recipe, partial(plant, edits))
    return checked(recorded)


def checked(recorded: Recorded) -> Mapping[int, RankTrace]:
    """The traces of all ranks, if none has failed."""
    if recorded.failures:
        raise LaunchError("; ".join(f"rank {rank}: {text}" for rank, text in recorded.failures.items()))
    return recorded.late


def stuck_in(traces: Mapping[int, RankTrace]) -> Line:
    """How many events there are, and how many never come in each mode."""
    graphs = {mode.name: EventGraph(traces, mode) for mode in MODES}
    return {
        "events": len(graphs[LAZY.name].nodes),
        "stuck": {name: len(graph.stuck()) for name, graph in graphs.items()},
    }


def hang_line(case: Case, edits: Sequence[Edit], workers: Workers) -> Line:
    """Events that never come, before and now."""
    found = {name: stuck_in(traces_of(case, own, workers)) for name, own in (("before", edits), ("after", ()))}
    return {"ranks": case.kind.devices, **found}


def makespan_line(case: Case, edits: Sequence[Edit], before: NcclMode, workers: Workers) -> Line:
    """Seconds of a step by those of a transfer: before, in the mode ``before``, and now, with or without ``device_id``, whichever takes
    longer. ``schedule_s`` are the seconds of the schedule's order without transfers, as prices have them."""
    plan = case.plan(captured(case.model).graph)
    schedule = Schedule(plan.schedule, case.kind.options["pipeline"], plan.microbatches, plan.chunks)
    forward, backward, weight = ([SECONDS[kind]] * schedule.stages for kind in "FBW")
    ends_s = [span.stop_s for span in timeline(schedule, forward, backward, weight)]
    line: Line = {"ranks": case.kind.devices, "microbatches": plan.microbatches, "schedule_s": max(ends_s)}
    for name, own, modes in (("before", edits, [before]), ("after", (), [LAZY, SHARED])):
        traces = traces_of(case, (*TIMED, *own), workers)
        line[name] = {}
        for link_s in LINKS:
            graphs = [Timed(traces, mode, dict.fromkeys(TRANSFERS, link_s)) for mode in modes]
            line[name][str(link_s)] = round(max(graph.makespan() for graph in graphs), 2)
            computed = {seconds for graph in graphs for seconds in graph.computed_s.values()}
            assert computed == {schedule.chunks * plan.microbatches * (SECONDS["F"] + SECONDS["B"])}, computed
    return line


def files_line(processes: int) -> Line:
    found = measure_files(processes)
    return {name: {"descriptors": found[name]} for name in ("before", "after")}


def fsdp_line(microbatches: int, workers: Workers) -> Line:
    """Seconds of a step under ZeRO 3 on two ranks. Before, each backward pass was FSDP2's last one: a microbatch ended with its last
    reduction, and began with its first gather."""
    sys.path.append(str(TESTS / "program"))
    from test_overlap import ALWAYS_LAST, LAYERS, NO_EVENT, NOT_KEPT, Blocks, program, rows

    computed_s = microbatches * LAYERS * (SECONDS["F"] + SECONDS["B"])
    line: Line = {"layers": LAYERS, "times_s": SECONDS | COLLECTIVE_SECONDS, "computed_s": computed_s}
    model, batch = Blocks(), dict(zip(("x", "targets"), rows(), strict=True))
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        torch.save(model.state_dict(), home / "initial.pt")
        for when, faults in (("before", (ALWAYS_LAST, NOT_KEPT, NO_EVENT)), ("after", ())):
            folder = Path(program(home / when, faults=faults, model=model, data=2, zero=3, microbatches=microbatches))
            plant(LAYERS_TIMED, folder)
            recorded = record_folder(folder, home / "initial.pt", batch, 2, workers)
            timed = Timed(checked(recorded), LAZY, COLLECTIVE_SECONDS)
            assert set(timed.computed_s.values()) == {computed_s}, timed.computed_s
            line[when] = {"seconds": timed.makespan()}
    return line


# -- cases -----------------------------------------------------------------------------------------------------------------

(LAZY,) = (mode for mode in MODES if mode.name == "lazy")
(SHARED,) = (mode for mode in MODES if mode.name == "device_id")

NAMES = {
    "chimera": "Chimera",
    "dualpipev": "DualPipeV",
    "interleaved-1f1b": "interleaved 1F1B",
    "zbv": "ZBV",
    "zero-bubble": "zero bubble",
}


def deep(schedule: str, ranks: int, chunks: int = 1, microbatches: int = 16, **more: Any) -> Case:
    """16 layers in ``ranks`` times ``chunks`` stages."""
    axes = "".join(f" x {axis} {size}" if axis != "zero" else f", zero {size}" for axis, size in more.items())
    name = f"pipeline {ranks}, {NAMES[schedule]}{f' of {chunks} chunks' if chunks > 1 else ''}{axes}"
    each = kind(name, pipeline=ranks, chunks=chunks, microbatches=microbatches, schedule=schedule, **more)
    return Case("deep", each)


RING_CASES = tuple(Case("llama", each) for each in RINGS if 16 % each.devices == 0)  # a sequence of 16
CHIMERA_CASES = (
    *(Case("mixtral" if "expert" in each.name else "llama", each) for each in KINDS if "Chimera" in each.name),
    *(deep("chimera", 4, microbatches=8, data=2, zero=zero) for zero in (0, 2, 3)),
    deep("chimera", 4, microbatches=8, tensor=2),
    *(deep("chimera", ranks) for ranks in (8, 16)),
)
SCHEDULES = (
    deep("interleaved-1f1b", 8, 2),
    deep("zero-bubble", 8, 2),
    deep("dualpipev", 8, 2),
    deep("zbv", 8, 2),
)
BOTH_DIRECTIONS = tuple(deep("chimera", ranks) for ranks in (8, 16))

Task = tuple[str, str, Callable[[], Line]]


def tasks(workers: Workers) -> Iterator[Task]:
    """The part, the case and the work of every line."""
    for case in RING_CASES:
        yield "rings", case.key[1], partial(hang_line, case, RING_BEFORE, workers)
    for case in CHIMERA_CASES:
        yield "chimera", case.key[1], partial(hang_line, case, CHIMERA_BEFORE, workers)
    for case in SCHEDULES:
        yield "makespans", case.key[1], partial(makespan_line, case, NO_LINKS, SHARED, workers)
    for case in BOTH_DIRECTIONS:
        yield "makespans", case.key[1], partial(makespan_line, case, CHIMERA_BEFORE, LAZY, workers)
    for processes in (4, 8, 16):
        yield "files", f"{processes} processes", partial(files_line, processes)
    yield "fsdp", "data 2, zero 3, 4 microbatches", partial(fsdp_line, 4, workers)


def line_of(part: str, case: str, work: Callable[[], Line]) -> Line:
    """One line of the results; what goes wrong is its ``failure``."""
    start_s = time.perf_counter()
    line: Line = {"part": part, "case": case}
    try:
        line |= work()
    except Exception as error:  # whatever it is, it is this case's result
        line |= {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    return line | {"seconds": round(time.perf_counter() - start_s, 1), "torch": torch.__version__}


def arguments() -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--only", choices=PARTS, help="this part only")
    parser.add_argument("--cases", metavar="TEXT", default="", help="cases whose name has this text only")
    parser.add_argument("--page", action="store_true", help="write the page from the lines, and do nothing else")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    results = Results(args.results, ("part", "case"), passed)
    skipped, bad = results.kept(args), 0
    with Workers() as workers:
        every = list(tasks(workers))
        for part, case, work in [] if args.page else every:
            if (part, case) in skipped or args.only not in (None, part) or args.cases not in case:
                continue
            line = line_of(part, case, work)
            results.append(line)
            bad += not passed(line)
            print(json.dumps(line)[:900], flush=True)
    lines = results.tidy((part, case) for part, case, _ in every)
    args.results.with_suffix(".md").write_text(page(lines))
    print(f"{len(lines)} lines, {sum(not passed(line) for line in lines)} not as they should be: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
