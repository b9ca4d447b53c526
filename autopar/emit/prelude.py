"""The prelude as a function: scalars that depend only on the batch, computed once per step for the whole global batch, and checks of
the batch's values."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.emit.expressions import Text, expression, literal
from autopar.emit.names import Names
from autopar.graph import Graph


def prelude_function(graph: Graph) -> str:
    """The source of ``PRELUDE``: a function of the batch's tensors and the folded constants, both by name, or ``None``."""
    if graph.prelude is None or not (graph.scalars or graph.guards):
        return "PRELUDE = None\n"
    batch = "the whole global batch" if graph.accumulated == 1 else "one microbatch"
    texts: dict[fx.Node, Text] = {}
    names = Names()
    lines = [
        "def PRELUDE(batch: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: N802",
        f'    """Scalars of {batch}, such as its number of valid tokens."""',
    ]
    for node in graph.prelude.graph.nodes:
        if node.op == "placeholder":
            texts[node] = Text(f'batch["{node.target}"]')
        elif node.op == "get_attr":
            texts[node] = Text(f'constants["{node.target}"].to(batch["{graph.inputs[0].name}"].device)')
        elif node.op == "output":
            results: Any = node.args[0]
            for guard, result in zip(graph.guards, results[len(graph.scalars) :], strict=True):
                lines.append(f"    guards.hold({literal(result, texts)}, {guard.value!r}, {guard.line!r})")
            pairs = zip(graph.scalars, results, strict=False)
            entries = ", ".join(f'"{value.name}": {literal(result, texts)}' for value, result in pairs)
            lines.append(f"    return {{{entries}}}")
        else:
            name = names.fresh(node.name)
            lines.append(f"    {name} = {expression(node, texts).text}")
            texts[node] = Text(name)
    return "\n".join(lines) + "\n"
