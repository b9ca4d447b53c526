"""The names that a user's code gives to values, on captured models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ops.source import is_bound, source_line, source_name


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    left, right = x.chunk(2, dim=-1)
    return left, right


def turned(x: Tensor) -> Tensor:
    left, right = halves(x)
    return torch.cat((-right, left), dim=-1)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.up(
            x,
        )
        embedded = wide * 2.0 + turned(wide) * 3.0
        embedded *= 0.5
        return self.down(embedded.tanh())


UNREADABLE = """
import torch
class Hidden(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
    def forward(self, x):
        wide = self.up(x)
        return wide.tanh()
"""


def names(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """By op, in order: the name of its first value, and whether the code binds it."""
    graph = capture(model, (torch.ones(4, 8), torch.ones(4, 8)), nn.functional.mse_loss)
    found: dict[str, tuple[str, bool]] = {}
    for cls in graph.classes.values():
        for node in cls.graph.graph.nodes:
            if node.op == "call_function":
                found[node.name] = source_name(node), is_bound(node)
    return found


def test_values_have_the_names_of_the_users_code() -> None:
    found = names(Named())
    assert found["linear"] == ("up", False)  # the product without its bias
    assert found["add"] == ("wide", True)  # returned by torch's forward; the statement has several lines
    assert found["mul"] == ("embedded_mul", False)
    assert found["cat"] == ("turned", False)  # what a function returns
    assert found["add_1"] == ("embedded", True) and found["mul_2"] == ("embedded", True)
    assert found["linear_1"] == ("down", False)


def test_without_readable_source_modules_and_ops_give_names() -> None:
    scope: dict[str, Any] = {}
    exec(compile(UNREADABLE, "<no file>", "exec"), scope)  # noqa: S102  a model without a file
    found = names(scope["Hidden"]())
    assert found["linear"] == ("up", False) and found["tanh"] == ("tanh", False)


def test_lines_of_messages_are_those_of_forward() -> None:
    graph = capture(Named(), (torch.ones(4, 8), torch.ones(4, 8)), nn.functional.mse_loss)
    nodes = [node for cls in graph.classes.values() for node in cls.graph.graph.nodes]
    (cat,) = [node for node in nodes if node.name == "cat"]
    assert "in forward" in source_line(cat) and "turned(wide) * 3.0" in source_line(cat)
    assert source_line(nodes[0]) == ""
