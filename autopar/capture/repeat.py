"""A block that a model repeats is traced once: tracing costs seconds per hundred ops, and 125 of 126 equal blocks say nothing new.

1. ``record`` runs the model once without values, outside of export, and writes down for every call of a member of a module list
   what it does: each torch function with its operands, by where they come from (the call's arguments, the member's own parameters,
   an earlier result), and every other argument by value. Calls with equal records compute the same of their own parameters.
2. During export the first of equal calls is traced between two markers; the others are one op each (``traced_once``).
3. ``expand`` replaces those ops in the exported graph by copies of what lies between the markers.

What a record does not see makes two records differ, never agree: a tensor that no recorded function made is known by its identity
alone, and so is an argument of an unknown kind. Calls whose tensors leave by another way than the result (hooks that collect
router logits) and modules that are called twice are traced in full, and all calls are where a traced block writes to what it was given.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.torch_private import tree_flatten, tree_unflatten

FEWEST = 3
"""Members of one type that a list must have: below that nothing is gained."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True, slots=True)
class Repeats:
    """``first``: for each path of a repeated call, the path of the first equal call. ``outputs``: what that call returned, as the
    tree of the result and a description (size, stride, dtype, device) of each tensor in it."""

    first: dict[str, str]
    outputs: dict[str, tuple[Any, tuple[Any, ...]]]


@dataclass(slots=True)
class _Call:
    """One call of a member while it is recorded. ``seen`` says of a tensor (by id) where it comes from."""

    path: str
    seen: dict[int, Any]
    lines: list[Any] = field(default_factory=list)
    made: int = 0

    def of(self, value: Any) -> Any:
        """A value as something that equals the corresponding value of an equal call, and nothing else."""
        if isinstance(value, Tensor):
            return self.seen.get(id(value), ("outside", id(value)))
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self.of, value))
        if isinstance(value, dict):
            return ("dict", *((self.of(key), self.of(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self.of(value.start), self.of(value.stop), self.of(value.step))
        return (type(value).__name__, value) if isinstance(value, _PLAIN) else ("object", id(value))


class _Recorder(TorchFunctionMode):
    """Writes every torch function into the records of the calls that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[_Call] = []
        self.closed: dict[str, tuple[Any, ...]] = {}  # path -> record
        self.outputs: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self.calls: Counter[str] = Counter()
        self.maker: dict[
            int, tuple[str, ...]
        ] = {}  # the calls inside which a tensor was made and which did not return it
        self.leaking: set[str] = set()
        self.alive: list[Any] = []  # ids are compared, so nothing may be freed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = [call.path for call in self.open]
        for leaf in tree_flatten((args, kwargs))[0]:
            self.leaking.update(path for path in self.maker.get(id(leaf), ()) if path not in inside)
        lines = [(func, call.of(args), call.of(kwargs)) for call in self.open]
        result = func(*args, **kwargs)
        self.alive.append((args, kwargs, result))
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        for call, line in zip(self.open, lines, strict=True):
            call.lines.append(line)
            for tensor in made:
                if id(tensor) not in call.seen:
                    call.seen[id(tensor)] = ("made", call.made)
                    call.made += 1
        for tensor in made:
            self.maker.setdefault(id(tensor), tuple(inside))
        return result

    def run(self, path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a member: opens its record, runs it, and closes the record."""
        self.calls[path] += 1
        own = [*module.named_parameters(), *module.named_buffers()]
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = _Call(path, {id(tensor): ("own", name) for name, tensor in own})
        for index, tensor in enumerate(given):
            call.seen.setdefault(id(tensor), ("given", index))
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        head = (type(module), modes, tree, *map(call.of, leaves), *map(_description, given))
        owned = tuple((name, _description(tensor)) for name, tensor in own)
        self.open.append(call)
        try:
            result = forward(*args, **kwargs)
        finally:
            self.open.pop()
        returned, shape = tree_flatten(result)
        tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        for tensor in tensors:  # handed on as it should be
            if path in self.maker.get(id(tensor), ()):
                self.maker[id(tensor)] = tuple(p for p in self.maker[id(tensor)] if p != path)
        self.alive.append((args, kwargs, result))
        self.closed[path] = (head, owned, tuple(call.lines), shape, tuple(map(call.of, returned)))
        if len(tensors) == len(returned):
            self.outputs[path] = (shape, tuple(map(_description, tensors)))
        if any(isinstance(tensor, nn.Parameter) for tensor in given):
            self.leaking.add(path)  # a marker would make a plain tensor of it
        return result


def _description(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def members(module: nn.Module) -> dict[str, nn.Module]:
    """The members of module lists and sequences that have enough siblings of their type, by path."""
    found: dict[str, nn.Module] = {}
    for path, parent in module.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            types = Counter(type(child) for child in parent)
            prefix = f"{path}." if path else ""
            found |= {prefix + name: c for name, c in parent.named_children() if types[type(c)] >= FEWEST and _large(c)}
    return found


def _large(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


@contextmanager
def _forwards(members: dict[str, nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Calls of each member go through ``run(path, module, forward, args, kwargs)`` while the context is open."""

    def through(path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(path, module, forward, args, kwargs)

        return call

    own = {path: vars(module).get("forward") for path, module in members.items()}
    for path, module in members.items():
        vars(module)["forward"] = through(path, module)
    try:
        yield
    finally:
        for path, module in members.items():
            del vars(module)["forward"]
            if own[path] is not None:
                vars(module)["forward"] = own[path]


def record(module: nn.Module, run: Callable[[], Any]) -> Repeats | None:
    """The calls that ``run()``, which calls ``module``, repeats (none, maybe); ``None`` where it raises."""
    recorder = _Recorder()
    try:
        with recorder, _forwards(members(module), recorder.run):
            run()
    except Exception:  # export meets the same error and says where it comes from
        return None
    first: dict[Any, str] = {}
    repeated = {}
    for path, known in recorder.closed.items():
        if path in recorder.leaking or recorder.calls[path] > 1 or path not in recorder.outputs:
            continue
        key = (known[0], known[1], known[2], known[4])
        original = first.setdefault(key, path)
        if original != path:
            repeated[path] = original
    return Repeats(repeated, {path: recorder.outputs[path] for path in repeated})


# -- during export ----------------------------------------------------------------------------------------------------


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


@torch.library.custom_op("autopar::enter", mutates_args=())
def _enter(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    raise AssertionError("markers are never run")


@torch.library.custom_op("autopar::leave", mutates_args=())
def _leave(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    raise AssertionError("markers are never run")


@torch.library.custom_op("autopar::again", mutates_args=())
def _again(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    raise AssertionError("markers are never run")


_results: dict[str, tuple[Any, ...]] = {}  # what ``autopar::again`` returns, by path: set while a model is exported


@_enter.register_fake
def _(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    return _like(tensors)


@_leave.register_fake
def _(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    return _like(tensors)


@_again.register_fake
def _(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    return [
        torch.empty_strided(size, stride, dtype=dtype, device="cpu")  # where the twin that is exported says it is
        for size, stride, dtype, _, _ in _results[path]
    ]


@contextmanager
def traced_once(module: nn.Module, repeats: Repeats) -> Iterator[None]:
    """While this is open, the repeated calls of ``module``'s members are one op each, and the first ones stand between markers."""
    originals = set(repeats.first.values())
    called = {path: child for path, child in module.named_modules() if path in originals or path in repeats.first}

    def run(path: str, child: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if path in repeats.first:
            return tree_unflatten(_again(given, path), repeats.outputs[path][0])
        marked = iter(_enter(given, path))
        leaves = [next(marked) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, tree)
        returned, shape = tree_flatten(forward(*args, **kwargs))
        return tree_unflatten(_leave(returned, path), shape)

    _results.update({path: described for path, (_, described) in repeats.outputs.items()})
    try:
        with _forwards(called, run):
            yield
    finally:
        _results.clear()


# -- after export -----------------------------------------------------------------------------------------------------


def expand(gm: fx.GraphModule, program: Any, repeats: Repeats) -> bool:
    """Put copies of the traced blocks where ``autopar::again`` stands, and take the markers out.

    ``False``, with the graph in pieces, where a block writes to what it was given or a parameter is not at hand: export again.
    """
    graph = gm.graph
    nodes = {node.name: node for node in graph.nodes}
    lifted = {spec.target: nodes[spec.arg.name] for spec in program.graph_signature.input_specs if spec.target}
    bodies: dict[str, list[fx.Node]] = {}
    entries: dict[str, fx.Node] = {}
    exits: dict[str, fx.Node] = {}
    again = []
    for node in graph.nodes:
        marker = _marker(node)
        if marker == "enter":
            entries[node.args[1]] = node
        elif marker == "leave":
            exits[node.args[1]] = node
        elif marker == "again":
            again.append(node)
    for node in again:
        original = repeats.first[node.args[1]]
        if original not in bodies and _writes(_between(entries[original], exits[original])):
            return False
        bodies[original] = _between(entries[original], exits[original])
        own = _own(lifted, original, node.args[1])
        if own is None:
            return False
        _copy(graph, node, entries[original], exits[original], bodies[original], own, original)
    for node in [*entries.values(), *exits.values()]:
        _take_out(graph, node)
    graph.lint()
    gm.recompile()
    return True


def _marker(node: fx.Node) -> str:
    name = str(node.target)
    return name.removeprefix("autopar.").removesuffix(".default") if name.startswith("autopar.") else ""


def _between(entry: fx.Node, exit: fx.Node) -> list[fx.Node]:
    found = []
    node = entry.next
    while node is not exit:
        found.append(node)
        node = node.next
    return found


def _writes(body: list[fx.Node]) -> bool:
    """Whether an op writes to a tensor that is not its block's own. Views are followed to what they view."""
    made = {n for n in body if not (n.target is operator.getitem and _marker(n.args[0]) == "enter")}  # type: ignore[arg-type]
    foreign = {n for n in body if n not in made}
    for node in body:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            if argument.alias_info is None or not isinstance(value, fx.Node):
                continue
            outside = value in foreign or value not in made
            if outside and argument.alias_info.is_write:
                return True
            if outside:
                foreign.add(node)
    return False


def _own(lifted: dict[str, fx.Node], original: str, path: str) -> dict[fx.Node, fx.Node] | None:
    """For every parameter and buffer of the first block, that of the block at ``path``."""
    found = {}
    for target, node in lifted.items():
        if target.startswith(f"module.{original}."):
            other = lifted.get(f"module.{path}." + target.removeprefix(f"module.{original}."))
            if other is None:
                return None
            found[node] = other
    return found


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    entry: fx.Node,
    exit: fx.Node,
    body: list[fx.Node],
    own: dict[fx.Node, fx.Node],
    original: str,
) -> None:
    """Copies ``body`` to before ``node``, an ``autopar::again``, whose results become those of the copy."""
    env: dict[fx.Node, fx.Node] = dict(own)
    given: Any = node.args[0]
    results: Any = exit.args[0]
    with graph.inserting_before(node):
        for inner in body:
            if inner.target is operator.getitem and inner.args[0] is entry:
                env[inner] = given[inner.args[1]]
                continue
            copied = graph.node_copy(inner, lambda n: env.get(n, n))
            copied.meta["nn_module_stack"] = _stack(inner, node, original)
            env[inner] = copied
    for user in list(node.users):
        result = results[user.args[1]]
        user.replace_all_uses_with(env.get(result, result))
        graph.erase_node(user)
    graph.erase_node(node)


def _stack(inner: fx.Node, node: fx.Node, original: str) -> dict[str, Any]:
    """The modules around the copy of ``inner``: those around ``node``, which end with its block, then those inside of the block."""
    stack = dict(node.meta["nn_module_stack"])
    path = str(node.args[1])
    key = next(reversed(stack))
    inside = False
    for name, (where, kind) in inner.meta["nn_module_stack"].items():
        if inside:
            stack[f"{key}.{name}"] = (where.replace(f"module.{original}", f"module.{path}", 1), kind)
        inside = inside or where.split("@")[0] == f"module.{original}"
    return stack


def _take_out(graph: fx.Graph, marker: fx.Node) -> None:
    given: Any = marker.args[0]
    for user in list(marker.users):
        user.replace_all_uses_with(given[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(marker)
