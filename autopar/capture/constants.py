"""Fold what depends on neither inputs nor parameters: position ids, rotary tables, masks.

Constants are evaluated on the CPU. One that is the same for every row of the batch is kept with one row and expanded back, so that the
batch stays free to be sharded and a mask of a large batch is never materialised: it is evaluated with the batch extent replaced by
2 and by 3, and accepted if all rows of both agree. Attention masks are recognised first (``masks``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.clean.nodes import add, arguments, aten, calls, dtype, is_random, like, note, packet, replace, shape, val

# A folded table larger than this is computed inside the layers instead: from its own small constants, where it may be sharded.
LIMIT_BYTES = 16 * 2**20


class Evaluator:
    """Evaluates constant nodes on the CPU, as if some extents were others.

    ``values`` holds the real values of buffers by name. A buffer without values (a model on meta) is zeros, noted on the graph.
    """

    def __init__(self, gm: fx.GraphModule, values: dict[str, torch.Tensor]) -> None:
        self.gm = gm
        self.values = values
        self.constant = constant_nodes(gm)
        self._memo: dict[tuple[tuple[int, int], ...], dict[fx.Node, Any]] = {}

    def __call__(self, node: fx.Node, extents: dict[int, int] | None = None) -> Any:
        """The node's value; integers equal to a key of ``extents`` stand for that extent and are replaced by its value.

        Raises ``RuntimeError`` (torch's own) where the replaced shapes do not fit together.
        """
        extents = extents or {}
        memo = self._memo.setdefault(tuple(sorted(extents.items())), {})
        for member in self.ancestors(node):
            if member not in memo:
                memo[member] = self._evaluate(member, memo, extents)
        return memo[node]

    def ancestors(self, node: fx.Node) -> list[fx.Node]:
        """The constant nodes that ``node`` is computed from, itself last, each after its operands."""
        found: dict[fx.Node, None] = {}
        stack = [(node, False)]
        while stack:
            current, done = stack.pop()
            if done:
                found[current] = None
            elif current not in found:
                stack.append((current, True))
                stack.extend((operand, False) for operand in current.all_input_nodes if operand not in found)
        return list(found)

    def literals(self, node: fx.Node) -> set[float]:
        """All numbers written in the nodes that ``node`` is computed from."""
        numbers: set[float] = set()

        def visit(value: Any) -> None:
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers.add(value)
            elif isinstance(value, tuple | list):
                for item in value:
                    visit(item)

        for member in self.ancestors(node):
            visit(member.args)
            visit(list(member.kwargs.values()))
        return numbers

    def forget(self) -> None:
        self._memo.clear()

    def _evaluate(self, node: fx.Node, memo: dict[fx.Node, Any], extents: dict[int, int]) -> Any:
        if node.op == "get_attr":
            return getattr(self.gm, str(node.target))
        if node.op == "placeholder":
            name = node.meta["buffer"]
            if name not in self.values:
                note(
                    self.gm,
                    f"buffer {name} has no values (the model is on meta) and is taken as zeros: good for planning alone",
                )
                self.values[name] = torch.zeros(shape(node), dtype=dtype(node))
            return self.values[name]

        def substitute(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return memo[value]
            if isinstance(value, int) and not isinstance(value, bool):
                return extents.get(value, value)
            if isinstance(value, tuple | list):
                return type(value)(substitute(item) for item in value)
            return value

        target: Any = node.target
        kwargs = {key: substitute(value) for key, value in node.kwargs.items()}
        with torch.no_grad():
            return target(*substitute(tuple(node.args)), **kwargs)


def constant_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that depend on neither inputs nor parameters, and draw no random numbers."""
    constant: set[fx.Node] = set()
    for node in gm.graph.nodes:
        leaf = node.op == "get_attr" or (
            node.op == "placeholder" and "buffer" in node.meta and "state" not in node.meta
        )
        call = node.op == "call_function" and not is_random(node) and isinstance(node.meta.get("val"), torch.Tensor)
        if leaf or (call and all(n in constant for n in node.all_input_nodes)):
            constant.add(node)
    return constant


def share_constants(gm: fx.GraphModule) -> None:
    """Equal constant expressions (every layer builds its own positions) become one."""
    seen: dict[Any, fx.Node] = {}
    constant = constant_nodes(gm)
    for node in calls(gm):
        if node in constant:
            key = (node.target, _freeze(node.args), _freeze(node.kwargs))
            if key in seen:
                replace(node, seen[key])
            else:
                seen[key] = node


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(_freeze(item) for item in value)
    return (type(value), value)


def fold_constants(gm: fx.GraphModule, evaluator: Evaluator, batch_size: int) -> dict[str, torch.Tensor]:
    """Replace the last constant nodes before something that varies by placeholders with ``meta["constant"]``; their values by name."""
    constants: dict[str, torch.Tensor] = {}
    foldable = {node for node in evaluator.constant if _rows_bytes(node, batch_size) <= LIMIT_BYTES}
    ends = [
        (n, readers) for n in gm.graph.nodes if n in foldable and (readers := [u for u in n.users if u not in foldable])
    ]
    # all values first: one constant may lead to another through one that is too large to fold, and is read as it was written
    values = [_value(evaluator, node, batch_size) for node, _ in ends]
    for (node, readers), (value, rows) in zip(ends, values, strict=True):
        placed = _place(gm, constants, node, value)
        if rows:
            placed = add(_first_call(gm), aten.expand.default, (placed, list(shape(node))), origin=node)
        for reader in readers:
            reader.replace_input_with(node, placed)
    return constants


def _value(evaluator: Evaluator, node: fx.Node, batch_size: int) -> tuple[torch.Tensor, bool]:
    """The node's value, and whether it is one row that stands for the whole batch."""
    sizes = shape(node)
    if sizes[:1] == (batch_size,) and batch_size > 1:
        row = _common_row(evaluator, node, batch_size)
        if row is not None:
            return row, True
    value = evaluator(node)
    if sizes[:1] == (batch_size,) and batch_size > 1 and torch.equal(value, value[:1].expand(sizes)):
        return value[:1], True
    return value, False


def _common_row(evaluator: Evaluator, node: fx.Node, batch_size: int) -> torch.Tensor | None:
    """The row that every row of the batch equals, found at batch extents 2 and 3; ``None`` if there is none to be sure of."""
    row: torch.Tensor | None = None
    for extent in (2, 3):
        try:
            value = evaluator(node, {batch_size: extent})
        except (RuntimeError, IndexError):
            return None
        if tuple(value.shape) != (extent, *shape(node)[1:]) or not torch.equal(value, value[:1].expand(value.shape)):
            return None
        if row is not None and not torch.equal(row, value[:1]):
            return None
        row = value[:1]
    return row


def _rows_bytes(node: fx.Node, batch_size: int) -> int:
    tensor = val(node)
    rows = batch_size if shape(node)[:1] == (batch_size,) else 1
    return tensor.numel() * tensor.dtype.itemsize // rows


def _place(gm: fx.GraphModule, constants: dict[str, torch.Tensor], node: fx.Node, value: torch.Tensor) -> fx.Node:
    """A placeholder for ``value``; the one that is there already, if an equal value is."""
    for other in gm.graph.nodes:
        if other.op != "placeholder":
            break
        name = other.meta.get("constant")
        known = constants[name] if name is not None else None
        if known is not None and (known.dtype, known.shape) == (value.dtype, value.shape) and torch.equal(known, value):
            return other
    name = f"constant_{len(constants)}"
    constants[name] = value.contiguous().clone()
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        placeholder = gm.graph.placeholder(name)
    placeholder.meta["constant"] = name
    placeholder.meta["val"] = like(constants[name])
    return placeholder


def _first_call(gm: fx.GraphModule) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.op != "placeholder")


def simplify_constants(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
    """``x & True`` is ``x``, ``x | False`` is ``x``, ``where(True, a, b)`` is ``a``: for constants that are one value throughout."""

    def uniform(argument: Any) -> bool | None:
        while isinstance(argument, fx.Node) and argument.target is aten.expand.default:
            argument = arguments(argument)[0]
        name = argument.meta.get("constant") if isinstance(argument, fx.Node) else None
        if name is None or constants[name].dtype != torch.bool:
            return None
        value = constants[name]
        return True if bool(value.all()) else False if not bool(value.any()) else None

    neutral: dict[str, bool] = {
        "aten.bitwise_and": True,
        "aten.logical_and": True,
        "aten.bitwise_or": False,
        "aten.logical_or": False,
    }
    for node in calls(gm):
        name, kept = packet(node), None
        if name in neutral and dtype(node) == torch.bool:
            for mine, other in (arguments(node)[:2], arguments(node)[1::-1]):
                if uniform(mine) is neutral[name] and isinstance(other, fx.Node):
                    kept = other
        elif name == "aten.where" and len(node.args) == 3 and (chosen := uniform(arguments(node)[0])) is not None:
            kept = arguments(node)[1 if chosen else 2]
        if isinstance(kept, fx.Node) and dtype(kept) == dtype(node):
            replace(
                node, kept if shape(kept) == shape(node) else add(node, aten.expand.default, (kept, list(shape(node))))
            )


def unused_constants(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the constants that no placeholder of ``gm`` reads any more."""
    read = {n.meta["constant"] for n in gm.graph.nodes if n.op == "placeholder" and "constant" in n.meta}
    return {name: value for name, value in constants.items() if name in read}
