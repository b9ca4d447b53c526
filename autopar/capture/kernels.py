"""Makes ops without a meta kernel opaque, such as ``istft`` and fake quantisation.

Passes, the cost model and the type checker compute shapes on the meta device. An op that can't run there becomes opaque like a module
(``autopar.capture.opaque``), with the result shapes that ``torch.export`` determined.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from autopar.capture.opaque import opaque_note, register, target_of
from autopar.errors import CaptureError
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import arguments
from autopar.ops.source import source_line
from autopar.program.opaque import TorchOp
from passes.clean.nodes import add, calls, evaluate, flat, note, replace


def make_opaque_without_meta_kernel(gm: fx.GraphModule) -> None:
    """Make each aten op without a meta kernel opaque. Raises ``CaptureError`` if the op takes a list of tensors, or no tensor."""
    for node in calls(gm):
        if op_name(node).startswith("aten."):
            try:
                evaluate(node.target, node.args, dict(node.kwargs))
            except NotImplementedError:
                _make_opaque(gm, node)


def _make_opaque(gm: fx.GraphModule, node: fx.Node) -> None:
    given = arguments(node)
    tensors = [value for value in given.values() if isinstance(value, fx.Node)]
    if not tensors or any(
        isinstance(item, fx.Node) for value in given.values() if not isinstance(value, fx.Node) for item in flat(value)
    ):
        raise CaptureError(
            f"torch has no meta kernel for {op_name(node)}, so its result's shape is unknown without values\n{source_line(node)}",
            hint="put the call into a separate module and wrap that: autopar.opaque(module, output)",
        )
    module = TorchOp(
        str(node.target).removeprefix("aten."),
        {name: None if isinstance(value, fx.Node) else [value] for name, value in given.items()},
    )
    found: Any = meta(node)["val"]
    several = not isinstance(found, Tensor)
    name = register(module, lambda *inputs: found)
    new = add(node, target_of(name, several=several), (tensors, []))
    note(gm, opaque_note(op_name(node), "torch has no meta kernel for it"))
    replace(node, new)
