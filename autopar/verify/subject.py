"""A model and its float64 results on one device: the reference with which the model's programs are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import (
    BatchStructure,
    Float64Everywhere,
    capture,
    flatten_batch,
    rebuild_batch,
    separate_microbatches,
)
from autopar.capture.eager import WithoutDropout, copy_for_eager, summed, with_zeros
from autopar.capture.export import call_model
from autopar.capture.external_state import ExternalState
from autopar.capture.storage import ties
from autopar.errors import BatchError, ModelError
from autopar.graph import Graph
from autopar.ops.facts import OpKind, facts
from autopar.shard import annotate


@dataclass(frozen=True)
class Subject:
    """A model to verify: the captured graph, the state dict, the batch by input name, and eager PyTorch's loss and gradients by parameter
    name. ``dropout`` says whether the model has dropout, which is turned off for the comparison. ``buffers`` has the values, after the
    step, of the buffers that the forward pass writes. ``rounding`` has the rounding error of each parameter's gradient."""

    graph: Graph
    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]
    dropout: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)


def make_subject(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    microbatches: int = 1,
) -> Subject:
    """Capture a copy of ``model`` in float64 and run it eagerly, forward and backward. ``model`` itself isn't changed.

    If the model couples the examples of a batch and ``microbatches`` is more than one, each microbatch is treated as a separate batch
    (``autopar.capture.separate_microbatches``): one device accumulates over the same microbatches, and its loss is their mean loss.

    Raises:
        ModelError: parameters or buffers are on meta and have no values, or the model draws random numbers, except for dropout.
        BatchError: the batch is on meta.
        CaptureError: the model can't be exported.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ModelError("the model is on meta, where parameters have no values", "build it on the CPU to verify it")
    copied, external_state = copy_for_eager(model, loss_fn), ExternalState(model, loss_fn)
    model, loss_fn = copied.model, copied.loss_fn
    disabled = _disable_dropout_modules(model)
    with external_state.restored(), Float64Everywhere(), WithoutDropout() as off:
        graph = annotate(capture(model, batch, loss_fn, precision="float64", name=name))
        structure = graph.structure
        assert isinstance(structure, BatchStructure)
        tensors = flatten_batch(structure, batch)

        def capture_rows(rows: int) -> Graph:
            part = rebuild_batch(structure, [tensor[:rows] for tensor in tensors.values()])
            return annotate(capture(model, part, loss_fn, precision="float64", name=name))

        graph = separate_microbatches(graph, capture_rows, microbatches)
        if any(tensor.is_meta for tensor in tensors.values()):
            raise BatchError("the batch is on meta and has no values", "give one on the CPU")
        _refuse_random(graph)
        tensors = {n: tensor.detach().cpu() for n, tensor in tensors.items()}
        state = {n: tensor.detach().clone() for n, tensor in model.state_dict().items()}  # before statistics change
        loss, gradients, after = _eager(model, graph, loss_fn, tensors, state)
        rounding = _rounding(model, graph, loss_fn, tensors, state, gradients)
    dropout = off.seen or disabled
    return Subject(graph, state, tensors, loss, gradients, dropout, after, rounding)


def with_batch(
    subject: Subject, model: nn.Module, tensors: dict[str, Tensor], loss_fn: Callable[..., Any] | None
) -> Subject:
    """Return the subject with another batch of the same shapes, by input name. Raises any error that the model raises."""
    copied, structure = copy_for_eager(model, loss_fn), subject.graph.structure
    assert isinstance(structure, BatchStructure)
    # if all examples of the original batch share one row, rebuilding makes them share the first row here, too
    tensors = flatten_batch(structure, rebuild_batch(structure, list(tensors.values())))
    with ExternalState(model, loss_fn).restored(), Float64Everywhere(), WithoutDropout():
        arguments = copied.model, subject.graph, copied.loss_fn, tensors, subject.state
        loss, gradients, after = _eager(*arguments)
        rounding = _rounding(*arguments, gradients)
    return dataclasses.replace(subject, batch=tensors, loss=loss, gradients=gradients, buffers=after, rounding=rounding)


def _disable_dropout_modules(model: nn.Module) -> bool:
    """Set the probability of every dropout module to 0, since ``WithoutDropout`` doesn't see calls inside opaque modules; return whether
    any of them was active."""
    modules = [module for module in model.modules() if isinstance(module, _DROPOUT) and module.p]
    for module in modules:
        module.p = 0.0
    return any(module.training for module in modules)


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _eager(
    model: nn.Module,
    graph: Graph,
    loss_fn: Callable[..., Any] | None,
    tensors: dict[str, Tensor],
    state: dict[str, Tensor],
    factor: float = 1.0,
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Run a step and return the loss, the gradients of the loss times ``factor`` (where there are any), and the new values of the
    persistent buffers that the graph writes."""
    structure = graph.structure
    assert isinstance(structure, BatchStructure)
    parts = list(zip(*(tensor.chunk(graph.accumulated) for tensor in tensors.values()), strict=True))
    loss, written = 0.0, []
    model.zero_grad()
    for part in parts:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(state[name])  # each microbatch starts from the buffers at the step's start
        # clones, because a model may write to its batch
        term = call_model(model, structure, loss_fn, [tensor.clone() for tensor in part]) / len(parts)
        (term if factor == 1.0 else factor * term).backward()
        loss += float(term.detach())
        written.append({n: t.detach().clone() for n, t in model.state_dict().items() if n in graph.buffers})
    parameters = dict(model.named_parameters())
    gradients = summed({n: p.grad for n, p in parameters.items() if p.grad is not None}, ties(model))
    gradients = with_zeros(gradients, parameters, graph.possibly_unused)
    kept = [buffer.name for buffer in graph.buffers.values() if buffer.persistent]
    return loss, gradients, {n: _mean([buffers[n] for buffers in written]) for n in kept}


_FACTORS = (1 / 3, 0.7)
"""Factors of the loss that change rounding; powers of two would not."""


def _rounding(
    model: nn.Module,
    graph: Graph,
    loss_fn: Callable[..., Any] | None,
    tensors: dict[str, Tensor],
    state: dict[str, Tensor],
    gradients: dict[str, Tensor],
) -> dict[str, float]:
    """Return the rounding error of every gradient of eager PyTorch: its largest change if the loss is multiplied by a factor and the
    gradient divided by the factor, which changes nothing in exact arithmetic."""
    errors = dict.fromkeys(gradients, 0.0)
    for factor in _FACTORS:
        _, scaled, _ = _eager(model, graph, loss_fn, tensors, state, factor)
        for name, gradient in gradients.items():
            if gradient.numel():
                errors[name] = max(errors[name], float((scaled[name] / factor - gradient).abs().max()))
    return errors


def _mean(values: list[Tensor]) -> Tensor:
    """Return a buffer's value after the step from its values after each microbatch: their mean; integers are equal in all microbatches."""
    return torch.stack(values).mean(0) if values[0].is_floating_point() and len(values) > 1 else values[-1]


def _refuse_random(graph: Graph) -> None:
    """Raise ``ModelError`` for a model that draws random numbers: no two runs of it are equal, even without autopar."""
    for layer in graph.layers:
        for node in graph.classes[layer.cls].graph.graph.nodes:
            if facts(node).kind is OpKind.RANDOM:
                raise ModelError(
                    f"the model draws random numbers ({facts(node).short} ones, in {layer.name}), so no two runs "
                    "of it can be compared",
                    "pass the random numbers in the batch; only dropout is turned off automatically",
                )
