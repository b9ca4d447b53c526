"""Cuts the graph into layers: contiguous runs of nodes, with few activations across each cut.

Cuts divide the **main** nodes, which depend on a parameter, a written buffer or a random number. The other nodes depend only on inputs and
constants; each layer recomputes those that it reads, so that they don't cross a cut. 0-d values that depend only on inputs (the number of
valid labels) are **scalars**: they need the global batch, and the prelude computes them once per step.

A layer is a block of the model (``model.layers.3``, ``encoder.block.0``, a child of a ``Sequential``). A chain of single modules
(``Linear``, ``GELU``, ``Linear``) forms layers of two matrix products each, so that one can be column-parallel and the next row-parallel.
The code before, between and after the blocks is a separate layer if it has parameters, and otherwise part of the layer before it. At most
two new activations cross a cut.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from autopar.capture.blocks import blocks, is_leaf, parent, stack
from autopar.ops.facts import facts, is_random
from autopar.ops.meta import graph_meta, meta
from autopar.ops.operands import shape_of
from passes.clean.nodes import calls, returned

# a block's output and one more tensor (a position bias, a cell state); skip connections from earlier blocks don't count
WIDEST_CUT = 2

PRODUCTS_PER_LAYER = 2  # in a chain of single modules


@dataclass(slots=True)
class NodeGroup:
    """The main nodes of a layer, in order; ``block`` is their module (``""``: several modules), ``call`` identifies the call of the module.

    For a chain of single modules, ``leaves`` are the paths of the modules with parameters, and ``block`` is the module that contains
    exactly this chain, or the first of ``leaves``.
    """

    nodes: list[fx.Node]
    block: str = ""
    call: str = ""
    leaves: tuple[str, ...] = ()

    @property
    def has_parameters(self) -> bool:
        return any("parameter" in meta(operand) for node in self.nodes for operand in node.all_input_nodes)

    @property
    def paths(self) -> list[str]:
        """The innermost modules of the nodes, in order, without duplicates."""
        return list(dict.fromkeys(stack(node)[-1][0] for node in self.nodes if stack(node)))


def mark_main(gm: fx.GraphModule) -> None:
    """Set ``meta["main"]``, ``meta["needs_input"]``, and ``meta["scalar"]`` (for 0-d values of inputs that a larger value or a main node
    reads). ``ops.meta`` explains these keys."""
    written = set(updates(gm).values())
    for node in gm.graph.nodes:
        operands = node.all_input_nodes
        parameter = node.op == "placeholder" and ("parameter" in meta(node) or "state" in meta(node))
        random = node.op == "call_function" and is_random(node)
        meta(node)["main"] = parameter or random or node in written or any(meta(n)["main"] for n in operands)
        meta(node)["needs_input"] = (node.op == "placeholder" and "input" in meta(node)) or any(
            meta(n)["needs_input"] for n in operands
        )
    for node in calls(gm):
        tensor = isinstance(meta(node)["val"], torch.Tensor)
        meta(node)["scalar"] = (
            tensor
            and shape_of(node) == ()
            and meta(node)["needs_input"]
            and not meta(node)["main"]
            and any(user.op == "call_function" and (meta(user)["main"] or shape_of(user) != ()) for user in node.users)
        )


def updates(gm: fx.GraphModule) -> dict[str, fx.Node]:
    """Map every buffer that the model writes to the node of its new value."""
    names, results = graph_meta(gm).get("updates", ()), returned(gm)
    return dict(zip(names, results[len(results) - len(names) :], strict=True)) if names else {}


def segment(gm: fx.GraphModule, classes: dict[str, str]) -> list[NodeGroup]:
    """Return the main nodes of each layer, in order. ``classes`` maps module paths to class names; ``mark_main`` must have run."""
    main = [n for n in calls(gm) if meta(n)["main"]]
    runs = _merge_chains(_merge_parameterless(_runs(main, classes)), classes)
    produced = {node: index for index, run in enumerate(runs) for node in run.nodes}
    wide = {index for index, run in enumerate(runs) if _values_read_later(run, index, produced) > WIDEST_CUT}
    merged: list[NodeGroup] = []
    for index, run in enumerate(runs):
        if index - 1 in wide and merged:
            merged[-1] = NodeGroup(merged[-1].nodes + run.nodes)
        else:
            merged.append(run)
    return merged


def _values_read_later(run: NodeGroup, index: int, produced: dict[fx.Node, int]) -> int:
    """Return the number of values of ``run`` that later runs read."""
    return sum(any(produced.get(user, index) > index for user in node.users) for node in run.nodes)


def _runs(main: list[fx.Node], classes: dict[str, str]) -> list[NodeGroup]:
    """Group contiguous nodes of one block. If execution leaves a call of a block and returns to it, all nodes in between join the run."""
    where = blocks(main, classes)
    if not any(block for block, _ in where):
        depth = _splitting_depth(main)
        where = [stack(node)[depth][:2] if len(stack(node)) > depth else ("", "") for node in main]
    runs: list[NodeGroup] = []
    for node, (block, call) in zip(main, where, strict=True):
        if not block and runs and _belongs_after(node, runs[-1].block):
            runs[-1].nodes.append(node)
            continue
        if runs and (runs[-1].block, runs[-1].call) == (block, call):
            runs[-1].nodes.append(node)
            continue
        earlier = [i for i, run in enumerate(runs) if block and (run.block, run.call) == (block, call)]
        if earlier:
            nodes = [n for run in runs[earlier[0] :] for n in run.nodes]
            runs[earlier[0] :] = [NodeGroup([*nodes, node], block, call)]
        else:
            runs.append(NodeGroup([node], block, call))
    return runs


def _belongs_after(node: fx.Node, block: str) -> bool:
    """Return whether the node is parameter-free code of a caller of ``block``, such as a residual addition in the loop over the blocks."""
    around = stack(node)[-1][0] + "." if stack(node) else ""
    return block != "" and block.startswith(around) and not any("parameter" in meta(n) for n in node.all_input_nodes)


def _splitting_depth(main: list[fx.Node]) -> int:
    """Return the first depth of the module tree at which the nodes belong to several modules."""
    for depth in range(4):
        names = Counter(stack(node)[depth][0] for node in main if len(stack(node)) > depth)
        if len(names) > 1:
            return depth
    return 0


def _merge_parameterless(runs: list[NodeGroup]) -> list[NodeGroup]:
    """Merge each run without parameters into the run before it, and the first run into the one after it."""
    result: list[NodeGroup] = []
    for run in runs:
        if result and not run.has_parameters:
            result[-1].nodes += run.nodes
        elif len(result) == 1 and not result[0].has_parameters:
            result[0] = NodeGroup(result[0].nodes + run.nodes, run.block, run.call)
        else:
            result.append(run)
    return result


def _merge_chains(runs: list[NodeGroup], classes: dict[str, str]) -> list[NodeGroup]:
    """Merge modules without submodules that form a chain in one parent, up to ``PRODUCTS_PER_LAYER`` matrix products."""
    result: list[NodeGroup] = []
    for run in runs:
        products = _products(run)
        if run.block and is_leaf(run.block, classes) and (products or not _holds_matrix(run)):
            run.leaves = (run.block,)
        before = result[-1] if result else NodeGroup([])
        if (
            run.leaves
            and before.leaves
            and (parent(before.block), before.call) == (parent(run.block), run.call)
            and _products(before) + products <= PRODUCTS_PER_LAYER
            and _reads_only(run, before)
        ):
            before.nodes += run.nodes
            before.leaves += run.leaves
        else:
            result.append(run)
    for run in result:
        if len(run.leaves) > 1:
            run.block = _holder(run, [path for other in result if other is not run for path in other.paths], classes)
    return result


def _products(run: NodeGroup) -> int:
    """Return the number of the run's matrix products with a parameter."""
    return sum(
        facts(node).is_product and any("parameter" in meta(n) for n in node.all_input_nodes) for node in run.nodes
    )


def _holds_matrix(run: NodeGroup) -> bool:
    return any("parameter" in meta(n) and len(shape_of(n)) > 1 for node in run.nodes for n in node.all_input_nodes)


def _reads_only(run: NodeGroup, before: NodeGroup) -> bool:
    """Return whether every main value that the run reads comes from the run itself or from the run ``before`` it."""
    known = {*run.nodes, *before.nodes}
    return all(
        n in known or n.op == "placeholder" or not meta(n)["main"] for node in run.nodes for n in node.all_input_nodes
    )


def _holder(run: NodeGroup, others: list[str], classes: dict[str, str]) -> str:
    """Return the outermost ``Sequential`` that contains the run's modules and none of the ``others``, else the run's first module."""
    found, path = run.leaves[0], parent(run.leaves[0])
    while path and not any(other == path or other.startswith(path + ".") for other in others):
        found = path
        path = parent(path) if classes.get(path) == "Sequential" else ""
    return found
