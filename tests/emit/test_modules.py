"""Classes of layers: one for all layers of the same code, and torch's own modules where they compute what the layer computes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from exactness import subject
from torch import Tensor, nn

from autopar.capture import batch, capture
from autopar.emit import model_source, names
from autopar.graph import Graph
from autopar.search.manual import manual_plan
from autopar.shard import plan_shardings
from passes.stages import cut_stages


def source(graph: Graph, **options: Any) -> str:
    plan = manual_plan(graph, **options)
    return model_source(cut_stages(graph, plan, plan_shardings(graph, plan)))


def test_zero_stages_do_not_make_classes() -> None:
    graph = subject("llama").graph
    (_, first, *_) = manual_plan(graph, data=2, zero=3).layers
    text = source(graph, data=2, zero=3, strategies={1: dataclasses.replace(first.strategy, zero=1)})
    assert len(re.findall(r"class LlamaDecoderLayer\w*\(", text)) == 1
    assert 'self.model_layers["0"] = LlamaDecoderLayer(LayerSpec(zero=1, data_axes=("data",)), device=device)' in text
    assert "for i in range(1, 4):\n" in text and "for layer in self.model_layers.values():" in text


class Reading(nn.Module):
    """Weights that a module of torch does not say everything about."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.frozen, self.twice, self.read = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.plain(x)))
        return self.twice(self.twice(x)) + self.read(x) * self.read.weight.sum()


def test_modules_of_torch_are_those_whose_parameters_one_op_reads() -> None:
    graph = capture(Reading(), (torch.ones(4, 8), torch.ones(4, 8)), nn.functional.mse_loss)
    text = source(graph, data=2)
    assert "self.plain = nn.Linear(8, 8, **factory, dtype=torch.float32)" in text
    assert "self.norm = nn.LayerNorm(8, eps=1e-05, **factory, dtype=torch.float32)" in text
    for name in ("frozen", "twice", "read"):
        assert f"self.{name} = nn.Linear(" not in text
    assert "self.frozen.weight = nn.Parameter(" in text and "read_weight.sum()" in text
    sharded = source(subject("llama").graph, tensor=2)
    assert "nn.Linear(" not in sharded and "self.self_attn.o_proj.weight" in sharded


class Repeated(nn.Module):
    """One of several equal blocks runs once more."""

    def __init__(self) -> None:
        super().__init__()
        encoder = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4)]
        self.blocks, self.head = nn.ModuleList(encoder), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[2]]:
            x = block(x)
        return self.head(nn.functional.layer_norm(x, (8,)))


def test_a_layer_whose_parameters_are_all_shared_reads_its_arguments() -> None:
    """It is of the same class of the graph as layers with parameters of their own, which call torch's modules."""
    graph = capture(Repeated(), (torch.ones(4, 5, 8), torch.ones(4, 5, 8)), nn.functional.mse_loss)
    classes = {layer.name: layer.cls for layer in graph.layers}
    assert classes["blocks.2"] == classes["blocks.1"]
    texts = re.split(r"\nclass ", source(graph, data=2))
    (shared,) = (text for text in texts if text.startswith("TransformerEncoderLayer") and '"""blocks.2:' in text)
    (own,) = (text for text in texts if text.startswith("TransformerEncoderLayer") and '"""blocks.0' in text)
    assert "self.norm1(" in own and "self." not in shared


def test_no_input_has_a_name_that_emitted_code_uses() -> None:
    """The runtime passes inputs by name, so that emission can't rename them."""
    assert names._RESERVED <= batch._RESERVED
