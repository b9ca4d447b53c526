"""Drops nodes that no other node reads, placeholders included, but not the inputs of the batch."""

from __future__ import annotations

from torch import fx

from autopar.ops.meta import meta


def dead_code_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Erase unread nodes, from last to first. The batch's placeholders stay, with their names; unread random ops are erased, too."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "output" or node.users or (node.op == "placeholder" and "input" in meta(node)):
            continue
        gm.graph.erase_node(node)
    return gm
