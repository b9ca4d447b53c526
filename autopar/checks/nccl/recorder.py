"""A recording process group: a process acts as any rank of a world of any size, on CPUs, without communication.

``Recorder(rank, world).start()`` makes that group the default and replaces ``torch.cpu``'s streams and events by recording ones. Every
collective then becomes an event of the rank's trace, whether the program, FSDP2, DTensor or a pipeline issues it. Results are computed from
this rank's operands, except those that ``objects`` exchanges between ranks; received tensors are random, or ones for integers.

Async results are *late*: poisoned (NaN) from the issue to ``wait``, which checks that neither they nor the operands were written meanwhile.
With ``late=False`` results are immediate. A late and an immediate run give the same values unless the program reads a result too early.
"""

from __future__ import annotations

import functools
import itertools
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.checks.nccl.group import BACKEND, RecordingGroup
from autopar.checks.nccl.objects import Objects
from autopar.checks.nccl.places import place
from autopar.checks.nccl.records import (
    Communicator,
    Event,
    GroupMade,
    HostSync,
    Operation,
    RankTrace,
    TensorRange,
)
from autopar.checks.nccl.streams import Stream, StreamEvent
from autopar.checks.nccl.works import IssueRequest, LateWork
from autopar.torch_private import is_fake

_SYNCS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")


ALIGNED = 16  # NCCL's fast paths load 16 bytes at a time


def operand(tensor: Tensor) -> TensorRange:
    offset = int(tensor.storage_offset()) * tensor.element_size() % ALIGNED if tensor.numel() else 0
    return TensorRange(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.is_contiguous(), offset)


class Recorder:
    """Records this process's rank. It replaces torch's functions permanently."""

    def __init__(self, rank: int, world: int, *, late: bool = True, objects: Objects | None = None) -> None:
        self.rank, self.world, self.late = rank, world, late
        self.objects = objects or Objects(None)
        self.events: list[Event] = []
        self.races: list[str] = []
        self.side_threads: set[str] = set()
        self.groups: list[RecordingGroup] = []
        self._issued = self._batches = self._events = 0
        self._batch = 0
        self._main = self._turn = threading.get_ident()  # threads that take turns count as the main one in their turn
        self._threads: dict[int, int] = {}
        self.in_thread: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns the context in which another thread must run ops (``sizes``)."""
        self._lock = threading.Lock()
        self.streams = [0]  # numbers of the entered streams; the last is the current one

    def start(self) -> None:
        """Initialize ``torch.distributed`` as rank ``rank`` of ``world``."""
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, self._make_group, extended_api=True, devices=["cpu"])
        self._replace_streams()
        self._replace_syncs()
        self._replace_functions()
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=self.rank, world_size=self.world)

    def trace(self, values: dict[str, str] | None = None, finite: bool = True) -> RankTrace:
        return RankTrace(
            self.rank,
            self.world,
            tuple(self.events),
            tuple(dict.fromkeys(self.races)),
            values or {},
            finite,
            tuple(sorted(self.side_threads)),
        )

    def thread(self) -> int:
        own = threading.get_ident()
        return 0 if own == self._turn else self._threads.setdefault(own, len(self._threads) + 1)

    def follow(self, turns: Any) -> None:
        """Count the two threads of a pair (``turns`` is the runtime's class of their turns) as the main one, each in its turn: what
        they issue has one order. A thread that issues something out of turn is another thread."""
        run, wait = turns.run, turns.wait

        def awaited(pair: Any, side: int) -> None:
            wait(pair, side)
            self._turn = threading.get_ident()

        def running(pair: Any, side: int, compute: Callable[[], None]) -> None:
            beside = threading.get_ident() != self._main
            self._turn = threading.get_ident() if pair.running == side else self._turn
            with self.in_thread() if beside else nullcontext():
                run(pair, side, compute)
            self._turn = self._main if beside else self._turn

        turns.run, turns.wait = running, awaited

    def new_event(self) -> int:
        self._events += 1
        return self._events

    def host_sync(self) -> None:
        """Record that the host waits for the current stream, except before the first operation."""
        if self._issued:
            self.events.append(HostSync(self.streams[-1], place()))

    # -- operations ----------------------------------------------------------------------------------------------------

    def issue(self, group: RecordingGroup, request: IssueRequest) -> LateWork:
        """Record an operation of ``group``, and return its work."""
        where = place()
        thread = self.thread()
        name = f"{request.kind} at {where}"
        if thread:
            self.side_threads.add(f"{request.kind} of {group.communicator} at {where}")
        with self._lock:
            self._issued += 1
            index = self._issued
            self.events.append(
                Operation(
                    index,
                    group.communicator,
                    request.kind,
                    tuple(map(operand, request.must_match)),
                    request.detail,
                    request.root,
                    request.splits,
                    self.streams[-1],
                    self._batch,
                    thread,
                    where,
                )
            )
        if any(map(is_fake, (*request.results, *request.operands))):
            return LateWork(self, index, name, (), (), list)
        if request.exchanged is not None:
            return LateWork(self, index, name, request.operands, request.results, request.exchanged)
        values = [] if request.values is None else request.values()
        return LateWork(self, index, name, request.operands, request.results, lambda: values)

    def random_like(self, like: Tensor, source: str) -> Tensor:
        """Return the values that ``like`` receives from ``source``: random, but equal in every call, as a recomputed layer requires."""
        if not like.is_floating_point():
            return torch.ones_like(like)
        seed = zlib.crc32(f"{source} {tuple(like.shape)}".encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    def batch(self, transfers: Sequence[dist.P2POp]) -> list[dist.Work]:
        """Record ``batch_isend_irecv``, one NCCL operation on the group's communicator."""
        self._batches += 1
        self._batch = self._batches
        try:
            works = []
            for each in transfers:
                peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                works.append(each.op(each.tensor, group=each.group, tag=each.tag, **peer))
            return [work for work in works if work is not None]
        finally:
            self._batch = 0

    def _make_group(self, options: Any, _: Any = None) -> RecordingGroup:
        members = tuple(options.global_ranks_in_group or range(options.group_size))
        group = RecordingGroup(self, options.group_rank, Communicator(str(options.group_id), members, self._backend))
        self.groups.append(group)
        self.events.append(GroupMade(group.communicator))
        return group

    # -- replacements of torch's functions -----------------------------------------------------------------------------

    _backend = "nccl"  # the backend of the group that ``new_group`` creates

    def _replace_functions(self) -> None:
        new_group = dist.new_group

        def recorded_group(
            ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
        ) -> Any:
            self._backend = "gloo" if backend == "gloo" else "nccl"
            try:
                return new_group(ranks, timeout, None, *args, **options)
            finally:
                self._backend = "nccl"

        replaced: dict[str, Callable[..., Any]] = {"new_group": recorded_group, "batch_isend_irecv": self.batch}
        replaced |= self.objects.functions(self)
        for name, function in replaced.items():
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, function)

    def _replace_syncs(self) -> None:
        for name in _SYNCS:
            setattr(Tensor, name, self._syncing(getattr(Tensor, name)))
        torch.equal = self._syncing(torch.equal)

    def _syncing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            if self.thread() == 0:
                self.host_sync()
            return function(*args, **options)

        return wrapped

    def _replace_streams(self) -> None:
        recorder = self
        default = Stream(recorder, 0)
        streams = [default]
        count = itertools.count(1)

        class Current:
            def __init__(self, stream: Stream | None) -> None:
                self.stream = stream or streams[-1]

            def __enter__(self) -> None:
                streams.append(self.stream)
                recorder.streams.append(self.stream.number)

            def __exit__(self, *_: object) -> None:
                streams.pop()
                recorder.streams.pop()

        replaced: dict[str, Any] = {
            "Stream": lambda *_, **__: Stream(recorder, next(count)),
            "Event": lambda *_, **__: StreamEvent(recorder, recorder.new_event()),
            "current_stream": lambda *_: streams[-1],
            "default_stream": lambda *_: default,
            "stream": Current,
        }
        for name, value in replaced.items():
            setattr(torch.cpu, name, value)
