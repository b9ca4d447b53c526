"""Specialises data-dependent control flow on the example batch, and guards it (``if labels.max() >= n``, ``lengths.max().item()``).

A trace has no values. So the model first runs on the batch, and every read of a tensor's value is recorded: the source line and the value.
During the trace the reads return the same values in the same order, and the graph also returns the tensors that were read. Such a tensor
must depend on the batch only: the prelude, a graph that runs once per step on the global batch, computes it, and a program refuses a batch
with another value (``autopar.program.guards``). If a tensor depends on a parameter, a buffer or a random number, its guard is dropped with
a note if it is a boolean and the opposite makes the model raise (``assert h.isfinite().all()``); otherwise the model is refused, unless
the tensor depends on the batch and unwritten buffers only.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import NOT_USER_CODE, NotTraceableError, caller
from autopar.capture.blocks import stack
from autopar.capture.storage import copied
from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.graph import Graph, Guard
from autopar.ops.facts import is_random
from autopar.ops.meta import graph_meta, meta
from autopar.program.guards import as_python_number
from autopar.torch_private import as_if_exported
from passes.clean.nodes import ancestors, note, returned

MAX_READS = 256
"""Maximum number of values that a forward may read; each number of a list counts. The program's source contains all of them."""
_SHOWN = 5

_VALUE_READS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(
        (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item),
        lambda tensor: tensor.clone(),  # the model may write to it later
    ),
    torch.is_nonzero: lambda tensor: tensor.clone(),
    Tensor.is_nonzero: lambda tensor: tensor.clone(),
    torch.equal: lambda one, other: _equal(one, other),
    Tensor.equal: lambda one, other: _equal(one, other),
}
"""Function that reads a value -> function that returns the tensor to guard."""


def _equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class RecordedRead:
    """A read of a tensor's value: the line, the name of the reading function, and the Python value."""

    line: str
    function: str
    value: Any


@dataclass
class RecordedReads:
    """The reads of a forward, in order. ``read_tensors`` are the tensors that the current trace has read. ``fails_if_flipped(index)`` runs
    the model with the opposite of one boolean, and returns whether the model's code raises before it reads another boolean."""

    recorded: list[RecordedRead]
    read_tensors: list[Tensor] = field(default_factory=list)
    fails_if_flipped: Callable[[int], bool] = lambda index: False

    def replay(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Add the tensor that ``func`` reads to ``read_tensors``, and return the recorded value. Raises ``CaptureError`` unless the
        recorded read has the same line and function."""
        if func is Tensor.tolist:
            rows = args[0]
            return [self.replay(func, (row,), {}) for row in rows] if rows.dim() else self.replay(Tensor.item, args, {})
        line, name, index = caller(), func.__name__, len(self.read_tensors)
        read = self.recorded[index] if index < len(self.recorded) else None
        if read is None or (read.line, read.function) != (line, name):
            expected = f"reads one at {read.line}" if read is not None else "reads no more values"
            raise CaptureError(
                f"{line} reads a tensor's value, but in eager mode forward {expected}: its control flow depends on more than the batch",
                OPAQUE_HINT,
            )
        self.read_tensors.append(_VALUE_READS[func](*args, **kwargs).detach())
        return read.value


class ReplayReads(TorchFunctionMode):
    """A context in which reads of values return the recorded values."""

    def __init__(self, reads: RecordedReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads_value(func):
            return self.reads.replay(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _RecordReads(TorchFunctionMode):
    """A context that records reads of values."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[RecordedRead] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.tolist:
            self.reads += [RecordedRead(caller(), "item", number) for number in _numbers(result)]
        elif _reads_value(func):
            self.reads.append(RecordedRead(caller(), func.__name__, result))
        return result


class _FlipRead(TorchFunctionMode):
    """A context that flips read number ``index`` if it is a boolean; sets ``decides_again`` if another boolean read follows."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.remaining, self.decides_again = index, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _reads_value(func):
            return result
        self.decides_again |= self.remaining < 0 and isinstance(result, bool)
        self.remaining -= len(_numbers(result)) if isinstance(result, list) else 1
        return not result if self.remaining == -1 and isinstance(result, bool) else result


def _numbers(value: Any) -> list[Any]:
    """Return the leaves of nested lists, in order."""
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else [value]


def _reads_value(func: Any) -> bool:
    try:
        return func is Tensor.tolist or func in _VALUE_READS
    except TypeError:  # an unhashable function
        return False


def record_reads(model: nn.Module, run: Callable[[nn.Module], object]) -> RecordedReads | None:
    """Return the reads of values while ``run`` runs a copy of the model as export does; ``None`` if the run fails, if there are no reads
    or more than ``MAX_READS``, or if a value isn't a bool or int."""

    def fails_if_flipped(index: int) -> bool:
        (copy_of_model,), flip = copied([model]), _FlipRead(index)
        with torch.random.fork_rng(devices=[]), as_if_exported(), flip:
            try:
                run(copy_of_model)
            except Exception as error:  # any error that the model's code raises
                raised_by_model = not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(NOT_USER_CODE)
                return raised_by_model and not flip.decides_again
        return False

    (copy_of_model,), recorder = copied([model]), _RecordReads()
    with torch.random.fork_rng(devices=[]), as_if_exported(), recorder:
        try:
            run(copy_of_model)
        except Exception:  # the model itself fails, and export reports where
            return None
    values = [read.value for read in recorder.reads]
    plain = all(type(value) in (bool, int) for value in values)  # a float would differ in every batch
    usable = plain and 0 < len(values) <= MAX_READS
    return RecordedReads(recorder.reads, fails_if_flipped=fails_if_flipped) if usable else None


def keep_guards(gm: fx.GraphModule, reads: RecordedReads | None) -> None:
    """Store the guards in the exported graph's meta data, and drop those that can't be checked on a batch.

    The graph's outputs after the loss are the tensors that were read, one for each guard; those of dropped guards are removed. Raises
    ``NotTraceableError`` if a value depends on a parameter or a random number and its opposite doesn't make the model raise, and
    ``CaptureError`` if export read fewer values. ``batch_guards`` refuses those that depend on a written buffer.
    """
    graph_meta(gm)["guards"] = tuple(Guard(read.line, read.value) for read in reads.recorded) if reads else ()
    if reads is not None and len(reads.read_tensors) != len(reads.recorded):
        raise CaptureError(
            f"{reads.recorded[len(reads.read_tensors)].line} reads a tensor's value in eager mode, but not while torch.export traces it",
            OPAQUE_HINT,
        )
    guards, nodes, kept = graph_meta(gm)["guards"], _guard_nodes(gm), []
    for index, (guard, node) in enumerate(zip(guards, nodes, strict=True)):
        sources = ancestors([node])
        beyond_batch = any("parameter" in meta(n) or (n.op == "call_function" and is_random(n)) for n in sources)
        if not beyond_batch and not any("buffer" in meta(n) for n in sources):
            kept.append(index)
        elif reads is not None and reads.fails_if_flipped(index):
            note(gm, f"{guard.line} raises an error if the value is not {guard.value}; the program does not check it")
        elif beyond_batch:
            raise _data_dependent_error(guard, node)
        else:
            kept.append(index)
    gm.graph.output_node().args = (
        (returned(gm)[0], *(nodes[index] for index in kept), *returned(gm)[1 + len(nodes) :]),
    )
    graph_meta(gm)["guards"] = tuple(guards[index] for index in kept)


def batch_guards(gm: fx.GraphModule) -> list[tuple[Guard, fx.Node]]:
    """Return the guards that depend on the batch (others always hold) with their nodes, and add notes; ``mark_main`` must have run.

    Raises ``NotTraceableError`` if a value depends on a written buffer.
    """
    found = []
    for guard, node in zip(graph_meta(gm).get("guards", ()), _guard_nodes(gm), strict=True):
        if meta(node)["main"]:
            raise _data_dependent_error(guard, node)
        if meta(node)["needs_input"]:
            found.append((guard, node))
    for line in dict.fromkeys(guard.line for guard, _ in found):
        values = [str(guard.value) for guard, _ in found if guard.line == line]
        shown = ", ".join(values[:_SHOWN]) + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")
        note(
            gm,
            f"{line} reads values of the batch, assumed to be {shown}: a batch with other values is refused at run time",
        )
    return found


def check_guards(graph: Graph, batch: Sequence[Tensor]) -> Graph:
    """Return the graph. Raises ``CaptureError`` unless the prelude computes from the batch the values that the model read."""
    if not graph.guards:
        return graph
    assert graph.prelude is not None
    with torch.no_grad():
        values = graph.prelude(*(tensor.detach().cpu() for tensor in batch))[len(graph.scalars) :]
    found = [Guard(g.line, as_python_number(value, g.value)) for g, value in zip(graph.guards, values, strict=True)]
    for mine, theirs in zip(found, graph.guards, strict=True):
        if mine.value != theirs.value:
            raise CaptureError(
                f"{theirs.line} reads a tensor's value, which is {theirs.value} in the model and {mine.value} in the captured graph",
                OPAQUE_HINT,
            )
    return dataclasses.replace(graph, guards=tuple(found))


def _data_dependent_error(guard: Guard, node: fx.Node) -> NotTraceableError:
    return NotTraceableError(
        f"torch.export refused {guard.line}: its control flow or a shape depends on values that differ from step to step with the same "
        "batch (parameters, buffers or random numbers)",
        f"write it with torch.where; if only this module branches, {OPAQUE_HINT}",
        tuple(path for path, _, _ in stack(node)),
    )


def _guard_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return returned(gm)[1 : 1 + len(graph_meta(gm).get("guards", ()))]
