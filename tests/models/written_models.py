"""Models as people write them: small modules, each with habits that a parallelizer could trip over.

Dict, tuple and dataclass outputs, optional arguments, buffers, frozen and unused parameters, losses with denominators of their
own, in-place ops, einsum, ``where`` masks, checkpointed blocks, modules called twice, weights used by functional calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mixture_styles
import torch
import torch.nn.functional as F
from text_models import ROWS, SEQUENCE, VOCABULARY, Factory, floats, holed, ids, padding, random
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES = torch.tensor([0, 4, 2, 3, 1, 1, 4, 2])


class Block(nn.Module):
    """Attention and a feed-forward in einsum, ``where`` and in-place ops; the fused projection's weight is read directly."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        fused = torch.einsum("btc,dc->btd", self.norm1(x), self.qkv.weight).add_(self.qkv.bias)
        q, k, v = (part.view(b, t, self.heads, c // self.heads) for part in fused.chunk(3, -1))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / (c // self.heads) ** 0.5
        weights = torch.where(mask[:t, :t], scores, torch.full_like(scores, torch.finfo(x.dtype).min)).softmax(-1)
        x = x + self.out(torch.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, c))
        y = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        y *= 1.5
        return x + self.down(y)


class EinsumGPT(nn.Module):
    """Checkpointed blocks, a frozen table, a mask that is not saved, a module that nothing uses, an optional loss masked by hand."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(torch.randn(1, SEQUENCE, 32) * 0.02, requires_grad=False)
        self.register_buffer("mask", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril(), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.unused = nn.LayerNorm(32), nn.Linear(4, 4)
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, *, key: Tensor | None = None, scale: float = 1
    ) -> Any:
        x = self.tokens(idx) + self.positions[:, : idx.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, self.mask, use_reentrant=False)
        logits, loss = self.head(self.norm(x)) * scale, None
        if targets is not None and key is not None:
            each = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), reduction="none")
            counted = key.view(-1).to(each.dtype)
            loss = (each * counted).sum() / counted.sum()
        return logits, loss


def masked_by_hand() -> tuple[nn.Module, Any, Any]:
    """The mask is called ``key``: a tensor of the user's may have a name that the program uses itself."""
    return EinsumGPT(), {"idx": ids(), "targets": ids(2), "key": ~padding()}, None


@dataclasses.dataclass
class Scored:
    features: Tensor
    loss: Tensor
    calls: int


class ThreeLosses(nn.Module):
    """A module called twice, a target without gradient, three losses with their own denominators, a trained weight of one of them,
    and a penalty on every parameter, which is the same in all microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.classes, self.place = nn.Linear(16, 5), nn.Linear(16, 3)
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, other: Tensor, kind: Tensor, target: Tensor, losses: Tensor) -> Scored:
        a, b = self.encoder(x), self.encoder(other)
        with torch.no_grad():
            wanted = b.softmax(-1)
        alike = -(wanted * a.log_softmax(-1)).sum(-1).mean()
        named = F.cross_entropy(self.classes(a), kind, ignore_index=-1)
        far = ((self.place(b) - target).pow(2).sum(-1) * losses).sum() / losses.sum().clamp(min=1)
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return Scored(a, alike + 0.5 * named + self.weight * far + 1e-3 * penalty, 2)


def several_losses() -> tuple[nn.Module, Any, Any]:
    kind = torch.tensor([0, -1, 2, 3, -1, -1, 4, 2])
    valid = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 1], dtype=torch.float64)
    batch = {"x": floats(ROWS, 16), "other": floats(ROWS, 16, seed=2), "kind": kind, "losses": valid}
    return ThreeLosses(), batch | {"target": floats(ROWS, 3, seed=3)}, None


class TwoHeads(nn.Module):
    """A dict of outputs, with what is no tensor among them; ReLU in place, both ways of writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.places, self.classes = nn.Linear(32, 4), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.relu_(self.second(F.relu(self.first(x), inplace=True)))
        return {"places": self.places(h), "classes": self.classes(h), "extra": [3, None]}


def losses_in_a_dict() -> tuple[nn.Module, Any, Any]:
    def loss_fn(output: Any, target: Any) -> Any:
        losses = {
            "places": F.smooth_l1_loss(output["places"], target["places"]),
            "classes": F.cross_entropy(output["classes"], target["classes"], label_smoothing=0.1),
        }
        return sum(losses.values())

    return TwoHeads(), (floats(ROWS, 16), {"places": floats(ROWS, 4), "classes": CLASSES}), loss_fn


def losses_in_a_list() -> tuple[nn.Module, Any, Any]:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        uniform = torch.full_like(output["classes"], 1 / 5)
        divergence = F.kl_div(output["classes"].log_softmax(-1), uniform, reduction="batchmean")
        return torch.stack(
            [((output["places"] - target) ** 2).mean(), output["classes"].abs().mean(), divergence]
        ).sum()

    return TwoHeads(), (floats(ROWS, 16), floats(ROWS, 4)), loss_fn


class Functional(nn.Module):
    """Bare parameters in lists and dicts, one weight used both ways round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 32) * 0.2), nn.Parameter(torch.zeros(32))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(2)])
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(8, 16) * 0.2)})

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight + self.bias) @ self.weight.t()
        h = h * self.scales[0] + self.scales[1]
        return F.linear(h / (1e-3 + h.norm(dim=-1, keepdim=True)), self.named["out"])


def functional() -> tuple[nn.Module, Any, Any]:
    return Functional(), (floats(ROWS, 6, 16), floats(ROWS, 6, 8)), nn.MSELoss()


class Frozen(nn.Module):
    """A backbone without gradients under a head that learns; several labels for each row, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).requires_grad_(False)
        self.head = nn.Linear(64, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            features = self.backbone(x)
        logits = self.head(features)
        loss = F.binary_cross_entropy_with_logits(logits, y, pos_weight=self.weights)
        return {"loss": loss, "mean": logits.sigmoid().mean().detach()}


def frozen_backbone() -> tuple[nn.Module, Any, Any]:
    return Frozen(), (floats(ROWS, 16), (floats(ROWS, 4) > 0).double()), None


class Adapted(nn.Module):
    """Low-rank adapters beside frozen layers: the gradient passes through what is not trained."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(16, 16).requires_grad_(False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(16, 2, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2, 16, bias=False) for _ in range(depth))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + torch.relu(layer(x) + up(down(x)))
        return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def adapters() -> tuple[nn.Module, Any, Any]:
    return Adapted(), {"tokens": ids(), "labels": holed(ids())}, None


class Pairs(nn.Module):
    """Nothing but a contrastive loss: every row is scored against all rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones([]) * 2.6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.left(x), self.right(y)
        a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
        scores = self.scale.exp() * a @ b.t()
        own = torch.arange(len(x))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2


def contrastive() -> tuple[nn.Module, Any, Any]:
    return Pairs(), (floats(ROWS, 16), floats(ROWS, 12)), None


class DeeplySupervised(nn.Module):
    """Every layer adds a loss of its own, and the losses travel to the end in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        layer = {"dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **layer) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, losses = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            losses.append(x.pow(2).mean())
        losses.append(F.cross_entropy(self.head(x).transpose(1, 2), labels))
        return torch.stack(losses).mean()


def deeply_supervised() -> tuple[nn.Module, Any, Any]:
    return DeeplySupervised(), {"tokens": ids(), "labels": holed(ids())}, None


class Tables(nn.Module):
    """Integer buffers and arithmetic, one-hot, gather and cumulative sums; the batch is one tuple; token weights by hand."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, 12, (VOCABULARY,), generator=random(9)))
        self.embed, self.out = nn.Embedding(12, 16), nn.Linear(16, 12)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, weights = inputs
        kinds = self.table[tokens]
        x = self.embed(kinds) * (tokens % 2 == 0).unsqueeze(-1) + torch.cumsum(self.embed(kinds.flip(1)), 1) * 0.1
        scores = self.out(torch.tanh(x)).log_softmax(-1)
        each = -scores.gather(-1, kinds.unsqueeze(-1)).squeeze(-1)
        hits = (F.one_hot(kinds, 12) * scores).sum()
        return (each * weights).sum() / weights.sum() - 1e-3 * hits / tokens.numel()


def token_weights() -> tuple[nn.Module, Any, Any]:
    return Tables(), ((ids(), floats(ROWS, SEQUENCE).abs()),), None


class Unrolled(nn.Module):
    """A recurrence written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(VOCABULARY, 8), nn.GRUCell(8, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h, outputs = torch.zeros(len(tokens), 16, dtype=self.out.weight.dtype, device=tokens.device), []
        for t in range(3):
            h = self.cell(self.embed(tokens[:, t]), h)
            outputs.append(self.out(h))
        return F.cross_entropy(torch.stack(outputs, 1).flatten(0, 1), labels[:, :3].flatten())


def unrolled() -> tuple[nn.Module, Any, Any]:
    return Unrolled(), (ids(), ids(3)), None


class Relative(nn.Module):
    """Scores against positions that all rows share, one key head for all queries under a bias, a matrix before a batch, and the last
    token of each row that is not padding."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * SEQUENCE, width)
        self.query, self.key, self.place = (nn.Linear(width, width) for _ in range(3))
        self.one_key, self.one_value = nn.Linear(width, width // heads), nn.Linear(width, width // heads)
        self.mix = nn.Parameter(torch.randn(SEQUENCE, SEQUENCE, generator=random(7)) * 0.1)
        self.out, self.classify = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, tokens: Tensor, padded: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(y.shape[0], y.shape[1], -1, width // self.heads).transpose(1, 2)

        query, key = split(self.query(x)), split(self.key(x))
        distances = torch.arange(t)[:, None] - torch.arange(t) + t
        place = split(self.place(self.positions.weight)[None])
        scores = query @ key.mT + (query @ place.mT).gather(-1, distances.expand(b, self.heads, t, t))
        mixed = scores.softmax(-1) @ split(x)
        bias = -0.1 * (distances - t).abs() * torch.arange(1, self.heads + 1)[:, None, None]
        one = F.scaled_dot_product_attention(
            query, split(self.one_key(x)), split(self.one_value(x)), attn_mask=bias[None].to(x.dtype)
        )
        x = x + self.out((mixed + one).transpose(1, 2).reshape(b, t, width))
        x = x + torch.tanh(self.mix @ x)
        last = torch.where(padded, -1, torch.arange(t)).argmax(-1)
        scores = self.classify(x[torch.arange(b), last]).log_softmax(-1)
        return -scores[torch.arange(b), labels].mean()


def relative() -> tuple[nn.Module, Any, Any]:
    return Relative(), (ids(), padding(), CLASSES), None


class ParallelBlock(nn.Module):
    """Attention and a feed-forward that read one norm's result and are added together, as in GPT-J and PaLM."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        return x + self.out(mixed) + self.down(F.gelu(self.up(y)))


class ParallelBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(ParallelBlock() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def parallel_blocks() -> tuple[nn.Module, Any, Any]:
    return ParallelBlocks(), (ids(), holed(ids())), None


class ScaledBlock(nn.Module):
    """Two products of one value, one of them with a bias that is computed, and a factor that all blocks share."""

    def __init__(self, alpha: nn.Parameter) -> None:
        super().__init__()
        self.alpha, self.scale = alpha, nn.Parameter(torch.ones(()))
        self.gate, self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        up = F.linear(x, self.up.weight, self.up.bias * self.scale)
        return x + self.alpha * self.down(torch.sigmoid(self.gate(x)) * up)


class Ordinal(nn.Module):
    """Inputs with names that programs use, comparisons of comparisons, slices of a ``Sequential``, one score with many thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.alpha = nn.Embedding(VOCABULARY, 32), nn.Parameter(torch.tensor(0.1))
        blocks = nn.Sequential(*(ScaledBlock(self.alpha) for _ in range(4)))
        self.early, self.late = blocks[:2], blocks[2:]
        self.score, self.thresholds = nn.Linear(32, 1, bias=False), nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, range: Tensor, levels_: Tensor, total: Tensor) -> Tensor:
        shown = range != 0
        x = self.tokens(range).masked_fill((shown == 0).unsqueeze(-1), 0.0)
        x = self.late(self.early(x)).mean(1)
        logits = self.score(x) + self.thresholds
        above = (levels_.unsqueeze(1) > torch.arange(4)) == (total > 0).unsqueeze(1)
        losses = F.binary_cross_entropy_with_logits(logits, above.to(logits.dtype), reduction="none").sum(1)
        count = (total > 0).sum()
        return (losses * (total > 0)).sum() / count + self.thresholds.square().mean(dim=None, keepdim=True).sum()


def ordinal() -> tuple[nn.Module, Any, Any]:
    return Ordinal(), (ids(), torch.arange(ROWS) % 5, torch.arange(ROWS) % 3), None


WRITTEN: dict[str, Factory] = {
    "masked by hand": masked_by_hand,
    "several losses": several_losses,
    "losses in a dict": losses_in_a_dict,
    "losses in a list": losses_in_a_list,
    "functional": functional,
    "frozen backbone": frozen_backbone,
    "adapters": adapters,
    "contrastive": contrastive,
    "deeply supervised": deeply_supervised,
    "token weights": token_weights,
    "unrolled": unrolled,
    "relative": relative,
    "parallel blocks": parallel_blocks,
    "ordinal": ordinal,
    "listed experts": mixture_styles.STYLES["nanogpt_fused"],
}
