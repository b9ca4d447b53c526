"""Traces repeated blocks once: tracing takes seconds per hundred ops, and 125 of 126 equal blocks add nothing new.

1. ``record`` runs the model once without values, outside of export. For every call of a member of a module list it records each torch
   function, its operands by their origin (the call's arguments, the member's parameters, an earlier result), every other argument by
   value, and which of the call's tensors are identical. Calls with equal records do the same computation with different parameters.
2. During export, the first of several equal calls is traced between two markers; each of the others becomes one op (``traced_once``).
3. ``expand`` replaces those ops in the exported graph by copies of the nodes between the markers.

Equal calls may look different, but different calls never look equal: the record has the id of a tensor that no recorded function made, and
of an argument of unknown type. A call is traced in full if its tensors escape other than through the result (hooks that collect router
logits) or if its module is called twice. All calls are traced in full if a traced block writes to its arguments.
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
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from autopar.capture.storage import identity
from autopar.ops.meta import meta
from autopar.torch_private import tree_flatten, tree_unflatten

MIN_MEMBERS = 3
"""Minimum number of members of one type in a module list for which tracing one of them pays off."""

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
    """``first`` maps the path of a repeated call to that of the first equal call. ``outputs`` maps the path to the result's pytree spec and
    the ``_description`` of each tensor. ``read`` has the paths of members with parameters that code outside of the member reads, too."""

    first: dict[str, str]
    outputs: dict[str, tuple[Any, tuple[Any, ...]]]
    read: frozenset[str] = frozenset()

    def unread(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of parameters that only repeated calls read, in ``module``'s order; export doesn't need the parameters."""
        names: dict[Any, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(identity(parameter), []).append(name)
        paths = tuple(f"{path}." for path in self.first if path not in self.read)
        return tuple(name for name, *others in names.values() if not others and name.startswith(paths))

    def corresponding(self, name: str) -> str:
        """Return the name in the first equal call for the parameter or buffer ``name`` of a repeated call."""
        parts = name.split(".")
        path = next(path for k in range(len(parts)) if (path := ".".join(parts[:k])) in self.first)
        return self.first[path] + name.removeprefix(path)


_Recipe = tuple[Any, tuple[Any, ...]]
"""How to make a function's result: the pytree spec (``None`` for one tensor), and per leaf a description of a new tensor, or the value."""


@dataclass(frozen=True, slots=True)
class _NewTensor:
    description: tuple[Any, ...]


@dataclass(slots=True)
class _MemberCall:
    """The record of a member's call: ``entries`` has its calls of torch functions, ``seen`` maps the id of a tensor to the tensor's origin.

    ``results`` has for each of ``entries`` a recipe for its result, or ``None`` if the function must be called. ``equal_call`` is an
    earlier call with equal arguments and equal entries so far. ``made`` counts the tensors that the functions have made.
    """

    path: str
    seen: dict[int, Any]
    entries: list[Any] = field(default_factory=list)
    results: list[_Recipe | None] = field(default_factory=list)
    made: int = 0
    equal_call: _MemberCall | None = None

    def key_of(self, value: Any) -> Any:
        """Return a key of a value. In an equal call, the corresponding value, and only it, has an equal key."""
        if isinstance(value, Tensor):
            return self.seen.get(id(value), ("outside", id(value)))
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self.key_of, value))
        if isinstance(value, dict):
            return ("dict", *((self.key_of(key), self.key_of(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self.key_of(value.start), self.key_of(value.stop), self.key_of(value.step))
        if isinstance(value, float | complex):
            return (type(value).__name__, repr(value))  # 0.0 and -0.0 are equal, but 1 / 0.0 and 1 / -0.0 are not
        return (type(value).__name__, value) if isinstance(value, _PLAIN) else ("object", id(value))


def _tensors(value: Any, found: list[Tensor]) -> list[Tensor]:
    """Append the tensors among a torch function's arguments to ``found``, and return it."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _tensors(item, found)
    return found


class _Recorder(TorchFunctionMode):
    """Adds every torch function to the records of the open calls.

    If an earlier, so far equal call has called the function at the same point with corresponding tensors, the result has the same shapes.
    On meta, the recorder then creates the result without calling the function, which is several times faster.
    """

    def __init__(self, module: nn.Module, members: dict[str, nn.Module]) -> None:
        super().__init__()
        # read before the mode is active, which would record these accesses to tensors
        self.own = {path: _named_tensors(m) for path, m in members.items()}
        names = Counter(id(tensor) for _, tensor in _named_tensors(module))
        self.owned = {path: _tensors_key(own, names) for path, own in self.own.items()}
        self.owners: dict[int, list[str]] = {}  # the members that have a parameter, outer ones first
        for path, own in self.own.items():
            for key in dict.fromkeys(id(tensor) for _, tensor in own):
                self.owners.setdefault(key, []).append(path)
        self.open_calls: list[_MemberCall] = []
        self.records: dict[str, tuple[Any, ...]] = {}  # path -> record
        self.outputs: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self.calls: Counter[str] = Counter()
        self.makers: dict[int, tuple[str, ...]] = {}  # by id: the calls that created a tensor and did not return it
        self.leaking: set[str] = set()
        self.read: set[str] = set()
        self.alive: list[Any] = []  # keeps objects alive, because their ids are compared
        self.first_calls: dict[Any, _MemberCall] = {}  # the first call with each call key and key of its tensors
        self.zeros: dict[torch.dtype, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = [call.path for call in self.open_calls]
        given = [id(tensor) for tensor in _tensors((args, kwargs), [])]
        for key in given:
            self.leaking.update(path for path in self.makers.get(key, ()) if path not in inside)
            self.read.update(path for path in self.owners.get(key, ()) if path not in inside)
        entries = [(func, _modes(), call.key_of(args), call.key_of(kwargs)) for call in self.open_calls]
        recipe = self._known_recipe(entries)
        result = func(*args, **kwargs) if recipe is None else self._make_result(recipe)
        self.alive.append((args, kwargs, result))
        leaves, tree = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if recipe is None and self.open_calls:
            recipe = self._recipe(leaves, tree, given)
        for call, entry in zip(self.open_calls, entries, strict=True):
            call.entries.append(entry)
            call.results.append(recipe)
            for tensor in made:
                if id(tensor) not in call.seen:
                    call.seen[id(tensor)] = ("made", call.made)
                    call.made += 1
        for tensor in made:
            self.makers.setdefault(id(tensor), tuple(inside))
        return result

    def _known_recipe(self, entries: list[Any]) -> _Recipe | None:
        """Return the recipe for the result that an earlier, so far equal call got at this point, or ``None``."""
        found = None
        for call, entry in zip(self.open_calls, entries, strict=True):
            if call.equal_call is not None:
                at = len(call.entries)
                if at < len(call.equal_call.entries) and call.equal_call.entries[at] == entry:
                    found = call.equal_call.results[at] if found is None else found
                else:
                    call.equal_call = None
        return found

    def _recipe(self, leaves: list[Any], tree: Any, given: list[int]) -> _Recipe | None:
        """Return the recipe for a result in which all tensors are new and on meta, and all other values immutable; else ``None``."""
        found: list[Any] = []
        for leaf in leaves:
            if type(leaf) is Tensor:
                known = id(leaf) in given or id(leaf) in self.makers or id(leaf) in self.owners
                described = _description(leaf)
                if known or leaf.device.type != "meta" or 0 in described[1]:
                    return None
                found.append(_NewTensor(described))
            elif leaf is None or not isinstance(leaf, (*_PLAIN, torch.Size)):
                return None
            else:
                found.append(leaf)
        return (tree, tuple(found)) if found else None

    def _make_result(self, recipe: _Recipe) -> Any:
        tree, leaves = recipe
        made = [self._new_tensor(leaf.description) if isinstance(leaf, _NewTensor) else leaf for leaf in leaves]
        return made[0] if tree is None else tree_unflatten(made, tree)

    def _new_tensor(self, description: tuple[Any, ...]) -> Tensor:
        size, stride, dtype, device, differentiable = description
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if differentiable:  # not a leaf, so that code may write to it
            if dtype not in self.zeros:
                self.zeros[dtype] = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
            with torch.enable_grad():
                tensor.copy_(self.zeros[dtype])  # several times faster than += on meta
        return tensor

    def run(self, path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a member's call and record it."""
        self.calls[path] += 1
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = _MemberCall(path, {})
        for name, tensor in self.own[path]:
            call.seen.setdefault(id(tensor), ("own", name))
        for index, tensor in enumerate(given):
            call.seen.setdefault(id(tensor), ("given", index))
        call_key = (type(module), _modes(), tree, *map(call.key_of, leaves), *map(_description, given))
        owned = self.owned[path]
        call.equal_call = self.first_calls.setdefault((call_key, owned), call)
        if call.equal_call is call:
            call.equal_call = None
        self.open_calls.append(call)
        try:
            result = forward(*args, **kwargs)
        finally:
            self.open_calls.pop()
        returned, shape = tree_flatten(result)
        tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        for tensor in tensors:  # a returned tensor does not leak
            if path in self.makers.get(id(tensor), ()):
                self.makers[id(tensor)] = tuple(p for p in self.makers[id(tensor)] if p != path)
        self.alive.append((args, kwargs, result))
        self.records[path] = (call_key, owned, tuple(call.entries), shape, tuple(map(call.key_of, returned)))
        if len(tensors) == len(returned):
            self.outputs[path] = (shape, tuple(map(_description, tensors)))
        if any(isinstance(tensor, nn.Parameter) for tensor in given):
            self.leaking.add(path)  # a marker would turn it into a plain tensor
        return result


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers by all of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _tensors_key(own: list[tuple[str, Tensor]], names: Counter[int]) -> tuple[Any, ...]:
    """Return a key of a member's tensors: names, descriptions, and ties.

    For a tensor with several names inside of the member, the key has the first name. For a tensor that also has a name outside of the
    member (``names`` counts all names in the model), the key has its id: only a member with the same tensor is equal.
    """
    inside = Counter(id(tensor) for _, tensor in own)
    first: dict[int, str] = {}
    return tuple(
        (
            name,
            _description(tensor),
            first.setdefault(id(tensor), name),
            id(tensor) if names[id(tensor)] > inside[id(tensor)] else None,
        )
        for name, tensor in own
    )


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _description(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def members(module: nn.Module) -> dict[str, nn.Module]:
    """Return by path the members of module lists and ``Sequential`` that have submodules, if at least ``MIN_MEMBERS`` have their type."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, parent in module.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            types = Counter(type(child) for child in parent)
            prefix = f"{path}." if path else ""
            for name, child in parent.named_children():
                if types[type(child)] >= MIN_MEMBERS and _has_submodules(child) and id(child) not in seen:
                    seen.add(id(child))
                    found[prefix + name] = child
    return found


def _has_submodules(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


@contextmanager
def _forwards_through(members: dict[str, nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """A context in which calls of members go through ``run(path, module, forward, args, kwargs)``."""

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
    """Return the repeated calls in ``run()``, which runs ``module``; ``None`` if it raises."""
    found = members(module)
    recorder = _Recorder(module, found)
    try:
        with recorder, _forwards_through(found, recorder.run):
            run()
    except Exception:  # export raises the same error and reports its line
        return None
    first: dict[Any, str] = {}
    repeated = {}
    for path, known in recorder.records.items():
        if path in recorder.leaking or recorder.calls[path] > 1 or path not in recorder.outputs:
            continue
        key = (known[0], known[1], known[2], known[4])
        original = first.setdefault(key, path)
        if original != path:
            repeated[path] = original
    return Repeats(repeated, {path: recorder.outputs[path] for path in repeated}, frozenset(recorder.read))


# -- during export ----------------------------------------------------------------------------------------------------


def _empty_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


@torch.library.custom_op("autopar::enter", mutates_args=())
def _enter(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    raise AssertionError("markers are never run")


@torch.library.custom_op("autopar::leave", mutates_args=())
def _leave(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    raise AssertionError("markers are never run")


@torch.library.custom_op("autopar::repeat_block", mutates_args=())
def _repeat_block(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    raise AssertionError("markers are never run")


_results: dict[str, tuple[Any, ...]] = {}
"""Path -> descriptions of the results of ``autopar::repeat_block``, during an export."""


@_enter.register_fake
def _(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    return _empty_like(tensors)


@_leave.register_fake
def _(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    return _empty_like(tensors)


@_repeat_block.register_fake
def _(tensors: Sequence[Tensor], path: str) -> list[Tensor]:
    return [
        torch.empty_strided(size, stride, dtype=dtype, device="cpu")  # the device that the exported fake copy claims
        for size, stride, dtype, _, _ in _results[path]
    ]


@contextmanager
def traced_once(module: nn.Module, repeats: Repeats) -> Iterator[None]:
    """A context in which each repeated call of ``module``'s members is one op, and each first call is enclosed in markers."""
    originals = set(repeats.first.values())
    called = {path: child for path, child in module.named_modules() if path in originals or path in repeats.first}

    def run(path: str, child: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if path in repeats.first:
            return tree_unflatten(_repeat_block(given, path), repeats.outputs[path][0])
        marked = iter(_enter(given, path))
        leaves = [next(marked) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, tree)
        returned, shape = tree_flatten(forward(*args, **kwargs))
        return tree_unflatten(_leave(returned, path), shape)

    _results.update({path: described for path, (_, described) in repeats.outputs.items()})
    try:
        with _forwards_through(called, run):
            yield
    finally:
        _results.clear()


# -- after export -----------------------------------------------------------------------------------------------------


Lifted = tuple[str, str, fx.Node]
"""A placeholder of an exported graph: its kind, the dotted name of its tensor in the model (empty for an input), the node."""


def expand(gm: fx.GraphModule, lifted: list[Lifted], repeats: Repeats, module: nn.Module) -> list[Lifted] | None:
    """Replace each ``autopar::repeat_block`` by a copy of the traced block, remove the markers, and return all placeholders.

    Parameters of the model ``module`` that weren't exported get placeholders. If a block writes to its arguments, a parameter is missing or
    a block is in a region (of ``torch.no_grad``), returns ``None`` and leaves the graph unusable: the caller must export again.
    """
    graph = gm.graph
    regions = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule) and part is not gm]
    if any(_marker(node) for region in regions for node in region.nodes):
        return None
    lifted = _with_parameters(graph, lifted, repeats, module)
    placeholders = {target: node for _, target, node in lifted}
    bodies: dict[str, list[fx.Node]] = {}
    first: dict[str, dict[str, fx.Node]] = {}
    entries: dict[str, fx.Node] = {}
    exits: dict[str, fx.Node] = {}
    repeated = []
    for node in graph.nodes:
        marker = _marker(node)
        if marker == "enter":
            entries[node.args[1]] = node
        elif marker == "leave":
            exits[node.args[1]] = node
        elif marker == "repeat_block":
            repeated.append(node)
    for node in repeated:
        original = repeats.first[node.args[1]]
        if original not in bodies:
            bodies[original] = _between(entries[original], exits[original])
            if _writes(bodies[original]):
                return None
            prefix = f"module.{original}."
            first[original] = {t.removeprefix(prefix): n for t, n in placeholders.items() if t.startswith(prefix)}
        own = _own_tensors(placeholders, first[original], node.args[1])
        if own is None:
            return None
        _copy(graph, node, entries[original], exits[original], bodies[original], own, original)
    for node in [*entries.values(), *exits.values()]:
        _remove_marker(graph, node)
    graph.lint()
    return lifted


def _with_parameters(graph: fx.Graph, lifted: list[Lifted], repeats: Repeats, module: nn.Module) -> list[Lifted]:
    """Add placeholders for ``repeats.unread``, each after that of the preceding parameter of the model."""
    exported = {target: node for _, target, node in lifted}
    unread = set(repeats.unread(module))
    added: list[Lifted] = []
    before: fx.Node | None = None
    for name, _ in module.named_parameters():
        if name in unread:
            first = name
            while f"module.{first}" not in exported:
                first = repeats.corresponding(first)
            with graph.inserting_before(next(iter(graph.nodes))) if before is None else graph.inserting_after(before):
                node = graph.placeholder("p_module_" + name.replace(".", "_"))
            meta(node)["val"] = meta(exported[f"module.{first}"])["val"]
            added.append(("PARAMETER", f"module.{name}", node))
            before = node
        else:
            before = exported.get(f"module.{name}", before)
    return [*added, *lifted]


_MARKERS = {f"autopar.{name}.default": name for name in ("enter", "leave", "repeat_block")}


def _marker(node: fx.Node) -> str:
    return _MARKERS.get(str(node.target), "")


def _between(entry: fx.Node, exit: fx.Node) -> list[fx.Node]:
    found = []
    node = entry.next
    while node is not exit:
        found.append(node)
        node = node.next
    return found


def _writes(body: list[fx.Node]) -> bool:
    """Return whether an op writes to a tensor that the block didn't create, or to a view of such a tensor."""
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


def _own_tensors(lifted: dict[str, fx.Node], first: dict[str, fx.Node], path: str) -> dict[fx.Node, fx.Node] | None:
    """Map the nodes of the first block's parameters and buffers to those of the block at ``path``."""
    found = {node: lifted.get(f"module.{path}.{name}") for name, node in first.items()}
    return None if None in found.values() else {node: other for node, other in found.items() if other is not None}


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    entry: fx.Node,
    exit: fx.Node,
    body: list[fx.Node],
    own: dict[fx.Node, fx.Node],
    original: str,
) -> None:
    """Copy ``body`` before ``node``, an ``autopar::repeat_block``, and replace the node's results by the copy's."""
    env: dict[fx.Node, fx.Node] = dict(own)
    given: Any = node.args[0]
    results: Any = exit.args[0]
    passed: dict[fx.Node, Any] = {entry: given}  # marker that the copy omits -> the values that pass through it
    with graph.inserting_before(node):
        for inner in body:
            if _marker(inner):  # a marker of a nested block
                passed[inner] = map_arg(inner.args[0], lambda n: env.get(n, n))
                continue
            source: Any = inner.args[0] if inner.args else None
            if inner.target is operator.getitem and source in passed:
                env[inner] = passed[source][inner.args[1]]
                continue
            copied = graph.node_copy(inner, lambda n: env.get(n, n))
            meta(copied)["nn_module_stack"] = _stack(inner, node, original)
            env[inner] = copied
    for user in list(node.users):
        result = results[user.args[1]]
        user.replace_all_uses_with(env.get(result, result))
        graph.erase_node(user)
    graph.erase_node(node)


def _stack(inner: fx.Node, node: fx.Node, original: str) -> dict[str, Any]:
    """Return the module stack of ``inner``'s copy: that of ``node``, which ends with the block, then ``inner``'s modules in the block."""
    stack = dict(meta(node)["nn_module_stack"])
    path = str(node.args[1])
    key = next(reversed(stack))
    inside = False
    for name, (where, kind) in meta(inner)["nn_module_stack"].items():
        if inside:
            stack[f"{key}.{name}"] = (where.replace(f"module.{original}", f"module.{path}", 1), kind)
        inside = inside or where.split("@")[0] == f"module.{original}"
    return stack


def _remove_marker(graph: fx.Graph, marker: fx.Node) -> None:
    given: Any = marker.args[0]
    for user in list(marker.users):
        user.replace_all_uses_with(given[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(marker)
