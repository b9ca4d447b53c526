"""Compares the captured graph with the model before planning, by running both on the same rows.

The model runs eagerly (``eager``), the graph in the interpreter of ``reference``, both in float64 if possible. The loss, every gradient
and every written buffer must agree: over two steps with rows of the user's batch, then over one step with another number of rows and each
tensor's values reordered. This reveals values that were baked into the graph: a counter, a Python random number, a size. Each comparison
captures the model for its few rows, and ``same_structure`` compares this graph with the planned one: only batch sizes may differ.

Programs evaluate by the same graph, in which every random number is its mean and batch norm uses running statistics. Whether that is what
``model.eval()`` computes is compared, too; if it is not, only evaluation is refused. If the model can't run here, the graph is compared
with a capture of the model in evaluation mode.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from autopar.capture import reference
from autopar.capture.batch import BatchStructure, flatten_batch, rebuild_batch
from autopar.capture.eager import (
    DeterministicDraws,
    EagerModel,
    EagerStep,
    gradients,
    in_evaluation_mode,
    roots,
    update,
    with_zeros,
)
from autopar.capture.external_state import ExternalState
from autopar.capture.float64 import Float64Everywhere
from autopar.capture.pipeline import capture
from autopar.capture.storage import unshared
from autopar.capture.structure import accumulated_rounding, same_graph, same_structure
from autopar.errors import AutoparError, CaptureError
from autopar.graph import Graph, Guard
from autopar.measure import EXACT, Error, compare
from autopar.ops.cost import attention_dropout, model_flops
from autopar.ops.facts import OpKind, facts, is_random, op_name
from autopar.ops.operands import args_of, arguments
from autopar.ops.source import source_line
from autopar.precision import name_of
from autopar.program import kernels_rnn
from autopar.torch_private import results_of_ops

ROWS = 2
"""Number of rows of the first comparison (batch norm needs two); the second has one more."""
DRAWN_BYTES = 2**26
"""A model on meta gets random parameters for the comparison if they take at most this many bytes in float64, else it isn't compared."""
LIMIT_BYTES = 2**34
"""A model with more bytes of parameters and gradients in float64 isn't compared."""
FLOOR = 1e-3
"""A gradient's error is relative to its own largest value or to this fraction of the largest gradient, whichever is larger: the gradient
of a bias before batch norm consists of rounding errors, which two nearly equal rows amplify."""
MAX_FLOPS = 10**14
"""A comparison with more FLOPs (products, forward and backward) is skipped: it would take an hour."""
MAX_ROWS = 64
"""If the model doesn't run on ``ROWS`` rows, or their graph differs from the planned one, a batch of up to this many rows is compared."""
HINT = (
    "capture must not change what a model computes: please report this model; until it is fixed, autopar.opaque(module) excludes the "
    "failing module from tracing, and --no-capture-check (capture_check=False) plans anyway"
)
CANNOT_RUN_HINT = (
    "give a batch on which the model runs on the CPU and has a finite loss; --no-capture-check (capture_check=False) plans without the "
    "comparison"
)
NOT_COMPARED = "the captured graph was not compared with the model"
SWITCHED_OFF = "the comparison is switched off (--no-capture-check, capture_check=False)"


class CaptureCheck(NamedTuple):
    """``note`` says for the plan what was compared and how long it took; ``no_evaluation`` as in ``Graph``."""

    note: str
    no_evaluation: str


def check_capture(
    graph: Graph,
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    local_batch_norm: bool = False,
    for_program: bool = True,
) -> CaptureCheck:
    """Compare ``graph``, captured from ``model``, with the model. If the model can't run here and the graph is to become a program, the
    model is captured in evaluation mode, too.

    Raises ``CaptureError`` if they differ, with the first node that does, or if the model doesn't run on the batch.
    """
    start_s = time.perf_counter()
    structure = graph.structure
    assert isinstance(structure, BatchStructure)
    tensors = list(flatten_batch(structure, batch).values())
    evaluated = partial(_evaluation_graph, model, batch, loss_fn, local_batch_norm) if for_program else None
    without_comparison = partial(_without_comparison, graph, evaluated)
    if why := _not_compared(graph, model, tensors):
        return without_comparison(why)
    drawn = any(tensor.is_meta for tensor in (*tensors, *model.parameters()))
    tensors = _with_values(tensors)
    comparison = _Comparison(graph, model, loss_fn, structure, local_batch_norm)
    total = tensors[0].shape[0]
    rows = min(ROWS, total)
    first = comparison.check([tensor[:rows] for tensor in tensors], steps=2)
    affordable = total <= MAX_ROWS and _flops(graph, total) <= MAX_FLOPS
    if rows < total and affordable and (first is None or comparison.difference):
        # the model doesn't run on few rows, or their graph differs from the planned one
        rows, first = total, comparison.check(tensors, steps=2) or first
    if first is None:
        why = f"on {rows} rows of the batch {comparison.failure_reason}"
        if drawn:
            return without_comparison(f"{why}, with random values")
        if rows < total and not affordable:
            return without_comparison(f"{why}, and {total} rows take too long")
        raise CaptureError(f"the captured graph cannot be compared with the model: {why}", CANNOT_RUN_HINT)
    second = comparison.check(_reordered([tensor[torch.arange(rows + 1) % total] for tensor in tensors]), steps=1)
    failed = f"(not compared on {rows + 1} rows: {comparison.failure_reason})"
    rest = f"and a step of {second}" if second else failed
    seconds = time.perf_counter() - start_s
    note = (
        f"the captured graph equals the model over two steps of {first} {rest}: loss, gradients and buffers, in {comparison.precision} "
        f"(compared in {seconds:.1f} s)"
    )
    return CaptureCheck(note, comparison.no_evaluation)


def without_check(graph: Graph, model: nn.Module, loss_fn: Callable[..., Any] | None) -> CaptureCheck:
    """Return the result if the comparison is switched off: programs evaluate only models that were captured in evaluation mode."""
    note = "; ".join((f"{NOT_COMPARED}: {SWITCHED_OFF}", *(sentence for sentence, _ in graph.assumed)))
    if any(module.training for root in roots(model, loss_fn) for module in root.modules()):
        return CaptureCheck(note, f"it was not compared with the model in evaluation mode: {SWITCHED_OFF}")
    return CaptureCheck(note, _writes_or_draws(graph))


def _writes_or_draws(graph: Graph) -> str:
    """Return why programs can't evaluate by this ``graph`` of the model in evaluation mode, or an empty string."""
    if graph.buffers:
        return f"the model writes the buffer {next(iter(graph.buffers))} in evaluation mode, too"
    return "the model draws random numbers in evaluation mode, too" if _draws(graph) else ""


def _evaluation_graph(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None, local_batch_norm: bool
) -> Graph:
    with in_evaluation_mode(model, loss_fn):
        return capture(model, batch, loss_fn, local_batch_norm=local_batch_norm)


def _without_comparison(graph: Graph, evaluation_graph: Callable[[], Graph] | None, why: str) -> CaptureCheck:
    """Return the result for a graph that isn't compared with the model, but perhaps with the model's graph in evaluation mode.

    Raises ``CaptureError`` if the graph rests on an assumption that only a comparison can confirm.
    """
    for sentence, hint in graph.assumed:
        raise CaptureError(
            f"{sentence}, and the graph cannot be compared with the model: {why}",
            f"{hint}; --no-capture-check (capture_check=False) plans anyway",
        )
    if evaluation_graph is None:
        return CaptureCheck(f"{NOT_COMPARED}: {why}", graph.no_evaluation)
    try:
        evaluated = evaluation_graph()
    except AutoparError as error:  # only evaluation is refused, not the plan
        no_evaluation = f"the model can't be captured in evaluation mode: {error.message}"
    else:
        no_evaluation = _writes_or_draws(evaluated)
        if not no_evaluation and (difference := same_graph(graph, evaluated)):
            no_evaluation = f"the model's graph in evaluation mode is another one: {difference}"
    return CaptureCheck(f"{NOT_COMPARED}: {why}", no_evaluation)


def _not_compared(graph: Graph, model: nn.Module, tensors: Sequence[Tensor]) -> str:
    """Return the reason why the model can't run for a comparison, or an empty string."""
    if graph.valueless or any(buffer.is_meta for buffer in model.buffers()):
        return "buffers of the model are on meta"
    needed = 2 * 8 * sum(parameter.numel() for parameter in model.parameters())
    if needed > LIMIT_BYTES:
        return f"it takes {needed / 1e9:,.0f} GB in float64"
    if any(parameter.is_meta for parameter in model.parameters()) and needed > 2 * DRAWN_BYTES:
        return "the model is on meta and too large to draw values for"
    if (operations := _flops(graph, ROWS)) > MAX_FLOPS:
        return f"it takes {operations:.0e} operations in float64"
    return ""


def _flops(graph: Graph, rows: int) -> float:
    """Return the FLOPs of two steps of ``rows`` rows and one of ``rows + 1``, each run by eager PyTorch and by the graph. A backward pass
    counts as twice the FLOPs of a forward pass."""
    by_class = {key: sum(map(model_flops, cls.graph.graph.nodes)) for key, cls in graph.classes.items()}
    return 3 * 2 * (3 * rows + 1) * sum(by_class[layer.cls] for layer in graph.layers) / graph.inputs[0].shape[0]


def _with_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Give tensors on meta random values: normal floats, and integers 0 and 1, which are valid tokens and labels in any vocabulary."""
    generator = torch.Generator().manual_seed(0)
    valued = []
    for tensor in tensors:
        if tensor.is_meta:
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor = drawn.to(tensor.dtype) if tensor.is_floating_point() else (drawn > 0).to(tensor.dtype)
        valued.append(tensor.detach().cpu())
    return valued


def _reordered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Roll each tensor by one position along every dim except the batch; flip tensors that have no other dim."""
    return [
        tensor.roll([1] * (tensor.dim() - 1), list(range(1, tensor.dim()))) if tensor.dim() > 1 else tensor.flip(0)
        for tensor in tensors
    ]


class _Comparison:
    """Compares the graph with the model on rows of a batch.

    ``precision`` is that of the comparison: float64, or the model's if it doesn't run in float64. ``failure_reason`` is the reason why the
    last rows weren't compared. ``difference`` describes the first difference between their graph and the planned one. ``chances`` has the
    probabilities of the model's active dropout. ``no_evaluation`` is the reason why programs can't evaluate the model, if there is one.
    """

    def __init__(
        self, graph: Graph, model: nn.Module, loss_fn: Callable[..., Any] | None, structure: BatchStructure, local: bool
    ) -> None:
        self.graph, self.model, self.loss_fn, self.structure, self.local = graph, model, loss_fn, structure, local
        self.external_state = ExternalState(model, loss_fn)
        self.precision, self.failure_reason, self.difference = "float64", "", ""
        self.no_evaluation = ""
        self.chances: set[float] = set()

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.float64 if self.precision == "float64" else None

    def check(self, tensors: list[Tensor], steps: int) -> str | None:
        """Compare on these rows; return what was compared, or ``None`` if that isn't possible (see ``failure_reason``)."""
        if (eager := self._eager(tensors, steps)) is None and self.precision == "float64":
            why, self.precision = self.failure_reason, name_of(self.graph.dtype)
            if (eager := self._eager(tensors, steps)) is None:
                self.precision, self.failure_reason = "float64", why
        if eager is None:
            return None
        count = f"{tensors[0].shape[0]} rows"
        tensors = self._cast(tensors)
        try:
            with self.modes():
                small = self._captured(tensors)
        except AutoparError as error:
            self.failure_reason = error.message
            return None
        if other := _branch_mismatch(self.graph.guards, small.guards):
            self.failure_reason = f"they take a different branch at {other}"
            return None
        copied = self.eager_model()  # outside of the modes, which must not change initial values
        with self.external_state.restored(), self.modes():  # opaque modules run the user's code
            steps_of_graph = list(graph_steps(small, copied, tensors, eager))
        for number, (mine, theirs) in enumerate(zip(steps_of_graph, eager, strict=True)):
            largest, where = _largest_error(mine, theirs, set(small.buffers))
            if not largest.value <= self.tolerance:
                raise self._mismatch(
                    f"on {count}: {where} ({largest.where}) is off by {largest.value:.1e}", number, small, tensors
                )
        if drawn := sorted(_dropout_probabilities(self.graph) - self.chances):
            raise CaptureError(
                f"the captured graph has dropout with probability {drawn[0]}, which the model does not apply on {count}",
                HINT,
            )
        if not self.no_evaluation:
            self.no_evaluation = self._evaluation_refusal(small, copied, tensors, eager[-1].buffers)
        self.difference = same_structure(self.graph, small)
        return count + (
            f" (whose graph differs from that of the full batch: {self.difference})" if self.difference else ""
        )

    def _captured(self, tensors: list[Tensor]) -> Graph:
        """Capture the model for these rows; with ``modes``, random numbers are constants of the graph."""
        options: dict[str, Any] = {"precision": self.dtype and "float64", "local_batch_norm": self.local}
        return capture(self.model, rebuild_batch(self.structure, tensors), self.loss_fn, **options)

    def _evaluation_refusal(
        self, graph: Graph, copied: EagerModel, tensors: list[Tensor], buffers: dict[str, Tensor]
    ) -> str:
        """Return why programs can't evaluate the model: in evaluation mode, the graph computes something else on these rows with the
        parameters of ``copied`` and these ``buffers``, or the model's evaluation isn't a function of them."""
        copied.set_buffers(buffers)
        chances = set[float]()
        try:
            with self.external_state.restored(), self.modes(chances):
                loss, written = copied.evaluate(tensors)
        except Exception as error:  # raised by the model's code
            return f"in evaluation mode the model raises {_error_text(error)}"
        if written:
            return f"the model writes the buffer {written[0]} in evaluation mode, too"
        if chances - {0.0}:
            return "the model applies dropout in evaluation mode, too"
        try:
            mine = self._evaluated(graph, copied, tensors, buffers)
        except Exception as error:  # only evaluation is refused, not the plan
            return f"the captured graph does not run in evaluation mode: {_error_text(error)}"
        if abs(mine - loss) <= self.tolerance * abs(loss):
            return ""
        return (
            f"with dropout off and running statistics, its loss is not that of model.eval(), {loss:.6g}, but {mine:.6g}"
        )

    def _evaluated(self, graph: Graph, copied: EagerModel, tensors: list[Tensor], buffers: dict[str, Tensor]) -> float:
        """Return the loss of the graph in the evaluation mode of programs."""
        if _draws(self.graph):
            with self.float64():
                graph = self._captured(tensors)  # the given one was captured in ``modes``
        batch = dict(zip((value.name for value in graph.inputs), tensors, strict=True))
        kept = {name: buffers[name] for name in graph.buffers if name in buffers}
        with torch.no_grad(), self.external_state.restored(), self.float64():
            return float(reference.run(graph, copied.parameters, batch, buffers=kept, training=False))

    def _mismatch(self, where: str, step: int, small: Graph, tensors: list[Tensor]) -> CaptureError:
        for sentence, hint in (*self.graph.assumed, *small.assumed):
            return CaptureError(
                f"{sentence}, and the captured graph does not compute what the model computes {where}, in step {step + 1}",
                hint,
            )
        if step == 0:
            place = _first_difference(self, small, tensors)
        else:
            place = ", in the second step: state other than buffers changes between steps and is not captured"
        message = f"the captured graph does not compute what the model computes {where}{place}"
        for path, module in self.model.named_modules():
            if "forward" in vars(module):  # set on the module instead of its class
                name = f"{path}.forward" if path else "the model's forward"
                return CaptureError(
                    f"{message}; {name} was replaced by another function, which may use parameters of this very module, and "
                    "autopar traces a copy",
                    "define the new forward in a class of its own, so that it uses the parameters of self",
                )
        return CaptureError(message, HINT)

    def eager_model(self) -> EagerModel:
        return EagerModel(self.model, self.loss_fn, self.structure, self.dtype, self.graph.buffers)

    def modes(self, chances: set[float] | None = None) -> AbstractContextManager[Any]:
        """Return the context in which model and graph run: fixed random numbers, float64, no dropout (``chances`` collects each p)."""
        stack = ExitStack()
        stack.enter_context(self.float64())
        stack.enter_context(DeterministicDraws(chances))
        return stack

    def float64(self) -> AbstractContextManager[Any]:
        """Return the context in which new tensors are float64, if the comparison's are."""
        return nullcontext() if self.dtype is None else Float64Everywhere()

    @property
    def tolerance(self) -> float:
        """The largest relative error of an equal result."""
        return EXACT if self.dtype is not None else accumulated_rounding(self.graph.dtype)

    def _cast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.to(self.dtype) if self.dtype is not None and t.is_floating_point() else t for t in tensors]

    def _eager(self, tensors: list[Tensor], count: int) -> list[EagerStep] | None:
        """Run ``count`` training steps of the model; if they fail, set ``failure_reason`` and return ``None``."""
        try:
            copied = self.eager_model()
        except Exception as error:  # raised by the user's classes
            self.failure_reason = f"the model cannot be copied ({_error_text(error)})"
            return None
        steps, parameters = list[EagerStep](), copied.parameters
        before = {name: (p._version, p.data_ptr()) for name, p in parameters.items()}
        try:
            with self.external_state.restored(), self.modes(self.chances):
                for _ in range(count):
                    if steps:
                        update(parameters, steps[-1].gradients)
                        before = {name: (p._version, p.data_ptr()) for name, p in parameters.items()}
                    step = copied.step(self._cast(tensors))
                    found = with_zeros(step.gradients, parameters, self.graph.possibly_unused)
                    steps.append(dataclasses.replace(step, gradients=found))
        except Exception as error:  # raised by the model's code
            self.failure_reason = f"the model raises {_error_text(error)}"
            return None
        for name, p in parameters.items():
            if (p._version, p.data_ptr()) != before[name]:
                raise CaptureError(
                    f"the model writes its parameter {name} in forward, which a program would lose",
                    "make it a buffer, freeze it where it is not trained, or change the parameter after the optimizer's step",
                )
        if not math.isfinite(steps[0].loss):
            self.failure_reason = f"the model's loss is {steps[0].loss}"
            return None
        return steps


def graph_steps(
    graph: Graph, eager_model: EagerModel, tensors: Sequence[Tensor], steps: Sequence[EagerStep]
) -> Iterator[EagerStep]:
    """Run the graph for as many steps as eager PyTorch ran (``steps``), from the parameters and buffers of ``eager_model``. Between steps
    the parameters get the same updates as in eager PyTorch, and buffers carry over."""
    batch = dict(zip((value.name for value in graph.inputs), tensors, strict=True))
    initial, buffers = eager_model.buffers, dict[str, Tensor]()
    frozen = {name for p in graph.parameters.values() if not p.trainable for name in p.names}
    own = unshared(eager_model.parameters)
    parameters = {n: p.detach() if n in frozen else p for n, p in own.items()}
    for number in range(len(steps)):
        if number:
            update(own, steps[number - 1].gradients)
        loss = reference.run(graph, parameters, batch, buffers=buffers)
        yield EagerStep(float(loss.detach()), gradients(loss, own), initial | buffers)


def _error_text(error: Exception) -> str:
    """Return an error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _dropout_probabilities(graph: Graph) -> set[float]:
    """Return the nonzero dropout probabilities in a graph."""
    found = set()
    for cls in graph.classes.values():
        for node in cls.graph.graph.nodes:
            if facts(node).kind is OpKind.DROPOUT and args_of(node)[2]:
                found.add(float(args_of(node)[1]))
            elif facts(node).is_attention:
                found.add(attention_dropout(node))
    return found - {0.0}


def _draws(graph: Graph) -> bool:
    """Return whether a layer draws random numbers."""
    nodes = (node for cls in graph.classes.values() for node in cls.graph.graph.nodes if node.op == "call_function")
    return any(is_random(n) or (n.target is kernels_rnn.recurrent and arguments(n)["dropout"]) for n in nodes)


def _branch_mismatch(guards: Sequence[Guard], others: Sequence[Guard]) -> str:
    """Return the first line at which fewer rows take another branch than the full batch, or an empty string. Integers that the model reads
    from its tensors may differ, booleans may not."""
    for guard, other in zip(guards, others, strict=False):
        if guard.line != other.line or (guard.value != other.value and isinstance(guard.value, bool)):
            return guard.line
    longer = max(guards, others, key=len)
    return longer[min(len(guards), len(others))].line if len(guards) != len(others) else ""


def _largest_error(mine: EagerStep, theirs: EagerStep, written: set[str]) -> tuple[Error, str]:
    """Return the largest error of a step, and where it is: in the loss, a gradient or a buffer."""
    # elements that are the same infinity or NaN in both are equal: a mask in a buffer may have them
    error = compare(mine.loss, mine.gradients, theirs.loss, theirs.gradients, floor=FLOOR, same_nonfinite=True)
    if not error.exact:
        return error, "the loss" if error.where == "loss" else "a gradient"
    # a buffer that forward registers or fills is a cache, whose effect shows in the second step
    kept = {name: value for name, value in theirs.buffers.items() if name in mine.buffers}
    checked = {name: value for name, value in kept.items() if value.is_floating_point() or name in written}
    return compare(0.0, {n: mine.buffers[n] for n in checked}, 0.0, checked, same_nonfinite=True), "a buffer"


# -- the first node that differs --------------------------------------------------------------------------------------


def _first_difference(comparison: _Comparison, graph: Graph, tensors: list[Tensor]) -> str:
    """Describe the first node with a value that eager PyTorch never computes, and its source line; return an empty string without one."""
    copied = comparison.eager_model()
    with comparison.external_state.restored(), comparison.modes():
        seen = _EagerValues()
        batch = dict(zip((value.name for value in graph.inputs), tensors, strict=True))
        with torch.no_grad():
            with results_of_ops(seen.add):
                copied.loss(tensors)
            known: dict[tuple[int, fx.Node], bool] = {}

            def watch(layer: int, node: fx.Node, value: Any) -> None:
                known[layer, node] = not isinstance(value, Tensor) or seen.has(value)

            reference.run(graph, copied.parameters, batch, watch)
    unknown: set[tuple[int, fx.Node]] = set()
    for layer, node in reversed(known):
        # the model may lack a value (a product before its bias is added) if it has the values that the graph computes from it
        ends = any(user.op == "output" or (layer, user) in unknown for user in node.users)
        if ends and not known[layer, node] and node.op == "call_function":
            unknown.add((layer, node))
    first = next((key for key in known if key in unknown), None)
    if first is None:
        return ""
    layer, node = first
    where = f"; the first value that the model does not compute is {node.name} ({op_name(node)}) in {graph.layers[layer].name}"
    return f"{where}\n{source_line(node)}"


class _EagerValues:
    """Digests of all tensors that eager PyTorch computes, by number of elements; a digest doesn't depend on the order of elements."""

    def __init__(self) -> None:
        self.digests: dict[int, list[Tensor]] = {}

    def add(self, value: Tensor) -> None:
        self.digests.setdefault(value.numel(), []).append(_digest(value))

    def has(self, value: Tensor) -> bool:
        mine = _digest(value)
        return any(torch.allclose(mine, other, rtol=1e-9, atol=1e-12) for other in self.digests.get(value.numel(), ()))


def _digest(value: Tensor) -> Tensor:
    numbers = value.detach().to(torch.float64).nan_to_num()
    return torch.stack(
        (numbers.sum(), numbers.square().sum(), numbers.abs().amax() if numbers.numel() else numbers.sum())
    )
