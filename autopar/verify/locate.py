"""Locates the first value of a program that differs from the model's: the layer, the node, its types and shapes.

The program runs again on real processes and records its layers' outputs. These are assembled from the ranks' shards by their types, and
compared with the captured graph's values on one device, in the order of the forward pass; if all are right, gradients are compared in
the order of the backward pass. In the first layer that differs, every node is compared in the same way.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture import reference
from autopar.emit import emit
from autopar.emit.stage import layer_path
from autopar.flow import output_nodes
from autopar.measure import EXACT, Error, largest_difference, largest_finite, severity
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.plan import Plan
from autopar.run.pool import WorkerPool
from autopar.types import SpmdType
from autopar.verify.subject import Subject
from passes.collectives import convert
from passes.stages import LocalProgram

Types = tuple[SpmdType, ...]
Records = list[dict[str, dict[str, list[Any]]]]  # by rank, see remote.watch


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference; ``what`` is ``value`` (in the forward pass) or ``gradient`` (of the value, in the backward pass).

    ``types`` has the value's type on every axis, including the microbatch axis; ``local_shape`` is that of one rank and microbatch;
    ``difference`` is relative to the largest element.
    """

    layer: str
    node: str
    op: str
    what: str
    types: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    difference: float

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.node} ({self.op}) in {self.layer}: {self.types}, local {list(self.local_shape)} of "
            f"{list(self.global_shape)}, off by {self.difference:.1e}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"local_shape": list(self.local_shape), "global_shape": list(self.global_shape)}


def locate(subject: Subject, plan: Plan, pool: WorkerPool, error: Error) -> Difference | None:
    """Return the first difference of a program whose largest ``error`` is known; ``None`` if another run shows none, or if each
    microbatch is a separate batch, since the captured graph is then a single microbatch.

    If all values and gradients inside the layers are right, the error is in the reduction of a parameter's gradient, which ``error.where``
    names. Layers that are computed in halves run unsplit here, so ``None`` may mean that the halves are wrong. Raises the errors of
    running the program.
    """
    if subject.graph.accumulated > 1:
        return None
    original, plan = plan, _without_splits(plan)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        program = emit(subject.graph, plan, Path(folder) / "program", watch=True)
        state = Path(folder) / "initial.pt"
        torch.save(subject.state, state)

        def watch(layer: str | None) -> Records:
            arguments = (str(Path(folder) / "program"), str(state), subject.batch, layer)
            return pool.run("autopar.verify.remote:watch", *arguments)

        difference = _Search(subject, program, watch).first()
        return difference if difference is not None or plan is not original else _parameter_gradient(program, error)


def _without_splits(plan: Plan) -> Plan:
    """Return the plan with every layer computed in one part, since the values of several parts aren't those of the graph."""
    if all(layer.strategy.options.parts == 1 for layer in plan.layers):
        return plan
    return replace(plan, layers=tuple(replace(layer, strategy=layer.strategy.unsplit) for layer in plan.layers))


class _Search:
    def __init__(self, subject: Subject, program: LocalProgram, watch: Callable[[str | None], Records]) -> None:
        self.subject, self.program, self.watch = subject, program, watch
        self.graph = subject.graph
        self.values = _reference(subject)

    def first(self) -> Difference | None:
        records = self.watch(None)
        layers = range(len(self.graph.layers))
        for layer in layers:
            for position, output in enumerate(output_nodes(self.graph.classes[self.graph.layers[layer].cls])):
                if self._output(records, layer, position, output, "value") is not None:
                    inside = self._first_inside(layer, "value")
                    return inside or self._output(records, layer, position, output, "value")
        for layer in reversed(layers):
            for position, output in enumerate(output_nodes(self.graph.classes[self.graph.layers[layer].cls])):
                wrong = self._output(records, layer, position, output, "gradient")
                if wrong is not None:
                    return self._readers_of(layer, position) or wrong
        return next((d for layer in reversed(layers) if (d := self._first_inside(layer, "gradient")) is not None), None)

    def _readers_of(self, layer: int, position: int) -> Difference | None:
        """Return the first wrong gradient, in the order of the backward pass, in the layers that read this layer output."""
        name = self.graph.layers[layer].outputs[position]
        readers = [i for i, other in enumerate(self.graph.layers) if name in other.activations]
        return next((d for i in reversed(readers) if (d := self._first_inside(i, "gradient")) is not None), None)

    def _output(self, records: Records, layer: int, position: int, node: fx.Node, what: str) -> Difference | None:
        types = self.program.layers[layer].sharding.output(position)
        return self._compare(records, layer, str(position), node, node, types, what)

    def _first_inside(self, layer: int, what: str) -> Difference | None:
        """Return the first node of the layer that differs, in the order of the forward or backward pass."""
        records = self.watch(layer_path(self.program, layer))
        captured = {node.name: node for node in self.graph.classes[self.graph.layers[layer].cls].graph.graph.nodes}
        nodes = [node for node in self.program.layers[layer].graph.graph.nodes if node.op == "call_function"]
        for node in nodes if what == "value" else reversed(nodes):
            source = node
            while source.target is convert:
                source = source.args[0]
            if source.name in captured and "types" in meta(node):
                one = self._compare(records, layer, node.name, node, captured[source.name], meta(node)["types"], what)
                if one is not None:
                    return one
        return None

    def _compare(
        self, records: Records, layer: int, key: str, node: fx.Node, captured: fx.Node, types: Types, what: str
    ) -> Difference | None:
        want = self.values.get((layer, captured.name))
        if what == "gradient" and want is not None:
            # a conversion's source may have other readers in other types, so its gradient here is only one term of the value's gradient
            want = want.grad if node.target is not convert and want.requires_grad else None
        parts = self._parts(records, layer, key, 0 if what == "value" else 1)
        if want is None or parts is None:
            return None
        types = types if what == "value" else tuple(t.dual for t in types)
        sizes = [axis.size for axis in self.program.plan.mesh]
        got, replica_difference = _assemble(parts, [self.program.plan.microbatches, *sizes], types)
        difference = max(replica_difference, _difference(got, want), key=severity)
        if difference <= EXACT:
            return None
        axes = ("microbatch", *(axis.name for axis in self.program.plan.mesh))
        text = ", ".join(f"{t} on {axis}" for axis, t in zip(axes, types, strict=True))
        op = op_name(node) if node.op == "call_function" and node.target is not convert else _conversion(node)
        name = self.graph.layers[layer].name
        return Difference(name, node.name, op, what, text, tuple(parts[0].shape), tuple(want.shape), difference)

    def _parts(self, records: Records, layer: int, key: str, which: int) -> list[Tensor] | None:
        """Return the value (0) or gradient (1) of every microbatch and rank of the layer's stage, microbatches outermost."""
        plan = self.program.plan
        stage, attribute = plan.stage_of(layer), layer_path(self.program, layer)
        schedule, count = plan.sized_schedule, plan.stages[stage].devices[1]
        columns = [rank.get(attribute, {}).get(key, [])[which::2] for rank in records]
        parts: list[Tensor | None] = []
        for i in range(plan.microbatches):
            first, index = schedule.rank(stage, i) * count, i % (plan.microbatches // schedule.copies)
            parts += [column[index] if index < len(column) else None for column in columns[first : first + count]]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return tensors if len(tensors) == len(parts) else None


def _parameter_gradient(program: LocalProgram, error: Error) -> Difference | None:
    """Return the gradient of the parameter at ``error.where`` as the difference, with the types in the first layer that has it."""
    axes = [axis.name for axis in program.plan.mesh]
    for layer, local in zip(program.graph.layers, program.layers, strict=True):
        for name, held in zip(layer.parameters, local.parameters, strict=True):
            record = program.graph.parameters[name]
            if error.where in record.names:
                text = ", ".join(f"{t} on {axis}" for axis, t in zip(axes, held.types, strict=True))
                return Difference(
                    layer.name, name, "parameter", "gradient", text, held.shape, record.shape, error.value
                )
    return None


def _conversion(node: fx.Node) -> str:
    if node.target is not convert:
        return node.op
    _, axes, source, target = node.args
    assert isinstance(axes, tuple | list), axes
    return f"{source} to {target} on {', '.join(map(str, axes))}"


def _reference(subject: Subject) -> dict[tuple[int, str], Tensor]:
    """Return every value of the captured graph on one device, by layer and node; its ``grad`` is the gradient."""
    graph = subject.graph
    trainable = {n: p.trainable for p in graph.parameters.values() for n in p.names}
    parameters = {n: t.clone().requires_grad_(trainable[n]) for n, t in subject.state.items() if n in trainable}
    values: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            values[layer, node.name] = value
            if value.requires_grad:
                value.retain_grad()

    reference.run(graph, parameters, subject.batch, keep).backward()
    return values


def _assemble(parts: Sequence[Tensor], sizes: Sequence[int], types: Types) -> tuple[Tensor, float]:
    """Assemble a value from the ranks' shards (outermost axis slowest); also return the difference between ranks that should agree."""
    assert len(parts) == math.prod(sizes), (len(parts), sizes)
    current, replica_difference = list(parts), 0.0
    for size, t in zip(reversed(sizes), reversed(types), strict=True):
        groups = [current[i : i + size] for i in range(0, len(current), size)]
        if t.dim is not None:
            current = [torch.cat(group, t.dim) for group in groups]
        elif t.kind == "P":
            current = [torch.stack(group).sum(0) for group in groups]
        else:
            differences = (_difference(other, group[0]) for group in groups for other in group)
            replica_difference = max(replica_difference, *differences, key=severity)
            current = [group[0] for group in groups]
    return current[0], replica_difference


def _difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference relative to the largest element of ``want``; padding at the end of ``got``'s dims is ignored."""
    if got.dim() != want.dim() or any(a < b for a, b in zip(got.shape, want.shape, strict=True)):
        return math.inf
    got = got[tuple(slice(0, size) for size in want.shape)]
    return largest_difference(got, want) / max(largest_finite(want), 1e-12)
