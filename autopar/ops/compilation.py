"""Decides from a layer class's ops whether ``torch.compile`` can compile its layers."""

from __future__ import annotations

from torch import fx

from autopar.graph import LayerClass
from autopar.ops.facts import OpKind, facts, is_custom
from autopar.techniques import Options


def stays_eager(cls: LayerClass) -> str:
    """Return why layers of the class can't be compiled, or an empty string."""
    if cls.updates:
        return "writes buffers"
    for node in cls.graph.graph.nodes:
        if node.op == "call_function" and (reason := _reason(node)):
            return reason
    return ""


def is_compiled(cls: LayerClass, options: Options) -> bool:
    """Return whether ``torch.compile`` compiles layers of the class with these options.

    Under a schedule that splits the backward pass, a compiled layer runs all of it in the first part."""
    return options.compiled and not stays_eager(cls)


def _reason(node: fx.Node) -> str:
    op = facts(node)
    if is_custom(node.target) or op.name.startswith("autopar.opaque_"):
        return "runs code that is not in its graph"
    if op.kind is OpKind.RECURRENCE:
        return "is recurrent, which is one kernel already"
    return ""
