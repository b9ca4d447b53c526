"""Watches one rank's training: signals that ask it to stop, ranks that die, and sections that take too long.

A thread sends the other ranks of its node a heartbeat once a second, with the position of its main thread: the section, the collective
and the layer. One rank of each node, its speaker, writes the node's heartbeats into torchrun's rendezvous store, and reads those of the
next node: three requests per beat and one connection per node. With more than ``BEATS_PER_S`` nodes the beats are
further apart. If a speaker falls silent, the next rank of its node takes over. A second thread, which never waits for the network, ends the
process if the store doesn't answer while no step ends; a slow store doesn't end a training that makes progress. Whatever goes
wrong, one rank reports it in one sentence, and every rank exits with status 1, or torchrun ends it after another rank has exited.

The position of the main thread is its Python stack, which is the same for gloo and NCCL, and the last layer that it entered. On a
GPU the host runs ahead of the device: there the layer is the last one whose work the host has started.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .host import AsyncHostCopy
from .spec import layers_of

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""A scheduler sends SIGTERM or SIGUSR1 before it takes the machine away, a user SIGINT with Ctrl-C, a terminal SIGHUP when it closes."""

_PRINT_DELAY_S = 1.0  # other ranks wait before they print an error: if rank 0 has it too, torchrun ends them first
_ERROR_NAME = re.compile(r"\w+(Error|Exit): ")

BEATS_PER_S = 2000
"""The limit of beats per second to the store, of all nodes: each is three requests of 11 microseconds, together 7 % of a processor."""

_BLOCK = 256  # keys of the store that are read in one request
_HANDOVER = 3  # if the node's speaker is silent for this many beats, another rank reports a problem in its place

_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "NCCL error",
    "ChildFailedError",
)
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py", "spmd_types/")
_PIPELINE = "torch/distributed/pipelining/"
_LIBRARIES = ("torch/", "spmd_types/", "python3", "<frozen")


def is_consequence(error: str) -> bool:
    """Return whether an error's text only says that another rank went away."""
    return any(sign in error for sign in _CONSEQUENCES)


def interval_s(nodes: int, lost_after_s: float) -> float:
    """Return the seconds between two beats: one, less for a short ``lost_after_s``, more to keep many nodes within ``BEATS_PER_S``."""
    return max(min(1.0, lost_after_s / 6), nodes / BEATS_PER_S)


class NodeHeartbeats:
    """Exchanges the heartbeats of one node's ranks as datagrams; the lowest live rank is the node's speaker.

    ``index`` (of the node), ``count`` (of nodes) and ``ranks`` come from torchrun's environment. Under another launcher each rank is its
    own node, because its processes may be unable to reach each other by a local socket.
    """

    def __init__(self, token: str, rank: int, world: int) -> None:
        self.rank, self.index, self.count, self.ranks = rank, rank, world, [rank]
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if all(name in os.environ for name in names):
            self.index, self.count, local, size = (int(os.environ[name]) for name in names)
            # torchrun numbers a node's ranks one after the other
            self.ranks = list(range(rank - local, rank - local + size))
        self.reports: dict[int, list[Any]] = {}
        self.problem: str | None = None  # the problem that another rank of the node has noticed
        self.ended = False  # whether another rank has reported, so that this one must exit
        self._heard = dict.fromkeys(self.ranks, time.monotonic())
        self._token = token
        if len(self.ranks) > 1:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self._address(rank))
            self._socket.setblocking(False)

    def _address(self, rank: int) -> str:
        return f"\0autopar-watch/{self._token}/{rank}"  # Linux's abstract names need no file

    def send(self, report: list[Any], problem: str | None, ended: bool = False) -> None:
        """Send the other ranks of the node a heartbeat: this rank's report, the problem that it noticed, and whether they must exit."""
        self.reports[self.rank], self._heard[self.rank] = report, time.monotonic()
        message = json.dumps([self.rank, report, problem, ended]).encode()
        for rank in self.ranks:
            if rank != self.rank:
                with contextlib.suppress(OSError):  # the other rank has ended, or hangs and its queue is full
                    self._socket.sendto(message, self._address(rank))

    def listen(self) -> None:
        """Read the heartbeats of the node's other ranks."""
        with contextlib.suppress(BlockingIOError):
            while len(self.ranks) > 1:
                rank, report, problem, ended = json.loads(self._socket.recv(1 << 16))
                self.reports[rank], self._heard[rank] = report, time.monotonic()
                self.problem, self.ended = self.problem or problem, self.ended or ended

    def silent(self, patience_s: float) -> list[int]:
        """Return the ranks without a heartbeat for ``patience_s``."""
        now = time.monotonic()
        return [rank for rank in self.ranks if rank != self.rank and now - self._heard[rank] > patience_s]

    def speaker(self, patience_s: float) -> int:
        """Return the lowest rank that is not silent."""
        silent = self.silent(patience_s)
        return next(rank for rank in self.ranks if rank not in silent)


def heeded() -> tuple[signal.Signals, ...]:
    """Return ``SIGNALS``, without SIGHUP if it is ignored, as under ``nohup``."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


class Watch:
    """A context for the entire training of one rank; its main thread calls the methods.

    ``limits_s`` are the time limits of the sections ``"set-up"``, ``"step"`` and ``"save"``. A rank without a heartbeat for
    ``lost_after_s`` seconds counts as lost. ``SIGNALS`` don't end the process, they set the result of ``stop_asked``: torchrun also sends
    SIGTERM to the remaining ranks when one has died, and these must report the death before they exit.
    """

    def __init__(self, limits_s: Mapping[str, float], lost_after_s: float) -> None:
        self._limits_s, self._lost_after_s = limits_s, lost_after_s
        self._interval_s = interval_s(1, lost_after_s)
        self._beats = 0
        self._signals = heeded() if threading.current_thread() is threading.main_thread() else ()
        self._main = threading.current_thread().ident
        self._received = 0
        self._section = "set-up", "the set-up", time.monotonic()  # one tuple: other threads read it without a lock
        self._layer = ""
        self._failed_at: tuple[str, bool] | None = None
        self._problem: str | None = None  # the problem that this rank noticed, which ends the training
        self._asked: AsyncHostCopy | None = None  # the signal that some rank had received at the last step
        self._heard = time.monotonic()  # when the store last answered
        self._ended = threading.Event()
        self._node: NodeHeartbeats | None = None  # set by ``join``
        self._store: Any = None  # only on a node's speaker
        self._handlers: dict[int, Any] = {}
        self._waking = socket.socketpair()

    def __enter__(self) -> Watch:
        for number in self._signals:
            self._handlers[number] = signal.signal(number, self._receive)
        for end in self._waking:
            end.setblocking(False)
        if self._signals:
            # handlers run in the main thread, which may be inside a collective that never returns
            signal.set_wakeup_fd(self._waking[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._guard, name="watch", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            self._failed(error)
        self._ended.set()
        if self._node is not None and error is None:
            dist.barrier()  # a rank that exits may end the store, which the others still need
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(number, self._handlers[number])  # a second Ctrl-C ends the process at once

    # -- called by the main thread ------------------------------------------------------------------------------------

    def join(self) -> None:
        """Watch the other ranks too; all ranks call this once there is a process group."""
        if dist.get_world_size() == 1:
            return
        token = [secrets.token_hex(8) if dist.get_rank() == 0 else ""]  # torchrun's restarts have one store
        dist.broadcast_object_list(token, 0, device=torch.device("cpu") if dist.get_backend() == "gloo" else None)
        node = NodeHeartbeats(token[0], dist.get_rank(), dist.get_world_size())
        self._interval_s = interval_s(node.count, self._lost_after_s)
        self._lost_after_s = max(self._lost_after_s, 6 * self._interval_s)
        self._token = token[0]
        self._node = node
        if node.speaker(self._lost_after_s) == node.rank:
            self._open()
        self._beat(node)
        dist.barrier()  # from here on the store has a heartbeat of every node
        threading.Thread(target=self._watch, args=(node,), name="watch-store", daemon=True).start()

    def _open(self) -> Any:
        """Connect to the ranks' store, which has existed since the set-up: a failing connection is not retried for long."""
        if self._store is None:
            patience = datetime.timedelta(seconds=min(10.0, self._lost_after_s))
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=patience)
            store.set_timeout(datetime.timedelta(seconds=self._lost_after_s))
            self._heard = time.monotonic()
            self._store = dist.PrefixStore(f"watch/{self._token}", store)
        return self._store

    def enter(self, section: str, name: str) -> None:
        """Begin a section, which ends the previous one. ``name`` is for messages: ``"step 7"``."""
        self._section, self._layer = (section, name, time.monotonic()), ""

    def follow(self, stages: Iterable[nn.Module]) -> None:
        """Record which layer of these stages the forward or backward pass is in."""
        for stage in stages:
            for name, layer in layers_of(stage).items():
                where = f"{name} ({type(layer).__name__.removeprefix('FSDP')})"
                layer.register_forward_pre_hook(lambda *_, where=where: self._note(where), prepend=True)
                layer.register_forward_hook(
                    lambda *given, where=where: self._note_backward(given[-1], where), prepend=True
                )

    def _note(self, where: str) -> None:
        self._layer = where

    def _note_backward(self, output: Any, where: str) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._note(where))

    def stop_asked(self, device: torch.device) -> str:
        """Return, on all ranks, the name of a signal that some rank had received at the previous call, or an empty string. All ranks
        call this once a step. The result is one step old, so that the host needn't wait for the device to finish this step."""
        if dist.get_world_size() == 1:
            return signal.Signals(self._received).name if self._received else ""
        received = torch.tensor(self._received, dtype=torch.int32, device=device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        before, self._asked = self._asked, AsyncHostCopy(received)
        number = 0 if before is None else int(before.read())
        return signal.Signals(number).name if number else ""

    def _failed(self, error: Exception) -> None:
        """Handle an error of the main thread: send this rank's own error to the others. If the error only shows that another rank failed,
        this does not return."""
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if self._node is None:
            return
        if isinstance(error, dist.DistError) or is_consequence(str(error)):
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            self._failed_at = stack_position(frame, self._layer)
            self._problem = next(
                (f"a collective failed ({sign})" for sign in _CONSEQUENCES if sign in str(error)), text
            )
            threading.Event().wait()  # the watching thread ends the process
        with contextlib.suppress(Exception):
            store = self._open()
            store.set("cause", f"rank {dist.get_rank()} failed in {self._section[1]}: {text}")
            store.set("stop", "")

    # -- the threads --------------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """End the process if the thread of ``_watch`` can't: if there are no other ranks, or the store no longer answers."""
        while not self._ended.wait(self._interval_s):
            with contextlib.suppress(BlockingIOError):
                self._received = max(n for n in (self._received, *self._waking[0].recv(64)) if n in (0, *self._signals))
            now, (section, name, began) = time.monotonic(), self._section
            limit = self._limits_s[section]
            if self._problem is None and now - began > limit:
                self._problem = f"{name} takes longer than {limit:g} s"
                if self._node is None:
                    self._end(f"{self._problem}: this rank is {self._position()[0]}")
            if self._store is not None and now - max(self._heard, began) > self._lost_after_s:
                self._end(
                    f"rank {dist.get_rank()} got no answer from the ranks' store at {_address()} for {self._lost_after_s:g} s in "
                    f"{self._section[1]} ({self._position()[0]}): the launcher or rank 0 there has exited, or the network connection is cut"
                )

    def _beat(self, node: NodeHeartbeats) -> None:
        """Send a heartbeat to the node and, as its speaker, to the store."""
        self._beats += 1
        node.send([self._beats, self._section[1], *self._position()], self._problem)
        node.listen()
        if self._store is not None:
            self._store.set(_key(node.index), json.dumps(node.reports))
            self._heard = time.monotonic()

    def _watch(self, node: NodeHeartbeats) -> None:
        """Send heartbeats, and check whether this node and the next one are alive and whether anything has failed."""
        seen, changed = "", time.monotonic()
        while not self._ended.is_set():
            try:
                self._beat(node)
                if node.ended:
                    self._end("")
                # after its signal a launcher soon kills the ranks: then don't wait long
                patience_s = min(5 * self._interval_s if self._received else self._lost_after_s, self._lost_after_s)
                problem = self._problem or node.problem
                hurry = problem is not None or self._received
                if node.speaker(_HANDOVER * self._interval_s if hurry else patience_s) == node.rank:
                    if self._open().check(["stop"]):
                        problem = problem or "another rank has failed"
                    elif silent := node.silent(patience_s):
                        have = "have" if len(silent) > 1 else "has"
                        problem = problem or f"{_ranks(silent)} {have} sent no heartbeat for {patience_s:g} s"
                    elif node.count > 1:
                        following = (node.index + 1) % node.count
                        last = self._store.get(_key(following)).decode()
                        seen, changed = (last, time.monotonic()) if last != seen else (seen, changed)
                        # give another rank of that node time to take over
                        if (quiet_s := time.monotonic() - changed) > patience_s + (_HANDOVER + 1) * self._interval_s:
                            problem = problem or f"node {following} has sent no heartbeat for {quiet_s:.0f} s"
                    if problem is not None:
                        self._report(node, problem)
            except (dist.DistError, RuntimeError) as error:
                if not self._ended.is_set():
                    where = f"in {self._section[1]} ({self._position()[0]})"
                    self._end(
                        f"rank {node.rank} has lost the ranks' store at {_address()} {where}: {_first_line(error)}"
                    )
            self._ended.wait(self._interval_s)

    def _report(self, node: NodeHeartbeats, problem: str) -> None:
        """Let the first speaker that gets here report for all. Until it has, the others send heartbeats, or they would seem dead."""
        store = self._open()
        # a speaker that died after its datagrams and before its request left an older report of itself in the store
        self._beat(node)
        first = store.add("reporter", 1) == 1
        store.set("stop", "")
        before = self._nodes(node) if first else []
        began = time.monotonic()
        while (waited := time.monotonic() - began) < max(2 * (_HANDOVER + 2) * self._interval_s, 1.0):
            self._beat(node)
            if not first and store.check(["done"]):
                break
            # wait for a second heartbeat of every node, at most as long as another rank of the node needs to take over
            if first and waited > max(4 * self._interval_s, 1.0):
                pairs = zip(before, self._nodes(node), strict=True)
                if all(
                    any(report[0] != old[rank][0] for rank, report in new.items() if rank in old) for old, new in pairs
                ):
                    break
            time.sleep(self._interval_s / 2)
        sentence = ""
        if first:
            cause = store.get("cause").decode() if store.check(["cause"]) else ""
            sentence = cause or explain_hang(problem, _merged(before), _merged(self._nodes(node)))
            store.set("done", "")
        self._end(sentence)

    def _nodes(self, node: NodeHeartbeats) -> list[dict[int, list[Any]]]:
        """Return the last heartbeat of each node's ranks: its number, the section, the position, and whether it is in a collective."""
        keys = [_key(index) for index in range(node.count)]
        blocks = [self._store.multi_get(keys[start : start + _BLOCK]) for start in range(0, len(keys), _BLOCK)]
        values = (json.loads(value) for block in blocks for value in block)
        return [{int(rank): report for rank, report in reports.items()} for reports in values]

    def _position(self) -> tuple[str, bool]:
        frame = sys._current_frames().get(self._main or 0)
        return self._failed_at or (("at its end", False) if frame is None else stack_position(frame, self._layer))

    def _end(self, sentence: str) -> None:
        """End the process and the other ranks of its node, which would otherwise report the same."""
        if self._node is not None and not self._node.ended:
            self._node.send(self._node.reports[self._node.rank], None, ended=True)
        if sentence:
            print(f"the training ends: {sentence}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if self._store is not None and dump_collectives(dist.get_rank()):
            time.sleep(DUMP_S)
        os._exit(1)


# -- messages ---------------------------------------------------------------------------------------------------------


def stack_position(frame: FrameType, layer: str) -> tuple[str, bool]:
    """Return a thread's position from its innermost frame, such as ``"in all_reduce of layer_1 (Layer), model.py:48"``, and whether it is
    in a collective."""
    call, line, backward = "", "", False
    for inner, number in traceback.walk_stack(frame):
        file, name = inner.f_code.co_filename.replace(os.sep, "/"), inner.f_code.co_name
        if not call and not line and any(part in file for part in _COLLECTIVES) and name.isidentifier():
            call = "" if name.startswith("_") or name == "wrapper" else name
        if not call and not line and _PIPELINE in file:
            call = "the pipeline's receives and sends"
        if not line and not any(part in file for part in _LIBRARIES):
            line = f"{Path(file).name}:{number}"
        backward = backward or name == "_engine_run_backward"
    at = f"{call} of {layer}" if call and layer else call or layer or "Python code"
    return f"in {at}{', backward pass' if backward else ''}{', ' + line if line else ''}", call != ""


def explain_hang(problem: str, before: Mapping[int, list[Any]], after: Mapping[int, list[Any]]) -> str:
    """Explain a hanging training from two heartbeats of each rank: name the rank that keeps the others waiting.

    A rank is silent if it sent nothing in between. If none is silent, the ranks that are in no collective are late.
    """
    silent = [rank for rank in after if rank in before and before[rank][0] == after[rank][0]]
    alive = [rank for rank in after if rank not in silent]
    late = [rank for rank in alive if not after[rank][3]]
    named = silent or late
    rest = [rank for rank in alive if rank not in named]
    parts = [problem]
    if silent:
        verb = "no longer answer" if len(silent) > 1 else "no longer answers"
        parts.append(f"{_ranks(silent)} {verb} (dead, stopped or cut off), last seen {_positions(silent, after)}")
    elif late:
        parts.append(f"the others wait for {_ranks(late)}, {_positions(late, after)}")
    if rest:
        parts.append(f"{_ranks(rest)} {'waits' if len(rest) == 1 else 'wait'} {_positions(rest, after)}")
    return "; ".join(parts)


def _positions(ranks: Iterable[int], reports: Mapping[int, list[Any]]) -> str:
    """Return the ranks' positions, grouped by position."""
    positions: dict[str, list[int]] = {}
    for rank in ranks:
        positions.setdefault(f"in {reports[rank][1]} {reports[rank][2]}", []).append(rank)
    if len(positions) == 1:
        return next(iter(positions))
    return ", ".join(f"{_ranks(found)} {position}" for position, found in list(positions.items())[:4])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _merged(nodes: Iterable[Mapping[int, list[Any]]]) -> dict[int, list[Any]]:
    return dict(sorted((rank, report) for node in nodes for rank, report in node.items()))


def _key(node: int) -> str:
    return f"node {node}"


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


DUMP_S = 3.0
"""Seconds to wait for the flight recorder's file: torch checks once a second whether to write it."""


def dump_collectives(rank: int) -> bool:
    """Make NCCL's flight recorder write its file, which torch itself does only after its own, longer timeout; return whether
    a recorder is active."""
    stem = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    if not stem or dist.get_backend() != "nccl":
        return False
    try:
        pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with open(pipe, "wb") as file:
        file.write(b"1\n")
    return True


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def run(main: Callable[[], None]) -> None:
    """Call the program's ``main`` and exit at once with its status: at the interpreter's normal exit a thread that waits for a
    dead rank would keep the process, and gloo's threads aborted one exit in thirty on a busy machine."""
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            if os.environ.get("RANK", "0") != "0":
                time.sleep(_PRINT_DELAY_S)
            print(end.code if _ERROR_NAME.match(end.code) else f"error: {end.code}", file=sys.stderr)
    except BaseException:  # noqa: BLE001  whatever it was, the process ends with it
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            stream.flush()
    os._exit(status)
