"""The time that FSDP2 would take on a GPU: torch's own code, on gloo, with streams and events that keep a clock.

The host takes no time: it runs ahead of the device. A collective occupies its stream and its process group, a layer's computation the
compute stream; a stream that waits for an event goes on no earlier than the event. So the clock shows what overlaps what.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
import torch.distributed.fsdp._fully_shard._fsdp_state as state
from torch import Tensor, autograd, nn
from torch.distributed.fsdp import FSDPModule


def _layer(path: str) -> str:
    """The path of a parameter's layer: a child of the stage, or a numbered child of one."""
    parts = path.split(".")
    return ".".join(parts[: 2 if parts[1:] and parts[1].isdigit() else 1])


@dataclass(eq=False)
class Event:
    clock: Clock
    time: float = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        self.time = (stream or self.clock.current).time
        return self


@dataclass(eq=False)
class Stream:
    clock: Clock
    priority: int = 0
    time: float = 0.0

    def wait_stream(self, other: Stream) -> None:
        self._wait(other.time)

    def wait_event(self, event: Event) -> None:
        self._wait(event.time)

    def _wait(self, time: float) -> None:
        if time > self.time and self is self.clock.compute:
            self.clock.waits.append((len(self.clock.issued), time - self.time))
        self.time = max(self.time, time)

    def record_event(self) -> Event:
        return Event(self.clock, self.time)


@dataclass
class Clock:
    """The device, as FSDP sees it, and what it was given to do: ``issued`` are pairs of what and which layer, in the host's order."""

    times: dict[str, float]
    issued: list[tuple[str, str]] = field(default_factory=list)
    waits: list[tuple[int, float]] = field(
        default_factory=list
    )  # of the compute stream: after how many ``issued``, seconds
    groups: dict[str, float] = field(default_factory=dict)  # process group: when it is free again
    layer: str = ""
    inputs: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)  # of reductions, with their bytes
    inputs_bytes: int = 0  # the most that were in memory at the begin of a reduction

    def __post_init__(self) -> None:
        self.compute = self.current = Stream(self)
        self.Stream, self.Event = partial(Stream, self), partial(Event, self)  # the names that FSDP calls

    def current_stream(self, *_: Any) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(self, what: str, layer: str, group: str | None = None) -> None:
        self.issued.append((what, layer))
        start = max(self.current.time, self.groups.get(group, 0.0) if group else 0.0)
        self.current.time = start + self.times[what]
        if group:
            self.groups[group] = self.current.time

    def follow(self, name: str, layer: nn.Module) -> None:
        """Let the layer's forward and backward take their time."""
        forward = layer.forward

        def timed(*args: Any, **kwargs: Any) -> Tensor:
            self.run("forward", name)
            result: Tensor = _Backward.apply(forward(*args, **kwargs), self, name)
            return result.clone()

        layer.forward = timed

    def of(self, params: list[Any]) -> None:
        self.layer = _layer(params[0]._param_fqn or "?")

    def live_bytes(self) -> int:
        return sum(size for tensor, size in self.inputs if tensor() is not None)


class _Backward(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, name: str) -> Tensor:
        ctx.clock, ctx.name = clock, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.run("backward", ctx.name)
        return grad, None, None


@dataclass
class _Reduce:
    """The program's reduce-scatter, which takes its time on the stream and the process group."""

    own: Any
    clock: Clock

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.own.allocate(*args, **kwargs)
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.run("reduce", self.clock.layer, kwargs["group"].group_name)
        return self.own(*args, **kwargs)


@contextlib.contextmanager
def clock(**times: float) -> Iterator[Clock]:
    """Inside, FSDP runs on a clock; ``times`` are those of a ``gather``, a ``forward``, a ``backward`` and a ``reduce``."""
    made = Clock(times)
    gather, reduce = param_group.foreach_all_gather, param_group.foreach_reduce
    gathering, set_own = collectives.DefaultAllGather.__call__, FSDPModule.set_custom_reduce_scatter

    def foreach_all_gather(params: Any, *args: Any, **kwargs: Any) -> Any:
        made.of(params)
        return gather(params, *args, **kwargs)

    def foreach_reduce(params: Any, *args: Any, **kwargs: Any) -> Any:
        made.of(params)
        result = reduce(params, *args, **kwargs)
        made.inputs.append((weakref.ref(result[0]), result[0].numel() * result[0].element_size()))
        made.inputs_bytes = max(made.inputs_bytes, made.live_bytes())
        return result

    def all_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.run("gather", made.layer, kwargs["group"].group_name)
        return gathering(self, *args, **kwargs)

    def set_reduce_scatter(module: FSDPModule, own: Any) -> None:
        set_own(module, _Reduce(own, made))  # type: ignore[arg-type]

    with contextlib.ExitStack() as stack:
        for module in (param_group, state, collectives):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", lambda *_: made))
        stack.enter_context(mock.patch.object(param_group, "foreach_all_gather", foreach_all_gather))
        stack.enter_context(mock.patch.object(param_group, "foreach_reduce", foreach_reduce))
        stack.enter_context(mock.patch.object(collectives.DefaultAllGather, "__call__", all_gather))
        stack.enter_context(mock.patch.object(FSDPModule, "set_custom_reduce_scatter", set_reduce_scatter))
        stack.enter_context(mock.patch.object(torch, "get_device_module", lambda *_: made))
        yield made
