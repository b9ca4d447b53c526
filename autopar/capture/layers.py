"""Turns a graph's groups of nodes (``segment``) into layers and layer classes, and its scalars into a prelude.

A *scalar* is a 0-d value that depends on the batch alone, such as the number of valid tokens. The *prelude* is the graph that computes the
scalars from the global batch, before any layer runs.
"""

from __future__ import annotations

import builtins
import keyword
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from autopar.capture.segment import NodeGroup, updates
from autopar.graph import GraphLayer, LayerClass, Value
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import dtype_of, shape_of
from autopar.plan import UNNAMED_LAYERS
from passes.clean.nodes import ancestors, copy_origin
from passes.clean.views import views_of

KINDS = ("activation", "input", "constant", "state", "scalar", "parameter")


@dataclass(slots=True)
class LayerInterface:
    """A layer's interface: the nodes of other layers and the placeholders that it reads, by kind, its outputs, and new values of buffers.

    ``state`` are the buffers that the layer reads and the model writes; ``body`` are the layer's nodes.
    """

    activation: list[fx.Node] = field(default_factory=list)
    input: list[fx.Node] = field(default_factory=list)
    constant: list[fx.Node] = field(default_factory=list)
    state: list[fx.Node] = field(default_factory=list)
    scalar: list[fx.Node] = field(default_factory=list)
    parameter: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    updates: dict[str, fx.Node] = field(default_factory=dict)
    body: list[fx.Node] = field(default_factory=list)


def layer_interfaces(gm: fx.GraphModule, groups: list[NodeGroup]) -> list[LayerInterface]:
    """Return each group's interface. A node that depends only on inputs and constants is in the body of every group that needs it."""
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    owner = {node: index for index, group in enumerate(groups) for node in group.nodes}
    result = []
    written = updates(gm)
    loss = loss_node(gm)
    for index, group in enumerate(groups):
        interface, members = LayerInterface(), set(group.nodes)
        seen: set[fx.Node] = set()
        stack = [operand for node in group.nodes for operand in node.all_input_nodes]
        while stack:
            node = stack.pop()
            if node in seen or node in members:
                continue
            seen.add(node)
            kind = _kind(node, owner)
            if kind is None:
                members.add(node)
                stack.extend(node.all_input_nodes)
            else:
                getattr(interface, kind).append(node)
        interface.body = sorted(members, key=position.__getitem__)
        first_use: dict[fx.Node, int] = {}
        for rank, node in enumerate(interface.body):
            for operand in node.all_input_nodes:
                first_use.setdefault(operand, rank * 64 + node.all_input_nodes.index(operand))
        interface.activation.sort(key=position.__getitem__)
        interface.input.sort(key=position.__getitem__)
        for names in (interface.constant, interface.state, interface.scalar, interface.parameter):
            names.sort(key=first_use.__getitem__)
        interface.outputs = [
            n for n in group.nodes if n is loss or any(owner.get(user, -1) > index for user in n.users)
        ]
        interface.updates = {name: node for name, node in written.items() if owner.get(node) == index}
        result.append(interface)
    return result


def loss_node(gm: fx.GraphModule) -> Any:
    """Return the graph's first output."""
    result: Any = gm.graph.output_node().args[0]
    while isinstance(result, tuple | list):
        result = result[0]
    return result


def _kind(node: fx.Node, owner: dict[fx.Node, int]) -> str | None:
    """Return the kind of interface value that ``node`` is for a layer that reads it; ``None`` if each such layer recomputes it."""
    if node.op == "placeholder":
        return next(kind for kind in ("parameter", "input", "constant", "state") if kind in meta(node))
    if meta(node).get("scalar"):
        return "scalar"
    return "activation" if node in owner else None


def build_layers(
    groups: list[NodeGroup], interfaces: list[LayerInterface], classes: dict[str, str], root: str
) -> tuple[tuple[GraphLayer, ...], dict[str, LayerClass], dict[str, Value]]:
    """Return the layers, their classes by name, and the activations by name. ``classes`` maps module paths to class names; ``root``
    is the model's class name."""
    names = layer_names(groups, classes)
    values: dict[fx.Node, Value] = {}
    by_signature: dict[Any, LayerClass] = {}
    taken: set[str] = set()
    labels = {"loss"}  # a layer may have this name, too
    layers = []
    for index, (interface, name) in enumerate(zip(interfaces, names, strict=True)):
        final = index == len(interfaces) - 1
        for k, node in enumerate(interface.outputs):
            label = name if len(interface.outputs) == 1 else f"{name}:{k}"
            label = "loss" if final else unique(label, labels, separator="@")
            values[node] = Value(label, shape_of(node), dtype_of(node), meta(node)["gradient"])
        stored = [meta(n)["parameter"].name for n in interface.parameter] + _buffer_names(interface)
        local = _local_names(stored, name, groups[index].leaves)
        key = _signature(interface, local)
        if key not in by_signature:
            cls = class_name(name, groups[index], classes, root, first=index == 0, final=final)
            by_signature[key] = _layer_class(unique(cls, taken), interface, local)
        layers.append(
            GraphLayer(
                name=name,
                cls=by_signature[key].name,
                activations=tuple(values[n].name for n in interface.activation),
                inputs=tuple(meta(n)["input"] for n in interface.input),
                constants=(
                    *(meta(n)["constant"] for n in interface.constant),
                    *(meta(n)["buffer"] for n in interface.state),
                ),
                scalars=tuple(meta(n)["scalar_value"].name for n in interface.scalar),
                parameters=tuple(meta(n)["parameter"].name for n in interface.parameter),
                outputs=tuple(values[n].name for n in interface.outputs),
                buffers=tuple(_buffer_names(interface)),
            )
        )
    return tuple(layers), {cls.name: cls for cls in by_signature.values()}, {v.name: v for v in values.values()}


def _local_names(stored: list[str], name: str, leaves: tuple[str, ...]) -> dict[str, str]:
    """Map the names of a layer's parameters and buffers in the model to names in the layer's class.

    If all of them are in the module ``name``, their names become relative to it, so that equal modules have equal names. In a chain of
    modules without submodules (``leaves``), the modules' numbers become relative to the first.
    """
    if all(path.startswith(name + ".") for path in stored):
        return {path: path.removeprefix(name + ".") for path in stored}
    first = leaves[0].rpartition(".")[2] if leaves else ""
    if not first.isdigit():
        return {path: path for path in stored}
    local = {}
    for path in stored:
        leaf = next((leaf for leaf in leaves if path.startswith(leaf + ".")), None)
        if leaf is None:
            return {path: path for path in stored}
        local[path] = f"{int(leaf.rpartition('.')[2]) - int(first)}.{path.removeprefix(leaf + '.')}"
    return local


def _buffer_names(interface: LayerInterface) -> list[str]:
    """Return the names of the buffers that the model writes and the layer reads or writes."""
    return list(dict.fromkeys((*(meta(n)["buffer"] for n in interface.state), *interface.updates)))


def layer_names(groups: list[NodeGroup], classes: dict[str, str]) -> list[str]:
    """Return a name for each group: its block; else the innermost module that contains the complete group and no block; else a module with
    parameters: the first one for the first group (the embedding), the last one for other groups (the head).
    """
    blocks = [group.block for group in groups if group.block]
    taken: set[str] = set()
    names = []
    for index, group in enumerate(groups):
        name = group.block
        if not name:
            paths = [path for path in group.paths if path]
            common = _common(paths)
            parameterized = [path for path in paths if _has_parameters(group, path)]
            if common and common in classes and not any(b == common or b.startswith(common + ".") for b in blocks):
                name = common
            elif parameterized:
                name = parameterized[0 if index == 0 else -1]
            else:
                name = UNNAMED_LAYERS[0 if index == 0 and len(groups) > 1 else 1]
        names.append(unique(name, taken, separator="@"))
    return names


def _common(paths: list[str]) -> str:
    """Return the longest module path that contains all of ``paths``."""
    split = [path.split(".") for path in paths]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _has_parameters(group: NodeGroup, path: str) -> bool:
    return any(
        any(name.startswith(path + ".") for name in meta(operand)["parameter"].names)
        for node in group.nodes
        for operand in node.all_input_nodes
        if "parameter" in meta(operand)
    )


def class_name(name: str, group: NodeGroup, classes: dict[str, str], root: str, *, first: bool, final: bool) -> str:
    """Return the layer's class name: its module's (with ``Pair`` for a chain), or the model's with its place (Embeddings, Head, Bridge)."""
    path = name.split("@")[0]
    is_module = path in classes and (
        bool(group.block) or all(p == path or p.startswith(path + ".") for p in group.paths if p)
    )
    if len(group.leaves) > 1 and (path in group.leaves or classes.get(path) == "Sequential"):
        return identifier(classes[group.leaves[0]] + "Pair")
    if is_module:
        return identifier(classes[path])
    return identifier(root + ("" if first and final else "Embeddings" if first else "Head" if final else "Bridge"))


def _signature(interface: LayerInterface, names: dict[str, str]) -> Any:
    """Return a key that two layers share if and only if one graph can represent both."""
    index: dict[fx.Node, int] = {}
    key: list[Any] = []
    for kind in KINDS:
        for node in getattr(interface, kind):
            index[node] = len(index)
            local = names[_stored_name(node)] if kind in ("parameter", "state") else ""
            local = meta(node)["input"] if kind == "input" else local
            key.append((kind, local, shape_of(node), dtype_of(node), meta(node)["gradient"]))
    for node in interface.body:
        index[node] = len(index)
        frozen = _numbered((node.args, dict(node.kwargs)), index)
        value = meta(node)["val"]
        layout = (shape_of(node), dtype_of(node), value.stride()) if isinstance(value, torch.Tensor) else str(value)
        key.append((node.target, frozen, layout, meta(node)["gradient"]))
    key.append(tuple(index[n] for n in interface.outputs))
    key.append(tuple((names[name], index[n]) for name, n in interface.updates.items()))
    return tuple(key)


def _numbered(value: Any, index: dict[fx.Node, int]) -> Any:
    """Replace each node by its index and each number by its text, so that 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return index[value]
    if isinstance(value, tuple | list):
        return tuple(_numbered(item, index) for item in value)
    if isinstance(value, dict):
        return tuple((key, _numbered(item, index)) for key, item in sorted(value.items()))
    return repr(value)


def _stored_name(node: fx.Node) -> str:
    name: str = meta(node)["buffer"] if "state" in meta(node) else meta(node)["parameter"].name
    return name


def _layer_class(name: str, interface: LayerInterface, names: dict[str, str]) -> LayerClass:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    described: dict[str, list[Value]] = {kind: [] for kind in KINDS}
    taken: set[str] = {"self"}
    for kind in KINDS:
        for node in getattr(interface, kind):
            argument = unique(identifier(_placeholder_name(kind, node, names)), taken, separator="_")
            placeholder = graph.create_node("placeholder", argument, name=argument)
            meta(placeholder).update({"val": meta(node)["val"], "gradient": meta(node)["gradient"]})
            copy_origin(node, placeholder)
            env[node] = placeholder
            label = names[_stored_name(node)] if kind in ("parameter", "state") else placeholder.name
            described[kind].append(Value(label, shape_of(node), dtype_of(node), meta(node)["gradient"]))
    for node in interface.body:
        env[node] = copy = _copy_node(graph, node, env)
        meta(copy).update({"val": meta(node)["val"], "gradient": meta(node)["gradient"]})
        copy_origin(node, copy)
    results = [_without_parameter(env[n], views_of(n, "parameter"), env) for n in interface.outputs]
    graph.output((*results, *(env[n] for n in interface.updates.values())))
    outputs = tuple(Value(n.name, shape_of(n), dtype_of(n), meta(n)["gradient"]) for n in results)
    stored = {value.name: value for value in described["state"]}
    for buffer, node in interface.updates.items():
        stored.setdefault(names[buffer], Value(names[buffer], shape_of(node), dtype_of(node)))
    gm = fx.GraphModule(nn.Module(), graph, class_name=name)
    return LayerClass(
        name,
        gm,
        tuple(described["activation"]),
        tuple(described["input"]),
        (*described["constant"], *described["state"]),
        tuple(described["scalar"]),
        tuple(described["parameter"]),
        outputs,
        tuple(stored.values()),
        tuple(names[buffer] for buffer in interface.updates),
    )


def _without_parameter(output: fx.Node, views: list[fx.Node] | None, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the output, cloned if it is a view of a parameter: ZeRO-3 frees the parameter at the layer's end, while a pipeline may still
    send the output. ``views`` is the chain from the parameter to the output; its smallest tensor is cloned."""
    if views is None:
        return output
    sizes = [math.prod(shape_of(node)) for node in views]
    smallest = len(sizes) - 1 - sizes[::-1].index(min(sizes))
    source = env[views[smallest]]
    readers = [env[views[smallest + 1]]] if smallest + 1 < len(views) else []
    with source.graph.inserting_after(source) if not readers else source.graph.inserting_before(readers[0]):
        clone = source.graph.call_function(torch.ops.aten.clone.default, (source,))
    meta(clone).update({"val": torch.empty_like(meta(source)["val"]), "gradient": meta(source)["gradient"]})
    copy_origin(source, clone)
    for reader in readers:
        reader.replace_input_with(source, clone)
    return output if readers else clone


def _copy_node(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy ``node`` into ``graph`` and name it after its op, not after its position in the model."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), env.__getitem__)
    return graph.create_node(node.op, node.target, args, kwargs, name=op_name(node).rsplit(".", 1)[-1])


def _placeholder_name(kind: str, node: fx.Node, names: dict[str, str]) -> str:
    if kind in ("parameter", "state"):
        return names[_stored_name(node)]
    if kind == "activation":
        return "x"
    if kind == "scalar":
        return meta(node)["scalar_value"].name
    return meta(node)["input"] if kind == "input" else meta(node)["constant"]


def build_prelude(
    gm: fx.GraphModule, inputs: tuple[Value, ...], constants: dict[str, torch.Tensor], guarded: Sequence[fx.Node] = ()
) -> tuple[tuple[Value, ...], fx.GraphModule | None]:
    """Return the scalars, and a module that computes the scalars and then the ``guarded`` nodes from the global batch; set
    ``meta["scalar_value"]`` of the scalars' nodes."""
    scalars = [n for n in gm.graph.nodes if meta(n).get("scalar")]
    if not scalars and not guarded:
        return (), None
    taken = {value.name for value in inputs}
    graph, owner = fx.Graph(), nn.Module()
    env: dict[fx.Node, fx.Node] = {}
    by_input = {meta(n)["input"]: n for n in gm.graph.nodes if n.op == "placeholder" and "input" in meta(n)}
    for value in inputs:
        env[by_input[value.name]] = copy = graph.placeholder(value.name)
        meta(copy).update({"val": meta(by_input[value.name])["val"], "gradient": False})
    needed = ancestors([*scalars, *guarded])
    for node in gm.graph.nodes:
        if node not in needed or node in env:
            continue
        if node.op == "placeholder":
            owner.register_buffer(meta(node)["constant"], constants[meta(node)["constant"]], persistent=False)
            env[node] = copy = graph.get_attr(meta(node)["constant"])
        else:
            env[node] = copy = _copy_node(graph, node, env)
        meta(copy).update({"val": meta(node)["val"], "gradient": False})
        copy_origin(node, copy)
    for node in scalars:
        name = unique(meta(node).get("scalar_name", "scalar"), taken, separator="_")
        meta(node)["scalar_value"] = Value(name, (), dtype_of(node))
    graph.output(tuple(env[n] for n in (*scalars, *guarded)))
    return tuple(meta(n)["scalar_value"] for n in scalars), fx.GraphModule(owner, graph, class_name="Prelude")


def unique(name: str, taken: set[str], separator: str = "") -> str:
    """Return ``name``, with a number appended if it is in ``taken``, and add the result to ``taken``."""
    candidate, k = name, 1
    while candidate in taken:
        k += 1
        candidate = f"{name}{separator}{k}"
    taken.add(candidate)
    return candidate


def identifier(name: str) -> str:
    """Return ``name`` as a Python identifier."""
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    if not text or text[0].isdigit():
        text = f"p_{text}"
    return text + "_" if keyword.iskeyword(text) or hasattr(builtins, text) else text
