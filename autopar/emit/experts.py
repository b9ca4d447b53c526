"""Emits the body of a mixture of experts as a method of its layer's class."""

from __future__ import annotations

from torch import fx

from autopar.emit.body import statements
from autopar.emit.expressions import Text
from autopar.emit.names import Names
from autopar.ops.experts import Experts
from autopar.ops.meta import meta

NAME = "expert_body"


def name_bodies(nodes: list[fx.Node]) -> dict[Experts, str]:
    """Return a method name for every distinct expert body that ``nodes`` call, and set each call's ``meta["body"]`` to it."""
    found: dict[Experts, str] = {}
    for node in nodes:
        if isinstance(node.target, Experts):
            name = NAME if not found else f"{NAME}_{len(found) + 1}"
            meta(node)["body"] = found.setdefault(node.target, name)
    return found


def body_method(op: Experts, name: str) -> list[str]:
    """Return the lines of the method ``name`` that computes the experts' body, after an empty line."""
    nodes = list(op.body.graph.nodes)
    names = Names()
    inputs = [node for node in nodes if node.op == "placeholder"]
    texts = {node: Text(names.fresh(node.name)) for node in inputs}
    signature = ", ".join(f"{texts[node].text}: torch.Tensor" for node in inputs)
    shapes = ", ".join(f"{texts[node].text} {tuple(meta(node)['val'].shape)}" for node in inputs[2:])
    return [
        "",
        "    @staticmethod",
        f"    def {name}({signature}) -> torch.Tensor:",
        f"        # rows sorted by expert, counts of each; globally {shapes}",
        *statements(nodes, texts, names),
    ]
