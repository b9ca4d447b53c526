"""Drop what nobody reads: nodes without users, ``get_attr`` and placeholders that are not inputs of the batch."""

from __future__ import annotations

from torch import fx

from autopar.ops.meta import meta


def dead_code_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Erase unread nodes from the end. Placeholders of the batch stay, so that its names do; random ops go like any other."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "output" or node.users or (node.op == "placeholder" and "input" in meta(node)):
            continue
        gm.graph.erase_node(node)
    return gm
