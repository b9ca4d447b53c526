"""Make the graph functional: every in-place op becomes its functional twin, and views of a written tensor are taken anew.

The usual functionalisation: each tensor is a base or a chain of views of one. A write to a view is carried back to its base through
the chain (a write through ``slice`` is a ``cat`` of what stayed and what is new), the base gets a new value, and a view that was taken
before the write is replayed on the new base when it is read again. A buffer's last value (batch norm's running statistics, a
counter) becomes an output of the graph behind the loss; ``meta["updates"]`` names the buffers in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from passes.clean.nodes import add, arguments, aten, packet, shape
from passes.clean.randomness import drawn

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "slice",
        "select",
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "alias",
        "t",
        "detach",
    )
)


@dataclass(slots=True)
class _Alias:
    """A tensor as a chain of views of ``base``; ``version`` of the base that ``current`` was taken from."""

    base: fx.Node
    chain: tuple[fx.Node, ...]
    current: fx.Node
    version: int


def functionalise_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace in-place ops; see the module's docstring."""
    if not any(_is_inplace(n) for n in gm.graph.nodes):
        return gm
    aliases: dict[fx.Node, _Alias] = {}
    bases: dict[fx.Node, tuple[fx.Node, int]] = {}  # base: its newest value, its version
    for node in list(gm.graph.nodes):
        if node.op == "output":
            node.args = map_arg(node.args, lambda n: _read(n, node, aliases, bases))  # noqa: B023  called at once
            continue
        if node.op != "call_function":
            continue
        operands = node.all_input_nodes
        target = aliases.get(operands[0]) if operands else None
        node.args = map_arg(node.args, lambda n: _read(n, node, aliases, bases))  # noqa: B023
        node.kwargs = map_arg(node.kwargs, lambda n: _read(n, node, aliases, bases))  # noqa: B023
        if _is_inplace(node):
            first = operands[0]
            alias = target or aliases.setdefault(first, _Alias(first, (), first, 0))
            new = _functional_twin(node)
            _write(alias, new, node, bases)
            aliases[node] = _Alias(alias.base, alias.chain, new, bases[alias.base][1])
        elif operands and packet(node) in _VIEWS and node.args and arguments(node)[0] is node.all_input_nodes[0]:
            source = target or aliases.setdefault(operands[0], _Alias(operands[0], (), operands[0], 0))
            version = bases.get(source.base, (source.base, 0))[1]
            aliases[node] = _Alias(source.base, (*source.chain, node), node, version)
    for node in reversed([n for n in gm.graph.nodes if _is_inplace(n)]):
        assert not node.users, node
        gm.graph.erase_node(node)
    _give_out(gm, {base: newest for base, (newest, _) in bases.items() if "buffer" in base.meta})
    return gm


def _read(
    node: fx.Node, reader: fx.Node, aliases: dict[fx.Node, _Alias], bases: dict[fx.Node, tuple[fx.Node, int]]
) -> fx.Node:
    """The node that holds what ``node`` holds when ``reader`` runs."""
    alias = aliases.get(node)
    if alias is None:
        return node
    newest, version = bases.get(alias.base, (alias.base, 0))
    if alias.version != version:
        alias.current = _replay(newest, alias.chain, reader)
        alias.version = version
    return alias.current


def _replay(value: fx.Node, chain: tuple[fx.Node, ...], anchor: fx.Node) -> fx.Node:
    for view in chain:
        value = add(anchor, view.target, (value, *arguments(view)[1:]), dict(view.kwargs), origin=view)
    return value


def _write(alias: _Alias, new: fx.Node, anchor: fx.Node, bases: dict[fx.Node, tuple[fx.Node, int]]) -> None:
    """Carry ``new``, the new value of the view, back to the base."""
    newest, version = bases.get(alias.base, (alias.base, 0))
    sources = [newest]
    for view in alias.chain[:-1]:
        sources.append(_replay(sources[-1], (view,), anchor))
    value = new
    for view, source in zip(reversed(alias.chain), reversed(sources), strict=True) if alias.chain else ():
        value = _scatter(view, source, value, anchor)
    bases[alias.base] = (value, version + 1)


def _scatter(view: fx.Node, source: fx.Node, new: fx.Node, anchor: fx.Node) -> fx.Node:
    """``source`` with what ``view`` sees of it replaced by ``new``."""
    name, sizes = packet(view), list(shape(source))
    args: list[Any] = list(view.args)
    if name in ("aten.alias", "aten.detach"):
        return new
    if name in ("aten.view", "aten.reshape", "aten.squeeze", "aten.unsqueeze"):
        return add(anchor, aten.reshape.default, (new, sizes))
    if name in ("aten.transpose", "aten.t"):
        return add(anchor, view.target, (new, *args[1:]))
    if name == "aten.permute":
        order = [d % len(sizes) for d in args[1]]
        return add(anchor, aten.permute.default, (new, [order.index(d) for d in range(len(sizes))]))
    assert name in ("aten.slice", "aten.select"), f"a write through {name} is not supported"
    dim = (args[1] if len(args) > 1 else 0) % len(sizes)
    if name == "aten.select":
        start = args[2] % sizes[dim]
        end, new = start + 1, add(anchor, aten.unsqueeze.default, (new, dim))
    else:
        start, end, step = (*args[2:], None, None, None)[:3]
        assert step in (None, 1), "a write through a strided slice is not supported"
        start, end, _ = slice(start, end).indices(sizes[dim])
    pieces = [add(anchor, aten.slice.Tensor, (source, dim, 0, start))] if start > 0 else []
    pieces.append(new)
    if end < sizes[dim]:
        pieces.append(add(anchor, aten.slice.Tensor, (source, dim, end, sizes[dim])))
    return add(anchor, aten.cat.default, (pieces, dim)) if len(pieces) > 1 else new


def _is_inplace(node: fx.Node) -> bool:
    name = packet(node)
    return name.startswith("aten.") and name.endswith("_") and not name.endswith("__")


def _functional_twin(node: fx.Node) -> fx.Node:
    """The value that the in-place ``node`` leaves, in the shape and dtype of what it writes to."""
    written = arguments(node)[0]
    assert isinstance(written, fx.Node)
    name = packet(node)
    if name in ("aten.zero_", "aten.fill_"):
        fill = 0 if name == "aten.zero_" else arguments(node)[1]
        if isinstance(fill, fx.Node):
            return add(node, aten.expand.default, (fill, list(shape(written))))
        value = written.meta["val"]
        return add(node, aten.full.default, (list(value.shape), fill), {"dtype": value.dtype})
    if name == "aten.copy_":
        new = arguments(node)[1]
        assert isinstance(new, fx.Node)
    elif (random := drawn(node)) is not None:
        new = random
    else:
        twin = getattr(aten, name.removeprefix("aten.")[:-1])
        overload = str(node.target).rsplit(".", 1)[1]
        new = add(node, getattr(twin, overload), node.args, dict(node.kwargs))
    value = written.meta["val"]
    if new.meta["val"].dtype != value.dtype:
        new = add(node, aten.to.dtype, (new, value.dtype))
    if shape(new) != tuple(value.shape):
        new = add(node, aten.expand.default, (new, list(value.shape)))
    return new


def _give_out(gm: fx.GraphModule, updates: dict[fx.Node, fx.Node]) -> None:
    """Make the new values of buffers outputs; a buffer that is written is no constant (``meta["state"]``)."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    output.args = ((*results, *updates.values()),)
    gm.meta["updates"] = tuple(buffer.meta["buffer"] for buffer in updates)
    for buffer in updates:
        buffer.meta["state"] = True
