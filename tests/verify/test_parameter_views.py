"""A layer that returns views of its parameters: a class token, latents, queries. Their memory is the layer's own, and only until its
end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.verify import check_plan, kind, kinds, make_subject

ROWS, WIDTH = 4, 8


class Tokens(nn.Module):
    """Returns its input and one parameter in each way, besides the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        shapes = {"expanded": (1, 1, WIDTH), "sliced": (3, 9, WIDTH), "turned": (1, 3, WIDTH), "itself": (1, 3, WIDTH)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = self.turned.transpose(0, 1)
        return self.inner(x), self.expanded.expand(len(x), -1, -1), self.sliced[:1, :2], turned, self.itself


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Views of views cross the borders of several layers, and meet the input in the last one."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.tokens, self.head = Tokens(), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x, token, part, turned, itself = self.tokens(x)
        x, part = self.blocks[0](x), part[:, 1:].transpose(0, 1)
        for block in self.blocks[1:]:
            x = block(x)
        rest = [
            part.expand(len(x), 1, -1),
            turned.transpose(0, 1).expand(len(x), -1, -1),
            itself.expand(len(x), -1, -1),
        ]
        return self.head(torch.cat([x, token, *rest], 1).square()).mean()


@pytest.mark.parametrize("name", ["data 2, zero 3", "recompute, data 2, zero 3", "pipeline 2"])
def test_views_of_parameters_leave_their_layer_as_copies(name: str, workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    subject = make_subject(Model(), torch.randn(ROWS, 5, WIDTH))
    assert len(subject.graph.layers[0].outputs) == 4, "the layer must return views"
    plan = next(kind for kind in kinds(2) if kind.name == name).plan(subject.graph)
    assert check_plan(subject, plan, workers2).error.exact


@pytest.mark.parametrize("schedule", [{"schedule": "gpipe"}, {"chunks": 2, "schedule": "interleaved-1f1b"}], ids=str)
def test_gradients_of_views_add_up_over_the_step(schedule: dict[str, Any], workers4: WorkerPool) -> None:
    """Where gradients are reduced once a step, their sum may be a view of what the stage received for the first microbatch."""
    torch.manual_seed(0)
    subject = make_subject(Model(6), torch.randn(16, 5, WIDTH))
    plan = kind("a pipeline", pipeline=2, data=2, zero=3, reduce="step", microbatches=8, **schedule).plan(subject.graph)
    assert check_plan(subject, plan, workers4).error.exact
