"""A local layer as a readable ``nn.Module`` class: parameters under their original names, collectives by axis name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.emit.body import statements
from autopar.emit.experts import body_method, name_bodies
from autopar.emit.expressions import Text, literal
from autopar.emit.names import Names, attributes, remark
from autopar.emit.pieces import compiled_pieces
from autopar.ops.compilation import stays_eager
from autopar.ops.meta import meta
from autopar.plan import FULL, SELECTIVE
from autopar.types import SpmdType
from passes.layer import LocalLayer, rows_of
from passes.localise_layer import random_seed


def layer_class(
    layer: LocalLayer,
    name: str,
    head: tuple[str, str],
    axes: tuple[str, ...],
    shared: frozenset[int],
    watch: bool = False,
) -> str:
    """The source of the class.

    With ``watch`` every value gets a line, and ``self.watched`` holds all values by node name, to find a wrong one.

    ``head`` says in words which layers use the class and how they are sharded, and has the text of their ``LayerSpec``; ``shared`` are the
    indices (among the class's parameters) of those that the stage owns because several layers use them: they become arguments.
    """
    uses, spec = head
    lines = [f"class {name}(nn.Module):", f'    """{remark(uses)}"""', "", f"    SPEC = {spec}", ""]
    lines += _constructor(layer, axes, shared)
    lines += [""]
    lines += _forward(layer, axes, shared, watch)
    return "\n".join(lines) + "\n"


def parameter_paths(layer: LocalLayer) -> dict[str, str]:
    """For every parameter's class-local name, the attribute path that holds it."""
    return attributes(tuple(parameter.name for parameter in layer.parameters))


def buffer_paths(layer: LocalLayer) -> dict[str, str]:
    """For every buffer that the layer writes, the attribute path that holds it."""
    names = tuple(parameter.name for parameter in layer.parameters)
    paths = attributes((*names, *(buffer.name for buffer in layer.cls.buffers)))
    return {buffer.name: paths[buffer.name] for buffer in layer.cls.buffers}


def types_text(axes: tuple[str, ...], types: tuple[SpmdType, ...]) -> str:
    """The types as a comment: ``S(0) on data, I on tensor``."""
    return ", ".join(f"{t} on {remark(axis)}" for axis, t in zip(axes, types, strict=True))


def _constructor(layer: LocalLayer, axes: tuple[str, ...], shared: frozenset[int]) -> list[str]:
    own = [(i, p) for i, p in enumerate(layer.parameters) if i not in shared]
    number = "number: int, " if layer.random else ""
    lines = [f"    def __init__(self, {number}**factory: object) -> None:", "        super().__init__()"]
    if layer.random:
        lines.append("        self.number = number  # tells this layer's random numbers from another's")
    made: set[str] = set()
    paths = parameter_paths(layer)
    for index, parameter in own:
        path = paths[parameter.name]
        parts = path.split(".")
        for depth in range(1, len(parts)):
            owner = ".".join(parts[:depth])
            if owner not in made:
                made.add(owner)
                lines.append(f"        self.{owner} = nn.Module()")
        value = layer.cls.parameters[index]
        shape = ", ".join(map(str, parameter.shape))
        grad = "" if value.requires_grad else ", requires_grad=False"
        tensor = f"torch.empty({shape or '()'}, **factory, dtype={value.dtype})"
        lines.append(f"        self.{path} = nn.Parameter({tensor}{grad})  # {types_text(axes, parameter.types)}")
    for path, value in zip(buffer_paths(layer).values(), layer.cls.buffers, strict=True):
        owner, _, leaf = path.rpartition(".")
        parts = owner.split(".") if owner else []
        for depth in range(1, len(parts) + 1):
            if (above := ".".join(parts[:depth])) not in made:
                made.add(above)
                lines.append(f"        self.{above} = nn.Module()")
        shape = ", ".join(map(str, value.shape))
        tensor = f"torch.empty({shape or '()'}, **factory, dtype={value.dtype})"
        lines.append(f'        {".".join(["self", *parts])}.register_buffer("{leaf}", {tensor})')
    return lines


def _forward(layer: LocalLayer, axes: tuple[str, ...], shared: frozenset[int], watch: bool) -> list[str]:
    names = Names()
    texts: dict[fx.Node, Text] = {}
    arguments: list[str] = []
    resident: list[str] = []
    rows: list[int | None] = []
    notes: list[str] = []
    nodes = list(layer.graph.graph.nodes)
    bodies = name_bodies(nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first_parameter = len(inputs) - len(layer.parameters)
    states, dims = buffer_paths(layer), rows_of(layer.cls, layer.sharding.types[0])[0]
    for index, (node, kind) in enumerate(zip(inputs, layer.kinds, strict=True)):
        if kind == "parameter" and index - first_parameter not in shared:
            path = layer.parameters[index - first_parameter].name
            texts[node] = Text("self." + parameter_paths(layer)[path])
            continue
        position = index - len(layer.cls.activations) - len(layer.cls.inputs)
        if kind == "constant" and layer.cls.constants[position].name in states:
            texts[node] = Text("self." + states[layer.cls.constants[position].name])
            continue
        argument = names.fresh(node.name)
        texts[node] = Text(argument)
        arguments.append(argument)
        rows.append(dims[index])
        if kind != "activation":
            resident.append(argument)
        notes.append(f"        # {argument} {tuple(meta(node)['val'].shape)}: {types_text(axes, layer.border(index))}")
    compiled = is_compiled(layer) and not watch
    seeds = [node for node in nodes if node.target is random_seed] if compiled else []
    texts.update({node: Text(f"seeds[{number}]") for number, node in enumerate(seeds)})
    typed = ", ".join(["self", *(f"{argument}: torch.Tensor" for argument in arguments)])
    signature = f"{typed}, key: int" if layer.random else typed
    inner = f"{typed}, seeds: tuple[torch.Tensor, ...]" if seeds else signature
    pieces: list[str] = []
    if compiled and layer.half is not None:
        decorators = []
        computed, pieces = compiled_pieces(nodes, texts, names)
        body = [*notes, *computed]
    else:
        decorators = ["    @torch.compile(dynamic=False)"] if compiled else []
        body = [*notes, *statements(nodes, texts, names, watch, compiled)]
    count = len(layer.cls.outputs) + len(layer.cls.updates)
    returns = "torch.Tensor" if count == 1 else "tuple[torch.Tensor, ...]"
    body += [line for op, name in bodies.items() for line in body_method(op, name)]
    outer = _outer(layer, arguments, resident, seeds, rows)
    body += pieces
    computes = returns if layer.half is None else "halves.Half"
    if not outer:
        return [*decorators, f"    def forward({signature}) -> {computes}:", *body]
    return [
        f"    def forward({signature}) -> {returns}:",
        *outer,
        "",
        *decorators,
        f"    def compute({inner}) -> {computes}:",
        *body,
    ]


def is_compiled(layer: LocalLayer) -> bool:
    """Whether ``torch.compile`` compiles the layer's arithmetic."""
    return layer.strategy.options.compiled and not stays_eager(layer.cls)


def is_narrow(layer: LocalLayer) -> bool:
    """Whether the layer's saved activations are in 8 bits."""
    return layer.strategy.saves_int8 and not layer.cls.gives_loss


def _outer(
    layer: LocalLayer, arguments: list[str], resident: list[str], seeds: list[fx.Node], rows: list[int | None]
) -> list[str]:
    """The ``forward`` that wraps ``compute``, if needed; ``resident`` are the arguments that are in memory anyway.

    ``seeds``: compiled code takes them as tensors, because it would be compiled anew for each new number. ``rows`` are the arguments' dims
    that have the rows of the microbatch: where it is halved, ``compute`` takes a half.
    """
    first = []
    if seeds:
        assert [node.args[0] for node in seeds] == list(range(len(seeds)))
        axes = ", ".join(literal(node.args[1], {}) for node in seeds)
        first = [f"        seeds = kernels.seeds(key, self.number, [{axes}])"]
    own = ["seeds"] if seeds else ["key"] if layer.random else []
    given = ", ".join([*arguments, *own])
    call, operands = "self.compute", given
    if layer.half is not None:
        call = "halves.interleaved"
        operands = f"self.compute, {halved(arguments, rows, rows_of(layer.cls, layer.sharding.types[0])[1])}"
    found: list[str] = []
    if layer.strategy.recomputation == FULL:  # the stage handles segments of several layers
        found = [
            "        # Recomputed in the backward pass: only the arguments are kept.",
            f"        return checkpoint({call}, {operands}, use_reentrant=False, preserve_rng_state=False)",
        ]
    elif layer.strategy.recomputation == SELECTIVE:
        found = [
            "        # Recomputed in the backward pass, but for what is kept.",
            f"        return selective.selectively(self.compute, {given})",
        ]
    elif (
        seeds
        or layer.strategy.offloads_activations
        or is_narrow(layer)
        or (layer.half is not None and not layer.chained)
    ):
        found = [f"        return {call}({operands})"]
    if layer.strategy.offloads_activations:
        found = [
            "        # What the backward pass needs waits in the host's memory.",
            f"        with offload.saved({', '.join(['self', *resident])}):",
            *(f"    {line}" for line in found),
        ]
    elif is_narrow(layer):
        fused = ", fused=True" if is_compiled(layer) else ""
        found = [
            "        # What the backward pass needs is stored in 8 bits: gradients are rounded.",
            f"        with int8.saved({', '.join(['self', *arguments])}{fused}):",
            *(f"    {line}" for line in found),
        ]
    return [*first, *found]


def halved(arguments: Sequence[str], rows: Sequence[int | None], joined: Sequence[int | None]) -> str:
    """The arguments of ``halves.interleaved`` behind the function: the function's arguments, the dims of their rows, those of its
    results."""
    given = "".join(f"{argument}, " for argument in arguments).rstrip()
    return f"({given}), {literal(tuple(rows), {})}, {literal(tuple(joined), {})}"
