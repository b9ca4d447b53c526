"""Makes the graph functional: every op that writes becomes its functional counterpart, and views of a written tensor are created again.

This is the usual functionalisation: each tensor is a base or a chain of views of one (``passes.clean.views``). An op's schema says which
argument it writes to. A write to a view is carried back to its base through the chain: a write through ``slice`` is a ``cat`` of the
unchanged and the new parts. The base gets a new value. A view that was created before the write is replayed on the new base when it is read
again. A buffer's last value (batch norm's running statistics, a counter) becomes an output of the graph after the loss; ``meta["updates"]``
names the buffers in that order.

Gradients follow autograd: after a write of a value with a gradient, the base and all its views have a gradient. A write that changes a
value and leaves its gradient unchanged (under ``no_grad``, or through ``detach``) has no functional form, and is refused; so is a
write to a trainable parameter, which only the optimizer may change, and a write through a view of unknown kind.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.ops.facts import facts, op_name
from autopar.ops.meta import graph_meta, meta
from autopar.ops.operands import args_of, argument, dtype_of, shape_of
from autopar.ops.source import source_line
from autopar.torch_private import functional_overload, overload_schema, written_arguments
from passes.clean.nodes import add, ancestors, aten, calls, has_gradient, returned
from passes.clean.randomness import drawn
from passes.clean.views import View, origins, positions, replay, scatter

_HINT = f"make a new tensor instead of writing into one: y = torch.where(mask, new, y), y = torch.cat(...); or {OPAQUE_HINT}"


@dataclass(slots=True)
class _Alias:
    """A tensor as a chain of views of ``base``; ``version`` is the base's version that ``current`` was created from.

    ``detached_error`` is an error message if a value with a gradient was written through ``detach``: this tensor has the gradient, its base
    does not.
    """

    base: fx.Node
    chain: tuple[View, ...]
    current: fx.Node
    version: int
    detached_error: str = ""


def functionalise_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace the ops that write; see the module's docstring.

    Raises:
        CaptureError: a write has no functional form, or an unknown one; the message quotes the line that writes.
    """
    if any(written_arguments(node.target) for node in calls(gm)):
        _Functionaliser(gm).run()
    return gm


class _Functionaliser:
    """Rewrites the graph in one walk. ``newest`` has the newest value of each written base, and the number of writes to it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.aliases: dict[fx.Node, _Alias] = {}
        self.newest: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.results: dict[fx.Node, list[tuple[fx.Node, View | None] | None]] = {}  # origins, of multi-result ops
        self.gradients: dict[fx.Node, bool] = {}
        self.detached: list[tuple[fx.Node, set[fx.Node], list[fx.Node]]] = []

    def run(self) -> None:
        nodes = list(self.gm.graph.nodes)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                node.args = map_arg(node.args, lambda n: self._read(n, node))  # noqa: B023  called at once
        self._refuse_late_detached()
        for node in reversed([n for n in nodes if written_arguments(n.target)]):
            for item in [user for user in node.users if user.target is operator.getitem and not user.users]:
                self.gm.graph.erase_node(item)
            assert not node.users, node
            self.gm.graph.erase_node(node)
        self._return_buffers()

    def _call(self, node: fx.Node) -> None:
        written = written_arguments(node.target)
        targets = [_named(node, name) for name in written]
        seen = self._origins(node) if not written else []
        aliases = [self._alias(target) for target in targets if isinstance(target, fx.Node)]
        node.args = map_arg(node.args, lambda n: self._read(n, node))
        node.kwargs = map_arg(node.kwargs, lambda n: self._read(n, node))
        if not written:
            self._remember(node, seen)
            self._gradient(node)
        elif len(aliases) != len(written):
            raise _refused(node, "writes to several tensors at once", _HINT)
        elif torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self._reshape(node, aliases[0])
        else:
            new_values = self._functional_values(node, written)
            for alias, new in zip(aliases, new_values, strict=True):
                self._write(alias, new, node)
            for alias, new, holder in zip(aliases, new_values, self._holders(node), strict=False):
                # tensors written at once may share memory: version 0 makes readers replay the value
                version = self._version(alias.base) if len(new_values) == 1 else 0
                self.aliases[holder] = _Alias(alias.base, alias.chain, new, version, alias.detached_error)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _alias(self, node: fx.Node) -> _Alias:
        return self.aliases.setdefault(node, _Alias(node, (), node, 0))

    def _origins(self, node: fx.Node) -> list[tuple[fx.Node, View | None] | None]:
        """Return the origin of the node's tensor in a list; for several results an empty list, and their ``getitem`` nodes get the origins.

        Call it before operands are replaced: which results share memory depends on eager's strides.
        """
        if node.target is operator.getitem:
            call, item = args_of(node)
            return self.results.get(call, [None] * (item + 1))[item : item + 1]
        found = origins(node)
        if isinstance(meta(node).get("val"), tuple | list):
            self.results[node] = found
            return []
        return found

    def _remember(self, node: fx.Node, seen: list[tuple[fx.Node, View | None] | None]) -> None:
        if not seen or seen[0] is None:
            return
        operand, view = seen[0]
        source = self._alias(operand)
        chain = source.chain if view is None else (*source.chain, view)
        self.aliases[node] = _Alias(source.base, chain, node, self._version(source.base), source.detached_error)

    def _holders(self, node: fx.Node) -> list[fx.Node]:
        """Return the node of each tensor that an op has written: the op itself, or the ``getitem`` that picks the tensor."""
        if not isinstance(meta(node)["val"], tuple | list):
            return [node]
        picked = {args_of(user)[1]: user for user in node.users if user.target is operator.getitem}
        return [picked.get(index, node) for index in range(len(meta(node)["val"]))]

    def _version(self, base: fx.Node) -> int:
        return self.newest[base][1] if base in self.newest else 0

    def _value(self, base: fx.Node) -> fx.Node:
        return self.newest[base][0] if base in self.newest else base

    def _read(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the node whose value is ``node``'s value at the time when ``reader`` runs."""
        alias = self.aliases.get(node)
        if alias is None:
            return node
        if alias.detached_error:
            raise CaptureError(alias.detached_error, _HINT)
        if alias.version != self._version(alias.base):
            value = self._value(alias.base)
            for view in alias.chain:
                value = self._replayed(view, value, reader)
            alias.current, alias.version = value, self._version(alias.base)
        return alias.current

    def _replayed(self, view: View, value: fx.Node, anchor: fx.Node) -> fx.Node:
        found = replay(view, value, anchor)
        if found is None:
            raise _refused(view.call, "reads by strides a tensor that is written in place", _HINT)
        return found

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self, alias: _Alias, new: fx.Node, node: fx.Node) -> None:
        """Carry ``new``, the new value of the view, back to the base."""
        base, value = alias.base, self._value(alias.base)
        self._refuse_base(base, node)
        if meta(new)["val"].numel() == 0:
            return
        if any(view.detaches for view in alias.chain):
            new = self._detached(alias, new, node)
        sources = [value]
        for view in alias.chain[:-1]:
            sources.append(self._replayed(view, sources[-1], node))
        for view, source in zip(reversed(alias.chain), reversed(sources), strict=True) if alias.chain else ():
            back = scatter(view, source, new, node)
            if back is None:
                many = view.value.numel() > meta(source)["val"].numel()
                what = "which shows an element in several places" if many else "a view of an unsupported kind"
                raise _refused(node, f"writes through {view.name.removeprefix('aten.')}, {what}", _HINT)
            new = back
        version = self._version(base) + 1
        self.newest[base] = (new, version)
        if not any(view.detaches for view in alias.chain):
            return
        cut = _chain_to_detach(alias)
        for other in self.aliases.values():
            if alias.detached_error and other.base is base and other.chain[: len(cut)] == cut:
                other.detached_error = alias.detached_error

    def _detached(self, alias: _Alias, new: fx.Node, node: fx.Node) -> fx.Node:
        """Return ``new`` without its gradient, for a write through ``detach``; refuse the write if the base has a gradient."""
        value = self._value(alias.base)
        if self._gradient(value):
            raise _refused(
                node,
                "writes under no_grad, or through detach or .data, to a tensor that has a gradient: the value changes, and the "
                "gradient stays that of the old value",
                "write with the gradient that is meant: y = torch.where(mask, new, y), or y = y + (new - y).detach(), which has y's "
                "gradient",
            )
        cut = next(view for view in alias.chain if view.detaches)
        if not meta(cut.call).get("no_grad"):  # autograd itself refuses a backward through values written under no_grad
            holders = {value} | {other.current for other in self.aliases.values() if other.base is alias.base}
            self.detached.append((node, holders, [user for holder in holders for user in holder.users]))
        if not self._gradient(new):
            return new
        alias.detached_error = _located(
            node,
            "writes a value with a gradient through detach or .data; the detached tensor, read later, has a gradient, but its base none",
        )
        return add(node, aten.detach.default, (new,))

    def _refuse_base(self, base: fx.Node, node: fx.Node) -> None:
        """Refuse a write to a trainable parameter, which only the optimizer may change, to a stored tensor that is no buffer, or to one
        with shared memory. A frozen parameter that forward writes (such as a momentum teacher's) is treated as a buffer."""
        parameter = meta(base).get("parameter")
        if parameter is not None and parameter.trainable:
            raise _refused(
                node,
                f"writes to the parameter {parameter.name} in forward, but in a captured step only the optimizer writes parameters",
                "compute with a changed copy (w = self.weight.clamp(...)), change the parameter after the step under torch.no_grad(), or, "
                "where it is not trained, freeze it: parameter.requires_grad_(False)",
            )
        if parameter is not None:
            del meta(base)["parameter"]
            meta(base).update({"buffer": parameter.name, "lifted": False})
        if base.op == "get_attr" or meta(base).get("lifted"):
            raise _refused(
                node,
                "writes to a tensor that is neither made in forward nor a buffer, so that nothing keeps its new value",
                "make it a buffer of the model: self.register_buffer(name, tensor)",
            )
        if shared := meta(base).get("shares"):
            raise _refused(
                node,
                f"writes to {meta(base).get('buffer')}, whose memory {shared} shares",
                "give each a tensor of its own: tensor.clone()",
            )

    def _functional_values(self, node: fx.Node, written: tuple[str, ...]) -> list[fx.Node]:
        """Return the new values that ``node`` writes, in the shapes and dtypes of the tensors that it writes to."""
        targets = [_named(node, name) for name in written]
        new = _simpler_value(node) or drawn(node)
        if new is None:
            target = functional_overload(node.target)
            if target is None:
                raise _refused(node, "writes to its operand, and has no known functional form", _HINT)
            outs = set(written) - {name for name, _ in overload_schema(target) or ()}
            kwargs = {name: value for name, value in node.kwargs.items() if name not in outs}
            new = add(node, target, node.args, kwargs)
        several = isinstance(meta(new)["val"], tuple | list)
        new_values = [add(node, operator.getitem, (new, i)) for i in range(len(targets))] if several else [new]
        return [self._fitted(value, target, node) for value, target in zip(new_values, targets, strict=True)]

    def _fitted(self, new: fx.Node, target: fx.Node, node: fx.Node) -> fx.Node:
        value = meta(target)["val"]
        if dtype_of(new) != value.dtype:
            new = add(node, aten.to.dtype, (new, value.dtype))
        if shape_of(new) != tuple(value.shape):
            if op_name(node) != "aten.copy_":
                raise _refused(
                    node,
                    f"writes {list(shape_of(new))} to a tensor of shape {list(value.shape)}, which changes its shape",
                    _HINT,
                )
            new = add(node, aten.expand.default, (new, list(value.shape)))
        return new

    def _reshape(self, node: fx.Node, alias: _Alias) -> None:
        """Make the tensor another view of its base (``unsqueeze_`` and similar ops), or detach its base from autograd (``detach_``)."""
        if op_name(node) == "aten.detach_":
            if alias.chain or any(other.base is alias.base and other.chain for other in self.aliases.values()):
                raise _refused(node, "detaches a view, or a tensor with views, in place", "y = y.detach()")
            value = add(node, aten.detach.default, (self._value(alias.base),))
            self.newest[alias.base] = (value, self._version(alias.base) + 1)
            self.aliases[node] = _Alias(alias.base, (), value, self._version(alias.base))
            return
        functional = functional_overload(node.target)
        view = add(node, functional, node.args, dict(node.kwargs)) if functional is not None else None
        found = origins(view) if view is not None else []
        if view is None or not found or found[0] is None or found[0][1] is not None and found[0][1].operand_index != 0:
            raise _refused(node, "gives a tensor another size or other memory", "make a new tensor: y = new")
        chain = (*alias.chain, View(view, 0))
        self.aliases[node] = _Alias(alias.base, chain, view, self._version(alias.base), alias.detached_error)

    # -- gradients, and the end ---------------------------------------------------------------------------------------

    def _gradient(self, node: fx.Node) -> bool:
        if node not in self.gradients:
            self.gradients[node] = has_gradient(node, self._gradient)
        return self.gradients[node]

    def _refuse_late_detached(self) -> None:
        """Refuse a write through ``.data`` to a value that an earlier op saved: autograd does not see the write, and would compute that
        op's gradient from the new value."""
        if not self.detached:
            return
        reached = ancestors(self.gm.graph.output_node().all_input_nodes, self._gradient)
        for node, holders, readers in self.detached:
            for reader in readers:
                if reader in reached and not facts(reader).saves_nothing and holders & set(reader.all_input_nodes):
                    raise _refused(
                        node,
                        f"writes through detach or .data to what {op_name(reader).removeprefix('aten.')} has read: its gradient would be "
                        "computed from the new values",
                        "write to a clone, or before it is read",
                    )

    def _return_buffers(self) -> None:
        """Append the new values of buffers to the graph's outputs, and mark written buffers as state (``meta["state"]``)."""
        updates = {base: value for base, (value, _) in self.newest.items() if "buffer" in meta(base)}
        self.gm.graph.output_node().args = ((*returned(self.gm), *updates.values()),)
        graph_meta(self.gm)["updates"] = tuple(meta(buffer)["buffer"] for buffer in updates)
        for buffer in updates:
            meta(buffer)["state"] = True


def updates_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a buffer's new value if it is a constant, an input, another buffer's value or a value with other readers: a layer must compute
    the value that it returns for a buffer, and return it for no other purpose."""
    output, results = gm.graph.output_node(), returned(gm)
    first = len(results) - len(graph_meta(gm).get("updates", ()))

    def own(value: fx.Node) -> fx.Node:
        if value.op == "placeholder":
            return add(output, aten.clone.default, (value,))
        return add(value.next, aten.clone.default, (value,), origin=value) if len(value.users) > 1 else value

    output.args = ((*results[:first], *(own(value) for value in results[first:])),)
    return gm


def _chain_to_detach(alias: _Alias) -> tuple[View, ...]:
    """Return the chain of views up to its last ``detach``."""
    last = max(index for index, view in enumerate(alias.chain) if view.detaches)
    return alias.chain[: last + 1]


def _named(node: fx.Node, name: str) -> Any:
    """Return the node's argument with this name."""
    names = [known for known, _ in overload_schema(node.target) or ()]
    return argument(node, names.index(name), name)


def _simpler_value(node: fx.Node) -> fx.Node | None:
    """Return a new value that is simpler than the functional op's: a constant, the copied tensor, ``where`` for a mask; else ``None``."""
    name, written = op_name(node), args_of(node)[0] if node.args else None
    if name in ("aten.zero_", "aten.fill_"):
        fill = 0 if name == "aten.zero_" else args_of(node)[1]
        assert isinstance(written, fx.Node)
        if isinstance(fill, fx.Node):
            return add(node, aten.expand.default, (fill, list(shape_of(written))))
        return add(node, aten.full.default, (list(shape_of(written)), fill), {"dtype": dtype_of(written)})
    if name == "aten.copy_":
        source = args_of(node)[1]
        assert isinstance(source, fx.Node)
        return source
    if name == "aten.fill_diagonal_":
        return _diagonal_filled(node)
    return _masked_write(node) if name == "aten.index_put_" else None


def _diagonal_filled(node: fx.Node) -> fx.Node | None:
    """Return ``fill_diagonal_`` as ``where``; ``None`` if the diagonal may wrap around."""
    x, fill = args_of(node)[:2]
    sizes = shape_of(x)
    rank = len(sizes)
    if argument(node, 2, "wrap", False) and (rank > 2 or sizes[0] > sizes[1]):
        return None
    first = positions(sizes[0], 0, rank, node)
    equal = [add(node, aten.eq.Tensor, (first, positions(sizes[d], d, rank, node))) for d in range(1, rank)]
    on = functools.reduce(lambda a, b: add(node, aten.bitwise_and.Tensor, (a, b)), equal)
    filled = add(node, aten.full.default, ([1] * rank, fill), {"dtype": dtype_of(x)})
    return add(node, aten.where.self, (on, filled, x))


def _masked_write(node: fx.Node) -> fx.Node | None:
    """Return ``x[mask] = value`` as ``where``; ``None`` if ``where`` can't express it: other indices, or a row per selected element."""
    x, indices, value, *rest = args_of(node)
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(used) != 1 or meta(used[0][1])["val"].dtype != torch.bool or any(rest) or node.kwargs.get("accumulate"):
        return None
    before, mask = used[0]
    after = len(shape_of(x)) - before - len(shape_of(mask))
    sizes = list(shape_of(value))
    while sizes and sizes[0] == 1 and len(sizes) > after:
        sizes.pop(0)
    if len(sizes) > after:
        return None
    if sizes != list(shape_of(value)):
        value = add(node, aten.reshape.default, (value, sizes))
    for _ in range(after):
        mask = add(node, aten.unsqueeze.default, (mask, -1))
    return add(node, aten.where.self, (mask, value, x))


def _refused(node: fx.Node, what: str, hint: str) -> CaptureError:
    return CaptureError(_located(node, what), hint)


def _located(node: fx.Node, what: str) -> str:
    return f"{op_name(node).removeprefix('aten.')} {what}\n{source_line(node)}".rstrip()
