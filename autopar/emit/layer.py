"""Emits a local layer as a readable ``nn.Module`` class: parameters under their original names, collectives by axis name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.emit.body import statements
from autopar.emit.experts import body_method, name_bodies
from autopar.emit.expressions import Text, literal
from autopar.emit.modules import torch_modules
from autopar.emit.names import Names, attributes, remark
from autopar.emit.pieces import COMPILED, compiled_pieces
from autopar.ops.meta import meta
from autopar.techniques.technique import Call
from autopar.types import SpmdType
from passes.layer import LocalLayer, batch_dims
from passes.localise_layer import random_seed


def layer_body(layer: LocalLayer, axes: tuple[str, ...], shared: frozenset[int], watch: bool = False) -> str:
    """Return the source of the layer's class below its docstring.

    With ``watch`` every value has a line, and ``self.watched`` has all values by node name, to locate a wrong one. ``shared`` are the
    indices of parameters that the stage owns because several layers use them: they become arguments.
    """
    modules = torch_modules(layer, shared)  # also sets meta["module"], which the calls in forward follow
    made = _constructor(layer, axes, shared, modules)
    return "\n".join([*(made and [*made, ""]), *_forward(layer, axes, shared, watch)]) + "\n"


def parameter_paths(layer: LocalLayer) -> dict[str, str]:
    """Map the layer's parameter names to attribute paths of the emitted class."""
    return attributes(tuple(parameter.name for parameter in layer.parameters))


def buffer_paths(layer: LocalLayer) -> dict[str, str]:
    """Map the names of the layer's buffers to attribute paths of the emitted class."""
    names = tuple(parameter.name for parameter in layer.parameters)
    paths = attributes((*names, *(buffer.name for buffer in layer.cls.buffers)))
    return {buffer.name: paths[buffer.name] for buffer in layer.cls.buffers}


def types_text(axes: tuple[str, ...], types: tuple[SpmdType, ...]) -> str:
    """Return types as a comment: ``S(0) on data, I on tensor``."""
    return ", ".join(f"{t} on {remark(axis)}" for axis, t in zip(axes, types, strict=True))


def _constructor(
    layer: LocalLayer, axes: tuple[str, ...], shared: frozenset[int], modules: Mapping[str, str]
) -> list[str]:
    """Return the lines of the constructor; none if the base class's suffices."""
    own = [(i, p) for i, p in enumerate(layer.parameters) if i not in shared]
    if not (own or layer.random or layer.cls.buffers):
        return []
    number = "number: int, " if layer.random else ""
    lines = [
        f"    def __init__(self, spec: LayerSpec, {number}**factory: object) -> None:",
        "        super().__init__(spec)",
    ]
    if layer.random:
        lines.append("        self.number = number  # tells this layer's random numbers from another's")
    layouts = {parameter.types for _, parameter in own}
    if len(layouts) == 1 and len(own) > 1:
        lines.append(f"        # Every parameter is {types_text(axes, own[0][1].types)}.")
    made: set[str] = set()
    paths = parameter_paths(layer)
    for index, parameter in own:
        path = paths[parameter.name]
        remarks = f"  # {types_text(axes, parameter.types)}" if len(layouts) > 1 or len(own) == 1 else ""
        owner = path.rpartition(".")[0]
        if owner in modules:
            lines += _owners(owner.rpartition(".")[0], made)
            lines += [] if owner in made else [f"        self.{owner} = {modules[owner]}{remarks}"]
            made.add(owner)
            continue
        lines += _owners(owner, made)
        grad = "" if layer.cls.parameters[index].requires_grad else ", requires_grad=False"
        tensor = _empty(parameter.shape, layer.cls.parameters[index].dtype)
        lines.append(f"        self.{path} = nn.Parameter({tensor}{grad}){remarks}")
    for path, value in zip(buffer_paths(layer).values(), layer.cls.buffers, strict=True):
        owner, _, leaf = path.rpartition(".")
        lines += _owners(owner, made)
        holder = f"self.{owner}" if owner else "self"
        lines.append(f'        {holder}.register_buffer("{leaf}", {_empty(value.shape, value.dtype)})')
    return lines


def _owners(path: str, made: set[str]) -> list[str]:
    """Return the lines that create the modules down to ``path``, except those already in ``made``."""
    parts = path.split(".") if path else []
    missing = [owner for depth in range(len(parts)) if (owner := ".".join(parts[: depth + 1])) not in made]
    made.update(missing)
    return [f"        self.{owner} = nn.Module()" for owner in missing]


def _empty(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"torch.empty({', '.join(map(str, shape)) or '()'}, **factory, dtype={dtype})"


def _forward(layer: LocalLayer, axes: tuple[str, ...], shared: frozenset[int], watch: bool) -> list[str]:
    names = Names()
    texts: dict[fx.Node, Text] = {}
    arguments: list[str] = []
    resident: list[str] = []
    rows: list[int | None] = []
    notes: dict[str, list[str]] = {}  # arguments by shape and SPMD types
    nodes = list(layer.graph.graph.nodes)
    bodies = name_bodies(nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first_parameter = len(inputs) - len(layer.parameters)
    buffers, dims = buffer_paths(layer), batch_dims(layer.cls, layer.sharding.types[0])[0]
    for index, (node, kind) in enumerate(zip(inputs, layer.kinds, strict=True)):
        if kind == "parameter" and index - first_parameter not in shared:
            path = layer.parameters[index - first_parameter].name
            texts[node] = Text("self." + parameter_paths(layer)[path])
            continue
        position = index - len(layer.cls.activations) - len(layer.cls.inputs)
        if kind == "constant" and layer.cls.constants[position].name in buffers:
            texts[node] = Text("self." + buffers[layer.cls.constants[position].name])
            continue
        argument = names.fresh(node.name)
        texts[node] = Text(argument)
        arguments.append(argument)
        rows.append(dims[index])
        if kind != "activation":
            resident.append(argument)
        described = f"{tuple(meta(node)['val'].shape)}: {types_text(axes, layer.border(index))}"
        notes.setdefault(described, []).append(argument)
    comments = [f"        # {', '.join(several)} {described}" for described, several in notes.items()]
    compiled = layer.compiled and not watch
    seeds = [node for node in nodes if node.target is random_seed] if compiled else []
    texts.update({node: Text(f"seeds[{number}]") for number, node in enumerate(seeds)})
    typed = ", ".join(["self", *(f"{argument}: torch.Tensor" for argument in arguments)])
    signature = f"{typed}, key: int | None" if layer.random else typed
    inner = f"{typed}, seeds: tuple[torch.Tensor | None, ...]" if seeds else signature
    pieces: list[str] = []
    if compiled and layer.half is not None:
        decorators = []
        computed, pieces = compiled_pieces(nodes, texts, names)
        body = [*comments, *computed]
    else:
        decorators = [COMPILED] if compiled else []
        body = [*comments, *statements(nodes, texts, names, watch, compiled)]
    count = len(layer.cls.outputs) + len(layer.cls.updates)
    returns = "torch.Tensor" if count == 1 else "tuple[torch.Tensor, ...]"
    body += [line for op, name in bodies.items() for line in body_method(op, name)]
    outer = _outer(layer, arguments, resident, seeds, rows)
    body += pieces
    compute_type = returns if layer.half is None else layer.strategy.options.splitting.compute_type
    if not outer:
        return [*decorators, f"    def forward({signature}) -> {compute_type}:", *body]
    return [
        f"    def forward({signature}) -> {returns}:",
        *outer,
        "",
        *decorators,
        f"    def compute({inner}) -> {compute_type}:",
        *body,
    ]


def _outer(
    layer: LocalLayer, arguments: list[str], resident: list[str], seeds: list[fx.Node], rows: list[int | None]
) -> list[str]:
    """Return the body of a ``forward`` that wraps ``compute``; empty if no wrapper is needed.

    ``resident`` are arguments that stay in memory until the backward pass anyway. ``seeds`` are passed to compiled code as tensors,
    because each new Python number would recompile it. ``rows`` are the arguments' batch dims.
    """
    first = []
    if seeds:
        assert [node.args[0] for node in seeds] == list(range(len(seeds)))
        axes = ", ".join(literal(node.args[1], {}) for node in seeds)
        first = [f"        seeds = kernels.seeds(key, self.number, [{axes}])"]
    own = ["seeds"] if seeds else ["key"] if layer.random else []
    if layer.chained:  # the stage interleaves the halves of all layers
        return first
    call = Call(
        arguments=(*arguments, *own),
        function="self.compute",
        rows=(*rows, *(None for _ in own)),
        joined=batch_dims(layer.cls, layer.sharding.types[0])[1],
        inputs=tuple(arguments),
        resident=tuple(resident),
        compiled=layer.compiled,
        gives_loss=layer.cls.gives_loss,
    )
    changed = layer.strategy.options.wrap_call(call)
    if changed == call and not seeds:
        return first
    return [*first, *(f"        {line}" for line in changed.lines("return "))]
