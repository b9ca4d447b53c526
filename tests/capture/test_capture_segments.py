"""Where a model is cut into layers: stages of blocks, single modules in a row, and the modules of torch.nn with a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
import vision_models
from torch import Tensor, nn

from autopar.capture import capture
from autopar.graph import Graph
from autopar.plan import Role
from autopar.shard import annotate, role_types
from autopar.types import P, S
from autopar.verify import kind, make_subject
from autopar.verify.run import check_plan


class Stage(nn.Module):
    """Blocks in a row, as in a ResNet of transformers; ``around`` makes it a block with a residual of its own."""

    def __init__(self, before: int, after: int, around: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(vision_models.BasicBlock(before, after), vision_models.BasicBlock(after, after))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.around else self.layers(x)


class Experts(nn.Module):
    """Members of a list side by side are no chain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(Twice(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), torch.zeros_like(x))


class Twice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def layers(graph: Graph) -> list[tuple[str, str]]:
    return [(layer.name, layer.cls) for layer in graph.layers]


def images(model: nn.Module) -> Graph:
    x, y = torch.randn(4, 8, 6, 6), torch.randn(4, 8, 6, 6)
    return capture(model, (x, y), F.mse_loss)


def test_a_stage_is_cut_at_its_blocks() -> None:
    graph = images(nn.ModuleDict({"stages": nn.Sequential(Stage(8, 8), Stage(8, 8))})["stages"])
    assert [name for name, _ in layers(graph)] == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]
    assert (
        graph.layers[1].cls == graph.layers[2].cls == "BasicBlock2"
    )  # the first reads an input, the last makes the loss


def test_a_residual_around_blocks_keeps_them_together() -> None:
    graph = images(nn.Sequential(Stage(8, 8, around=True), Stage(8, 8, around=True)))
    assert [name for name, _ in layers(graph)] == ["0", "1"]


def test_members_side_by_side_stay_together() -> None:
    model = nn.Sequential(Experts(8), Experts(8))
    graph = capture(model, (torch.randn(4, 8), torch.randn(4, 8)), F.mse_loss)
    assert [name for name, _ in layers(graph)] == ["0", "1"]


def plain(count: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(16, 16), nn.GELU()]
    return nn.Sequential(*parts)


def test_single_modules_in_a_row_are_taken_by_two_products() -> None:
    graph = capture(plain(9), (torch.randn(4, 16), torch.randn(4, 16)), F.mse_loss)
    assert [name for name, _ in layers(graph)] == ["0", "4", "8", "12", "16"]
    assert graph.layers[1].cls == graph.layers[2].cls == graph.layers[3].cls
    assert graph.layers[2].parameters == ("8.weight", "8.bias", "10.weight", "10.bias")
    named = {value.name for value in graph.classes[graph.layers[2].cls].parameters}
    assert named == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_pair_is_cut_by_columns_then_rows() -> None:
    graph = annotate(capture(plain(4), (torch.randn(8, 16), torch.randn(8, 16)), F.mse_loss))
    types = role_types(graph, 0, Role.TENSOR, 2)
    assert types is not None
    assert [found for name, found in types.produced.items() if name.endswith("weight")] == [S(0), S(1)]
    assert sum(found == P for found in types.produced.values()) == 1


@pytest.mark.parametrize("kinds", ["tensor 2", "pipeline 2, 1f1b"])
def test_pairs_are_exact(kinds: str, workers2) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(8, 16, dtype=torch.float64) for _ in range(2))
    subject = make_subject(plain(5), (x, y), F.mse_loss, name="plain")
    chosen = kind(kinds, tensor=2) if "tensor" in kinds else kind(kinds, pipeline=2, microbatches=2, schedule="1f1b")
    assert check_plan(subject, chosen.plan(subject.graph), workers2).error.value < 1e-9


class Decoded(nn.Module):
    """``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` under causal masks, with nobody saying that they are causal."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        sizes = {"d_model": width, "nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)
        self.head = nn.Linear(width, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        memory = self.encoder(self.embed(tokens), mask=mask)
        return self.head(self.decoder(self.embed(tokens), memory, tgt_mask=mask)).transpose(1, 2)


def test_a_mask_that_torch_would_look_at_is_recognised(workers2) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(30, (8, 6))
    subject = make_subject(Decoded(), (tokens, tokens.roll(-1, 1)), F.cross_entropy, name="decoded")
    attention = [
        (len(node.args), node.kwargs.get("is_causal"))
        for layer in subject.graph.layers
        for node in subject.graph.classes[layer.cls].graph.graph.nodes
        if "scaled_dot_product" in str(node.target)
    ]
    assert attention == [(3, True), (3, True), (3, True), (3, None), (3, True), (3, None)]
    plan = kind("data 2, zero 3", data=2, zero=3).plan(subject.graph)
    assert check_plan(subject, plan, workers2).error.value < 1e-9
    looking = nn.modules.transformer._detect_is_causal_mask
    assert looking.__module__ == "torch.nn.modules.transformer"  # as it was before


def test_a_layer_with_the_name_loss_keeps_its_value() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss, self.head = Twice(6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.loss(x)).square().mean()

    graph = capture(Named(), torch.randn(4, 6))
    assert [layer.name for layer in graph.layers] == ["loss", "head"]
    assert {name: value.shape for name, value in graph.values.items()} == {"loss@2": (4, 6), "loss": ()}
