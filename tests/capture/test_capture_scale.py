"""Large models and long sequences: nothing of their size is allocated, and no mask is materialised."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture
from autopar.capture.evaluate import Evaluator
from autopar.capture.masks import classify_mask
from autopar.shard import annotate

transformers = pytest.importorskip("transformers")


def meta_llama(**changes: Any) -> nn.Module:
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def attention(graph: Any) -> list[fx.Node]:
    target = torch.ops.aten.scaled_dot_product_attention.default
    return [n for cls in graph.classes.values() for n in cls.graph.graph.nodes if n.target is target]


@pytest.mark.parametrize(("rows", "length"), [(1024, 8192), (8, 8), (1, 32), (4096, 4096)])
def test_llama_needs_no_mask(rows: int, length: int) -> None:
    start_s = time.perf_counter()
    graph = capture(meta_llama(num_hidden_layers=3), batch(rows, length), precision="bfloat16")
    print(f"3 layers of llama3-70b, batch {rows} x {length}: {time.perf_counter() - start_s:.2f} s")
    assert list(graph.classes) == ["Embedding", "LlamaDecoderLayer", "LlamaForCausalLMHead"]
    assert len(graph.layers) == 5
    (node,) = attention(graph)
    assert len(node.args) == 3 and node.kwargs["is_causal"] is True and node.kwargs["enable_gqa"] is True
    assert {tuple(c.shape) for c in graph.constants.values()} == {(1, 1, length, 128)}
    assert graph.dtype == torch.bfloat16 and graph.tokens == rows * length
    assert any("inv_freq has no values" in note for note in graph.notes)


def test_sliding_window_keeps_its_mask() -> None:
    """A window shorter than the sequence is no causal mask, whatever the batch's extent."""
    with torch.device("meta"):
        config = transformers.MistralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=100,
        )  # fmt: skip
        model = transformers.MistralForCausalLM(config)
    for rows in (4, 100):
        (node,) = attention(capture(model, batch(rows, 256)))
        assert len(node.args) == 4 and "is_causal" not in node.kwargs
    (node,) = attention(capture(model, batch(4, 64)))
    assert len(node.args) == 3 and node.kwargs["is_causal"] is True


def test_a_padded_long_batch_folds_no_square_table() -> None:
    ids = batch(16, 8192)
    ids["attention_mask"] = torch.ones_like(ids["input_ids"])
    graph = capture(meta_llama(num_hidden_layers=1), ids)
    assert max(c.numel() for c in graph.constants.values()) == 8192 * 128
    block = graph.classes["LlamaDecoderLayer"]
    assert [value.name for value in block.inputs] == ["attention_mask"]


Call = Callable[..., fx.Node]
aten = torch.ops.aten


def kind(comparison: Callable[[Call, fx.Node, fx.Node], fx.Node]) -> str | None:
    """The kind of a mask of 512 queries and keys; ``comparison`` gets a function that adds an op, and the positions of queries and keys."""
    graph = fx.Graph()
    gm = fx.GraphModule(nn.Module(), graph)

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values).to("meta")
        return node

    positions = call(aten.arange.default, 512)
    queries, keys = (call(aten.unsqueeze.default, positions, dim) for dim in (1, 0))
    mask = call(aten.expand.default, comparison(call, queries, keys), [8, 1, 512, 512])
    graph.output(mask)
    return classify_mask(Evaluator(gm, {}), mask)


@pytest.mark.parametrize(("offset", "expected"), [(0, "causal"), (1, None), (-200, None)])
def test_masks_are_told_apart(offset: int, expected: str | None) -> None:
    assert kind(lambda call, q, k: call(aten.le.Tensor, k, call(aten.add.Tensor, q, offset))) == expected


def test_a_square_of_a_distance_has_its_least_value_at_zero() -> None:
    def differ(call: Call, q: fx.Node, k: fx.Node) -> fx.Node:
        distance = call(aten.sub.Tensor, q, k)
        return call(aten.gt.Scalar, call(aten.mul.Tensor, distance, distance), 0)

    assert kind(differ) is None


class GroupLimited(nn.Module):
    """A router as DeepSeek-V3's: the two best of four groups of experts, by a mask that ``scatter_`` writes into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).flatten(0, 1).sigmoid()
        groups = scores.view(len(scores), 4, 8).amax(-1)
        kept = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=-1).indices, 1)
        return self.head(scores * kept.unsqueeze(-1).expand(-1, 4, 8).flatten(1)).sum()


def test_a_mask_that_is_written_into_zeros_admits_microbatches_at_any_size() -> None:
    """From 256 MB of zeros on they were kept as one tensor of the whole batch."""
    with torch.device("meta"):
        model, x = GroupLimited(), torch.zeros(1 << 13, 1 << 12, 64)
    assert annotate(capture(model, {"x": x})).unmicrobatchable == ""
