"""Adversarial batches and modes, for errors that the user's batch doesn't reveal: a baked-in constant, a wrong mask.

Attacks are derived from the user's batch. Batches of the same shapes run through the captured graph and its plans; for other batch sizes
and modes the model is captured again. Eager PyTorch runs first: if it raises, or its results aren't finite, the report lists the attack as
skipped.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import BatchStructure, Float64Everywhere, flatten_batch, rebuild_batch, reference
from autopar.capture.batch import describe_batch
from autopar.capture.check import graph_steps
from autopar.capture.eager import EagerModel, WithoutDropout, copy_for_eager, update
from autopar.capture.export import call_model
from autopar.capture.external_state import ExternalState
from autopar.errors import AutoparError
from autopar.graph import Graph
from autopar.measure import EXACT, Error, compare, severity
from autopar.program.guards import GuardError
from autopar.verify.subject import Subject, make_subject, with_batch

IGNORED = -100
"""The label that cross entropy ignores by default."""

MOST_ROWS = 64
"""Maximum number of rows in the attack whose batch size equals the sequence length."""

LARGE = 100.0
"""Factor by which the attack with extreme values multiplies the last row."""

OWN_BUGS = (AssertionError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What autopar's own bugs raise: a report lists them."""


@dataclass
class Attacks:
    """The outcomes of the attacks on one device, by name: ``tried`` has the error, ``skipped`` the reason, ``broken`` the exception.

    ``subjects`` has the attacks that keep the shapes of the user's batch: plans can run these, too.
    """

    tried: dict[str, Error] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)


class _SkippedError(Exception):
    """The attack doesn't apply to the model, eager PyTorch can't run it, or eager PyTorch's results aren't finite."""


def attack(model: nn.Module, loss_fn: Callable[..., Any] | None, subject: Subject) -> Attacks:
    """Try all attacks on one device, comparing the captured graph with eager PyTorch; ``subject`` was made from ``model``."""
    found = Attacks()
    graph, structure = subject.graph, subject.graph.structure
    assert isinstance(structure, BatchStructure)
    found.tried["the given batch"] = compare_with_eager(subject)
    with _attempt(found, "two steps in a row"):
        found.tried["two steps in a row"] = _two_steps(model, loss_fn, subject)
    for name, tensors, reason in _same_shapes(subject.batch):
        with _attempt(found, name):
            if tensors is None:
                raise _SkippedError(reason)
            attacked = _with_tensors(subject, model, tensors, loss_fn)
            found.tried[name] = compare_with_eager(attacked)
            found.subjects[name] = attacked
    for name, rows, reason in _other_rows(subject.batch):
        with _attempt(found, name):
            if not rows or graph.accumulated > 1:
                raise _SkippedError(reason or "each microbatch is a separate batch")
            batch = rebuild_batch(structure, [_rows(tensor, rows) for tensor in subject.batch.values()])
            found.tried[name] = compare_with_eager(_captured(model, batch, loss_fn))
    for name, training in (("train()", True), ("eval()", False)):
        with _attempt(found, name):
            if all(module.training is training for module in model.modules()):
                raise _SkippedError("the model is in this mode")
            batch = rebuild_batch(structure, list(subject.batch.values()))
            found.tried[name] = compare_with_eager(_captured(copy.deepcopy(model).train(training), batch, loss_fn))
    return found


@contextlib.contextmanager
def _attempt(found: Attacks, name: str) -> Iterator[None]:
    """Record an exception that the attack raises as its outcome."""
    try:
        yield
    except _SkippedError as skipped:
        found.skipped[name] = str(skipped)
    except GuardError as refused:
        found.skipped[name] = f"the program is for another kind of batch: {refused}"
    except AutoparError as refused:
        found.skipped[name] = f"capture refuses it: {refused.message}"
    except OWN_BUGS as error:  # the report names the attack that caused them
        found.broken[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _with_tensors(
    given: Subject, model: nn.Module, tensors: dict[str, Tensor], loss_fn: Callable[..., Any] | None
) -> Subject:
    """Return the subject with another batch of the same shapes. Raises ``_SkippedError`` if eager PyTorch can't run it."""
    try:
        subject = with_batch(given, model, tensors, loss_fn)
    except Exception as error:  # raised by the user's code on an unexpected batch
        raise _SkippedError(_raised_by_eager(error)) from error
    _check_finite(subject)
    return subject


def _raised_by_eager(error: Exception) -> str:
    return f"eager PyTorch raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_finite(subject: Subject) -> None:
    if not math.isfinite(subject.loss) or not all(bool(g.isfinite().all()) for g in subject.gradients.values()):
        raise _SkippedError("eager PyTorch's loss or gradients are not finite")


def _captured(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> Subject:
    """Capture the model for the batch, after eager PyTorch has run it."""
    copied = copy_for_eager(model, loss_fn)
    structure = describe_batch(model, batch, loss_fn, torch.float64)
    try:
        with ExternalState(model, loss_fn).restored(), Float64Everywhere(), WithoutDropout():
            # clones, because a model may write to its batch
            tensors = [tensor.clone() for tensor in flatten_batch(structure, batch).values()]
            call_model(copied.model, structure, copied.loss_fn, tensors).backward()
    except Exception as error:
        raise _SkippedError(_raised_by_eager(error)) from error
    subject = make_subject(model, batch, loss_fn)
    _check_finite(subject)
    return subject


# -- one device -------------------------------------------------------------------------------------------------------


def compare_with_eager(subject: Subject) -> Error:
    """Return the largest error of the captured graph against eager PyTorch: loss, gradients and, if these are exact, written buffers."""
    written: dict[str, Tensor] = {}
    loss, gradients = _graph_step(subject.graph, subject.state, subject.batch, written)
    error = compare(loss, gradients, subject.loss, subject.gradients, rounding=subject.rounding)
    if not error.exact or subject.graph.accumulated > 1:
        return error
    mine = {n: written[n] for n in subject.buffers if n in written}
    after = compare(0.0, mine, 0.0, subject.buffers, same_nonfinite=True)
    return max(error, Error(after.value, f"the new value of {after.where}"), key=lambda e: severity(e.value))


def _graph_step(
    graph: Graph, state: Mapping[str, Tensor], batch: Mapping[str, Tensor], written: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    parameters = {
        name: next(state[n] for n in (name, *p.tied) if n in state).detach().clone().requires_grad_(p.trainable)
        for p in graph.parameters.values()
        for name in p.originals
    }
    parts = [
        dict(zip(batch, part, strict=True))
        for part in zip(*(t.chunk(graph.accumulated) for t in batch.values()), strict=True)
    ]
    loss = 0.0
    with Float64Everywhere():
        for part in parts:
            term = reference.run(graph, parameters, part, buffers=written) / len(parts)
            term.backward()
            loss += float(term.detach())
    return loss, {n: p.grad for n, p in parameters.items() if p.grad is not None}


def _two_steps(model: nn.Module, loss_fn: Callable[..., Any] | None, subject: Subject) -> Error:
    """Run two steps with an update between them. Return the first inexact error, or else the largest: of the second step's loss and
    gradients, of the parameters (which a forward and backward pass must not change), and of the written buffers."""
    graph, structure = subject.graph, subject.graph.structure
    assert isinstance(structure, BatchStructure)
    if graph.accumulated > 1:
        raise _SkippedError("each microbatch is a separate batch")
    tensors = list(subject.batch.values())
    alone, copied = (EagerModel(model, loss_fn, structure, torch.float64, graph.buffers) for _ in range(2))
    before = {n: p.detach().clone() for n, p in alone.parameters.items()}
    with ExternalState(model, loss_fn).restored(), Float64Everywhere(), WithoutDropout():
        first = alone.step(tensors)
        now = {n: p.detach() for n, p in alone.parameters.items()}
        unchanged = compare(0.0, before, 0.0, now, same_nonfinite=True)
        update(alone.parameters, first.gradients)
        theirs = alone.step(tensors)
        *_, mine = graph_steps(graph, copied, tensors, (first, theirs))
    step = compare(mine.loss, mine.gradients, theirs.loss, theirs.gradients, rounding=subject.rounding)
    written = compare(0.0, mine.buffers, 0.0, theirs.buffers, same_nonfinite=True)  # a mask has infinities
    errors = (
        Error(step.value, f"{step.where}, second step"),
        Error(unchanged.value, f"the value of {unchanged.where} after a step"),
        Error(written.value, f"the value of {written.where} after two steps"),
    )
    return next((error for error in errors if not error.value <= EXACT), max(errors, key=lambda error: error.value))


# -- batches ----------------------------------------------------------------------------------------------------------


def _same_shapes(batch: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor] | None, str]]:
    """Yield attacks with batches of the same shapes: name, batch, and the reason if there is no batch."""
    given = dict(batch)
    masks = {n: t for n, t in given.items() if t.numel() and bool(((t == 0) | (t == 1)).all())}
    others = {n: t for n, t in given.items() if n not in masks and t.numel()}
    integers = {n: t for n, t in others.items() if not t.is_floating_point() and not t.is_complex()}
    floating = {n: t for n, t in others.items() if t.is_floating_point()}
    if not integers:
        yield "unevenly ignored labels", None, "no input has integers"
    for name, tensor in integers.items():
        yield f"unevenly ignored labels in {name}", given | {name: _uneven(tensor)}, ""
    if not masks:
        yield "a fully masked row", None, "no input has zeros and ones"
    for name, tensor in masks.items():
        yield f"a fully masked row in {name}", given | {name: _first_row(tensor, 0)}, ""
    edges = {n: _edges(t) for n, t in integers.items()}
    yield "integers at the ends of their range", (given | edges) if edges else None, "no input has integers"
    extremes = {n: _extremes(t) for n, t in floating.items()}
    yield "extreme values", (given | extremes) if extremes else None, "no input has floating-point values"


def _uneven(tensor: Tensor) -> Tensor:
    """Return the labels with ``IGNORED`` in half of the first row and in all of the last row."""
    tensor = tensor.clone()
    if tensor.dim() > 1:
        tensor[0, : (tensor.shape[1] + 1) // 2] = IGNORED
    if len(tensor) > 1:
        tensor[-1] = IGNORED
    return tensor


def _first_row(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[0] = value
    return tensor


def _edges(tensor: Tensor) -> Tensor:
    low, high = tensor.min(), tensor.max()
    tensor = tensor.clone()
    tensor[0], tensor[-1] = low, high
    return tensor


def _extremes(tensor: Tensor) -> Tensor:
    tensor = _first_row(tensor, 0.0)
    if len(tensor) > 1:
        tensor[-1] *= LARGE
    return tensor


def _other_rows(batch: Mapping[str, Tensor]) -> Iterator[tuple[str, int, str]]:
    """Yield attacks with other batch sizes: name, number of rows, and the reason if there is none."""
    rows = len(next(iter(batch.values())))
    yield "another number of rows", 3 if rows != 3 else 2, ""
    name = "as many rows as positions in a sequence"
    positions = next((tensor.shape[1] for tensor in batch.values() if tensor.dim() > 1), 0)
    if not positions:
        yield name, 0, "no input has a second dim"
    elif positions in (rows, 3 if rows != 3 else 2):
        yield name, 0, "the batch has as many" if positions == rows else "tried as another number of rows"
    elif not 1 < positions <= MOST_ROWS:
        yield name, 0, f"that is {positions:,} rows, and up to {MOST_ROWS} are tried"
    else:
        yield name, positions, ""


def _rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor[torch.arange(rows) % len(tensor)]
