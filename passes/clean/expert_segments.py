"""Lowers experts that compute one segment of sorted rows each: ``cat([expert(part) for part in rows.split(counts.tolist())])``.

The sizes of the segments depend on the data, so capture traces the split and the concatenation as ops (``SPLIT``, ``JOIN``). If the experts
are equal up to parameters, and row-wise, the results of all segments are grouped products of all rows, whatever the sizes are.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of, shape_of
from passes.clean.expert_builder import ExpertBuilder, UnsupportedError
from passes.clean.nodes import aten

SPLIT, JOIN = "split_segment", "join_segments"
"""The names of the ops ``split_segment(rows, counts, index)`` and ``join_segments(parts, rows)``; the latter's ``rows`` are those split."""


def lower_expert_segments(gm: fx.GraphModule, parameters: set[fx.Node]) -> list[fx.Node]:
    """Lower the experts whose parameters are among the placeholders ``parameters``, and return the joins that can't be lowered."""
    joins = [node for node in gm.graph.nodes if op_name(node) == f"autopar.{JOIN}"]
    return [node for node in joins if not _Segments(node, parameters).replace()]


class _Segments(ExpertBuilder):
    def __init__(self, join: fx.Node, parameters: set[fx.Node]) -> None:
        super().__init__(join, parameters)
        self.parts: tuple[fx.Node, ...] = tuple(args_of(join)[0])
        self.replaced.add(join)
        self.counts: fx.Node | None = None
        self.splits: set[fx.Node] = set()

    def replace(self) -> bool:
        """Lower the experts; return false, and change nothing, if that isn't possible."""
        try:
            value = self.build(self.parts)
            if value not in self.row_nodes or shape_of(value)[0] != shape_of(self.anchor)[0]:
                raise UnsupportedError
            if not self.reads_only_replaced(sorted(self.splits)):
                raise UnsupportedError
        except UnsupportedError:
            self.undo()
            return False
        self.anchor.replace_all_uses_with(value)
        self.erase_replaced()
        return True

    def leaf(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return the rows before the split if ``nodes`` are their segments, in order; else ``None``."""
        if any(op_name(node) != f"autopar.{SPLIT}" for node in nodes):
            return None
        rows, counts, _ = args_of(nodes[0])
        if [node.args for node in nodes] != [(rows, counts, index) for index in range(shape_of(counts)[0])]:
            raise UnsupportedError
        if self.counts not in (None, counts):
            raise UnsupportedError
        self.counts = counts
        self.splits.update(nodes)
        self.replaced.update(nodes)
        return rows

    def ends(self) -> fx.Node:
        assert self.counts is not None
        return self.add(aten.cumsum.default, self.counts, 0, dtype=torch.int32)

    def experts(self) -> fx.Node:
        raise UnsupportedError  # needs a number of rows for each expert
