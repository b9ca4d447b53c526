"""Runs the captured graph on one device, as the reference for emitted programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import Graph
from autopar.ops.facts import OpKind, facts, op_name
from autopar.program import kernels, kernels_norm, kernels_rnn
from autopar.program.guards import check_guard


def parameter_tensors(graph: Graph, originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the graph's parameters by name; a sliced parameter is a differentiable slice of its original, a
    stacked one a differentiable stack of its originals.

    ``originals`` has the user's parameters, each under at least one of its names.
    """
    tensors = {}
    for name, parameter in graph.parameters.items():
        if parameter.stacked:
            tensor = torch.stack([originals[n] for n in parameter.stacked])
        else:
            tensor = next(originals[n] for n in parameter.names if n in originals)
        if parameter.dim is not None:
            tensor = tensor.narrow(parameter.dim, parameter.start, parameter.shape[parameter.dim])
        tensors[name] = tensor
    return tensors


Watch = Callable[[int, fx.Node, Any], None]
"""A function that gets a layer's index, a node of the layer's class, and the node's value."""


class _WatchedLayer(fx.Interpreter):
    def __init__(self, layer: int, gm: fx.GraphModule, watch: Watch) -> None:
        super().__init__(gm)
        self._layer, self._watch = layer, watch

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self._watch(self._layer, n, value)
        return value


class _EvaluatedLayer(fx.Interpreter):
    """Runs a layer in evaluation mode as programs do: random numbers are their means, and batch norm uses running statistics."""

    def run_node(self, n: fx.Node) -> Any:
        kind = facts(n).kind
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        if kind is OpKind.DROPOUT:
            return args[0]
        if op_name(n) == "aten.scaled_dot_product_attention":
            target = kernels.attention  # without a seed: no dropout
        elif kind is OpKind.RANDOM or target is kernels_rnn.recurrent:
            kwargs = {**kwargs, "seed": None}
        elif target in kernels_norm.WITH_MODE:
            kwargs = {**kwargs, "training": False}
        return target(*args, **kwargs)


def run(
    graph: Graph,
    parameters: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    watch: Watch | None = None,
    buffers: MutableMapping[str, Tensor] | None = None,
    *,
    training: bool = True,
) -> Tensor:
    """Run the prelude and every layer's graph on a batch (by input name, see ``flatten_batch``) and return the loss.

    ``parameters`` are the user's, by name; gradients flow to them. ``watch`` is called for every node of the layers. ``buffers`` has the
    buffers that earlier steps wrote, and receives those of this step. Without ``training``, run in the evaluation mode of programs.

    Raises ``GuardError`` for a batch that violates a guard.
    """
    written = {} if buffers is None else buffers
    tensors = parameter_tensors(graph, parameters)
    scalars: dict[str, Tensor] = {}
    if graph.prelude is not None:
        with torch.no_grad():
            results = graph.prelude(*(batch[value.name] for value in graph.inputs))
        scalars = {value.name: result for value, result in zip(graph.scalars, results, strict=False)}
        for guard, result in zip(graph.guards, results[len(graph.scalars) :], strict=True):
            check_guard(result, guard.value, guard.line)
    stored = graph.constants | {n: b.value for n, b in graph.buffers.items() if b.value is not None} | dict(written)
    values: dict[str, Tensor] = {}
    for index, layer in enumerate(graph.layers):
        arguments = (
            [values[name] for name in layer.activations]
            + [batch[name] for name in layer.inputs]
            + [stored[name] for name in layer.constants]
            + [scalars[name] for name in layer.scalars]
            + [tensors[name] for name in layer.parameters]
        )
        cls = graph.classes[layer.cls]
        if not training:
            outputs = _EvaluatedLayer(cls.graph).run(*arguments)
        else:
            outputs = cls.graph(*arguments) if watch is None else _WatchedLayer(index, cls.graph, watch).run(*arguments)
        values.update(zip(layer.outputs, outputs, strict=False))  # new values of buffers follow the outputs
        names = dict(zip((buffer.name for buffer in cls.buffers), layer.buffers, strict=True))
        updates = outputs[len(layer.outputs) :]
        written.update((names[n], value.detach()) for n, value in zip(cls.updates, updates, strict=True))
    return values[graph.loss]
