"""Captured models equal eager: the layers' graphs, run in turn, give the same loss and the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import slow
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from workers import WorkerPool

from autopar.capture import Float64Everywhere, capture, check_capture, flatten_batch, opaque
from autopar.capture.reference import run
from autopar.graph import Graph
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import check_plan, make_subject

transformers = pytest.importorskip("transformers")

BATCH, SEQ, VOCAB = 4, 16, 96
TINY = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def labels() -> torch.Tensor:
    found = ids()
    found[0, :5] = -100
    found[3, 9:] = -100
    return found


def padding() -> torch.Tensor:
    return (torch.arange(SEQ) < torch.tensor([[SEQ], [12], [9], [SEQ]])).long()


def language() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "labels": labels()}


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_hidden_layers=3, num_key_value_heads=2))


def bert(dropout: float = 0.0) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            **TINY, num_hidden_layers=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
    )


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


class Block(nn.Module):
    """A residual block of two convolutions, with in-place ReLU and addition."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Conv2d(channels, out, 1, stride, bias=False) if (channels, stride) != (out, 1) else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.stage1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.stage2 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))


class Loop(nn.Module):
    """A hand-written GPT: fused qkv, a mask in a buffer, blocks without a forward of their own, ``(logits, loss)``."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(SEQ, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}
            )
            for _ in range(depth)
        )
        self.register_buffer("mask", torch.ones(SEQ, SEQ).tril().view(1, 1, SEQ, SEQ))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, s = x.shape
        z = self.tokens(x) + self.positions(torch.arange(s))
        for block in self.blocks:
            q, k, v = (
                t.view(b, s, 4, -1).transpose(1, 2) for t in block["qkv"](block["norm"](z)).split(z.shape[-1], dim=2)
            )
            scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:, :, :s, :s] == 0, float("-inf"))
            z = z + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, s, -1))
        logits = self.head(z)
        return logits, F.cross_entropy(logits.view(-1, VOCAB), y.view(-1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(VOCAB, 16),
            nn.LSTM(16, 16, 2, batch_first=True),
            nn.Linear(16, VOCAB),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(x))[0])


class Odd(nn.Module):
    """What cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y.tanh()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def pair(width_in: int, width_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(6, width_in, generator=g).double(), torch.randn(6, width_out, generator=g).double()


def images(size: int) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(2)).double()


CLASSES = torch.tensor([0, 1, 1, 0])


def eager_loss(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    if loss_fn is not None:
        return loss_fn(model(batch[0]), batch[1])
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    return output[1] if isinstance(output, tuple) else output.loss


def assert_equals_eager(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None = None, seed: int | None = None
) -> Graph:
    """Capture, run both, compare loss and every gradient; the model comes out as it went in."""
    model = model.double().train()
    before = copy.deepcopy(model.state_dict())
    graph = capture(model, batch, loss_fn, precision="float64")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    torch.manual_seed(seed or 0)
    expected = eager_loss(model, batch, loss_fn)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.manual_seed(seed or 0)
    loss = run(graph, parameters, flatten_batch(graph.structure, batch))
    loss.backward()
    assert loss.dtype == expected.dtype and abs(loss - expected) <= 1e-12 * abs(expected)
    largest = max(g.abs().max() for g in gradients.values())
    for name, gradient in gradients.items():
        found = parameters[name].grad
        assert found is not None, name
        assert (found - gradient).abs().max() <= 1e-12 * max(gradient.abs().max(), 1e-6 * largest), name
    return graph


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Any] | None, int, int]] = {
    # model, batch, loss_fn, layers, classes
    "mlp": (mlp, lambda: pair(8, 4), F.mse_loss, 2, 2),
    "gpt2": (gpt2, language, None, 5, 3),
    "llama": (llama, language, None, 5, 3),
    "llama padded": (llama, lambda: language() | {"attention_mask": padding()}, None, 5, 3),
    "bert": (bert, language, None, 5, 3),
    "bert padded": (bert, lambda: language() | {"attention_mask": padding()}, None, 5, 3),
    "t5": (t5, language, None, 7, 7),
    "vit": (vit, lambda: {"pixel_values": images(16), "labels": CLASSES}, None, 4, 3),
    "resnet": (ResNet, lambda: (images(8), CLASSES), F.cross_entropy, 6, 5),
    "loop": (Loop, lambda: (ids(), ids()), None, 5, 3),
    "lstm": (Recurrent, lambda: (ids(), ids()), lambda o, t: F.cross_entropy(o.transpose(1, 2), t), 3, 3),
    "opaque": (
        lambda: nn.Sequential(nn.Linear(8, 16), opaque(Odd()), nn.Linear(16, 4)),
        lambda: pair(8, 4),
        F.mse_loss,
        3,
        3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_eager(case: str) -> None:
    torch.manual_seed(0)
    factory, batch, loss_fn, layers, classes = CASES[case]
    graph = assert_equals_eager(factory(), batch(), loss_fn)
    assert (len(graph.layers), len(graph.classes)) == (layers, classes)


@pytest.mark.parametrize("factory", [gpt2, bert])
def test_dropout_draws_what_eager_draws(factory: Callable[[float], nn.Module]) -> None:
    torch.manual_seed(0)
    graph = assert_equals_eager(factory(0.2), language(), seed=7)
    ops = {str(node.target) for cls in graph.classes.values() for node in cls.graph.graph.nodes}
    assert "aten.dropout.default" in ops


@pytest.mark.parametrize("factory", [gpt2, llama])
def test_whole_float64(factory: Callable[[], nn.Module]) -> None:
    """Nothing is rounded to float32 in between, in eager and in the graph alike."""
    torch.manual_seed(0)
    model = factory()
    with Float64Everywhere():
        graph = assert_equals_eager(model, language())
    values = [
        node.meta["val"] for cls in graph.classes.values() for node in cls.graph.graph.nodes if "val" in node.meta
    ]
    assert values and all(v.dtype != torch.float32 for v in values)


class Seeing(TorchFunctionMode):
    """Counts what it sees: every call, and every look at a tensor's shape or dtype."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_see_the_models_own_calls_and_not_what_is_made_of_them() -> None:
    at: dict[str, int] = {}
    with Seeing() as mode:
        how: dict[str, Any] = {"precision": "float64", "progress": lambda stage: at.update({stage: mode.seen})}
        graph = capture(nn.Linear(8, 4), pair(8, 4), F.mse_loss, **how)
        assert at["export"] < at["clean"] == at["segment"]
        seen = mode.seen
        annotate(graph)
        assert mode.seen == seen


class Counted(nn.Module):
    """Tensors of the default dtype that a forward makes of numbers, and a table computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.log(torch.tensor((1.0, 2.0, 4.0, 8.0))).round().long()
        return self.linear(x) * steps / torch.tensor(3.0)


def test_constants_of_the_default_dtype_keep_it() -> None:
    torch.manual_seed(0)
    with Float64Everywhere():
        assert_equals_eager(Counted(), pair(8, 4), F.mse_loss)


def test_mixtral_keeps_its_loss() -> None:
    """In float32: transformers' expert kernels take no float64."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TINY, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    graph = capture(model, language())
    found = run(graph, dict(model.named_parameters()), flatten_batch(graph.structure, language()))
    torch.testing.assert_close(found, model(**language()).loss)
    assert list(graph.classes) == ["Embedding", "MixtralDecoderLayer", "MixtralForCausalLMHead"]


def test_every_border_is_described() -> None:
    graph = capture(t5(), language(), precision="float64")
    for layer in graph.layers:
        cls = graph.classes[layer.cls]
        values = (*cls.activations, *cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
        nodes = list(cls.graph.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        assert [n.meta["val"].shape for n in placeholders] == [v.shape for v in values]
        assert [n.name for n in placeholders] == [n.target for n in placeholders]
        assert all(n.meta["val"].is_meta for n in nodes if n.op == "call_function")
        for name, value in zip(layer.activations, cls.activations, strict=True):
            assert graph.values[name].shape == value.shape and graph.values[name].requires_grad == value.requires_grad
        for name, value in zip(layer.parameters, cls.parameters, strict=True):
            assert graph.parameters[name].shape == value.shape
    assert graph.values[graph.loss].shape == ()
    encoder_output = next(layer.outputs[0] for layer in graph.layers if layer.cls.endswith("Bridge"))
    readers = [layer.name for layer in graph.layers if encoder_output in layer.activations]
    assert readers == ["decoder.block.0", "decoder.block.1"]


def test_tied_and_fused_parameters() -> None:
    graph = capture(gpt2(), language())
    assert graph.parameters["transformer.wte.weight"].tied == ("lm_head.weight",)
    assert graph.shared_parameters == {"transformer.wte.weight": (0, 4)}
    parts = [p for p in graph.parameters.values() if p.original == "transformer.h.0.attn.c_attn.weight"]
    assert [(p.name.rsplit(".", 1)[1], p.dim, p.start, p.shape) for p in parts] == [
        ("part0", 1, 0, (32, 32)),
        ("part1", 1, 32, (32, 32)),
        ("part2", 1, 64, (32, 32)),
    ]


def test_sequence_losses_are_sums_over_a_prelude_count() -> None:
    batch = language()
    graph = capture(gpt2(), batch)
    assert [value.name for value in graph.scalars] == ["valid_labels"]
    assert graph.prelude is not None
    (count,) = graph.prelude(*flatten_batch(graph.structure, batch).values())
    assert count == (batch["labels"][:, 1:] != -100).sum()
    assert graph.tokens == BATCH * SEQ and graph.batch_size == BATCH


def test_batch_norm_forbids_microbatches() -> None:
    graph = capture(ResNet(), (images(8).float(), CLASSES), F.cross_entropy)
    assert "batch norm couples the batch, first in stage1.0.bn1 (" in graph.unmicrobatchable
    assert {name.rpartition(".")[2] for name in graph.buffers} == {"running_mean", "running_var", "num_batches_tracked"}
    narrow = capture(ResNet(), (images(8).float(), CLASSES), F.cross_entropy, precision="bfloat16")
    kept = {buffer.dtype for name, buffer in narrow.buffers.items() if "running" in name}
    assert narrow.dtype == torch.bfloat16 and kept == {torch.float32}  # they move by less than bfloat16 tells apart
    assert capture(mlp(), pair(8, 4), F.mse_loss, precision="float64").unmicrobatchable == ""


def documents() -> dict[str, torch.Tensor]:
    """Two documents in every row, of other lengths in each."""
    lengths = [1 + 3 * row for row in range(language()["input_ids"].shape[0])]
    length = language()["input_ids"].shape[1]
    rows = [torch.cat([torch.arange(n % length), torch.arange(length - n % length)]) for n in lengths]
    return language() | {"position_ids": torch.stack(rows)}


@pytest.mark.parametrize("use_cache", [True, slow(False)])
def test_documents_are_separated_as_transformers_does(use_cache: bool) -> None:
    torch.manual_seed(0)
    model = llama()
    model.config.use_cache = use_cache
    graph = capture(model, documents())
    assert "equals the model over two steps" in check_capture(graph, model, documents(), None).note
    assert any("use_cache is on" in sentence for sentence in graph.notes) is use_cache


@pytest.mark.parametrize("options", [{"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
def test_programs_for_documents_are_exact(options: dict[str, Any], workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    model = llama()
    model.config.use_cache = False
    subject = make_subject(model, documents())
    assert check_plan(subject, manual_plan(subject.graph, **options), workers2).error.exact
