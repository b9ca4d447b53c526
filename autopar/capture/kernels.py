"""Ops that torch can run, and whose results' shapes it cannot tell without running them, because it has no meta kernel for them: ``istft``,
fake quantisation.

Passes, prices and the type checker follow shapes on the meta device. Such an op is kept whole, as an opaque module is
(``autopar.capture.opaque``): its results have the shapes that ``torch.export`` found.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from autopar.capture.opaque import register, target_of
from autopar.errors import CaptureError
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import arguments
from autopar.ops.source import source_line
from autopar.program.opaque import TorchOp
from passes.clean.nodes import add, calls, evaluate, flat, note, replace


def keep_ops_without_shapes(gm: fx.GraphModule) -> None:
    """Replace each op without a meta kernel by one that is kept whole.

    Raises:
        CaptureError: such an op takes a list of tensors, or none at all, with the line that calls it.
    """
    for node in calls(gm):
        if op_name(node).startswith("aten."):
            try:
                evaluate(node.target, node.args, dict(node.kwargs))
            except NotImplementedError:
                _keep(gm, node)


def _keep(gm: fx.GraphModule, node: fx.Node) -> None:
    given = arguments(node)
    tensors = [value for value in given.values() if isinstance(value, fx.Node)]
    if not tensors or any(
        isinstance(item, fx.Node) for value in given.values() if not isinstance(value, fx.Node) for item in flat(value)
    ):
        raise CaptureError(
            f"torch cannot tell the shape of {op_name(node)}'s result without its operands' values\n{source_line(node)}",
            hint="put the call into a module of its own and wrap that: autopar.opaque(module, output)",
        )
    module = TorchOp(
        str(node.target).removeprefix("aten."),
        {name: None if isinstance(value, fx.Node) else [value] for name, value in given.items()},
    )
    found: Any = meta(node)["val"]
    several = not isinstance(found, Tensor)
    name = register(module, lambda *inputs: found)
    new = add(node, target_of(name, several=several), (tensors, []))
    note(gm, f"{op_name(node)} kept whole, every rank executes it alike: torch has no meta kernel for it")
    replace(node, new)
