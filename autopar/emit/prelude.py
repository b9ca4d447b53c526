"""Emits the prelude, a function that computes scalars of the batch, such as its number of valid tokens, and checks the graph's guards."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.emit.body import WIDTH
from autopar.emit.expressions import Text, expression, literal
from autopar.emit.names import Names, quoted
from autopar.graph import Graph
from autopar.ops.meta import meta
from autopar.ops.operands import operands
from autopar.ops.source import source_name
from autopar.rules.candidates import candidates
from autopar.types import P, R, S, SpmdType


def prelude_function(graph: Graph) -> tuple[str, str]:
    """Return the source of the function ``prelude``, and its ``Prelude`` record; empty strings if there is nothing to compute."""
    if graph.prelude is None or not (graph.scalars or graph.guards):
        return "", ""
    batch = "the whole global batch" if graph.accumulated == 1 else "one microbatch"
    texts: dict[fx.Node, Text] = {}
    names = Names(("batch", "constants", "total"))
    sums = row_sums(graph.prelude)
    reads = [str(node.target) for node in graph.prelude.graph.nodes if node.op == "placeholder" and node.users]
    reads = reads or [graph.inputs[0].name]  # constants are moved to the device of an input
    lines = [
        "def prelude(batch: Tensors, constants: Tensors, total: Total) -> Tensors:",
        f'    """Scalars of {batch}, such as its number of valid tokens."""',
    ]
    for node in graph.prelude.graph.nodes:
        if node.op == "placeholder":
            texts[node] = Text(f"batch[{quoted(str(node.target))}]")
        elif node.op == "get_attr":
            texts[node] = Text(f"constants[{quoted(str(node.target))}].to(batch[{quoted(reads[0])}].device)")
        elif node.op == "output":
            results: Any = node.args[0]
            for guard, result in zip(graph.guards, results[len(graph.scalars) :], strict=True):
                lines.append(f"    guards.check_guard({literal(result, texts)}, {guard.value!r}, {guard.line!r})")
            pairs = zip(graph.scalars, results, strict=False)
            entries = ", ".join(f"{quoted(value.name)}: {literal(result, texts)}" for value, result in pairs)
            lines.append(f"    return {{{entries}}}")
        else:
            text = expression(node, texts)
            text = Text(f"total({text.text})") if sums and node in sums else text
            if len(node.users) == 1 and len(text.text) <= WIDTH // 2:
                texts[node] = text
                continue
            texts[node] = Text(names.fresh(source_name(node)))
            lines.append(f"    {texts[node].text} = {text.text}")
    return "\n".join(lines) + "\n", f"Prelude(prelude, reads={literal(tuple(reads), {})}, by_rows={sums is not None})"


def row_sums(prelude: fx.GraphModule) -> set[fx.Node] | None:
    """Return the prelude's sums over rows if each rank can sum its own rows first (``Total`` adds up the ranks), else ``None``.

    The sharding rules prove it: with inputs sharded along dim 0, each op must have a rule whose result is sharded too, or a partial sum,
    and no argument with the number of rows. Only integer sums qualify, since floating ones depend on the order. Every rank computes the
    ops after the sums.
    """
    types: dict[fx.Node, SpmdType] = {}
    sums: set[fx.Node] = set()
    for node in prelude.graph.nodes:
        if node.op == "placeholder":
            types[node] = S(0)
        elif node.op == "get_attr":
            types[node] = R
        elif node.op == "output":
            return sums if all(types[each] == R for each in node.all_input_nodes) else None
        else:
            given = tuple(types[operand] for operand in operands(node))
            if all(each == R for each in given):
                types[node] = R
                continue
            found = [c.result for c in candidates(node) if c.operands == given and c.kernel is None]
            if not found or found[0] == P and meta(node)["val"].dtype.is_floating_point or _takes_row_count(node):
                return None
            types[node] = R if found[0] == P else found[0]
            sums |= {node} if found[0] == P else set()
    return None


def _takes_row_count(node: fx.Node) -> bool:
    """Return whether an argument of the node looks like its result's shape, with the number of rows: the same length and first element."""
    shape = tuple(meta(node)["val"].shape)
    lists = [tuple(each) for each in node.args if isinstance(each, list | tuple)]
    return any(len(each) == len(shape) > 0 and each[0] == shape[0] for each in lists)
