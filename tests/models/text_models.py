"""Models of text and of pairs, as people write them: each is awkward in a way of its own, and small.

A factory gives the model, its batch and its ``loss_fn`` (``None``: the model returns its loss), as ``exactness.MODELS`` wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SEQUENCE, VOCABULARY = 8, 16, 96

Factory = Callable[[], tuple[nn.Module, Any, Any]]


def random(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(seed: int = 1, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (ROWS, sequence), generator=random(seed))


def holed(labels: Tensor) -> Tensor:
    """Labels with -100 in some places: microbatches and slices then have different numbers of valid ones."""
    labels = labels.clone()
    labels[0, :9] = -100
    labels[3, 2:5] = -100
    return labels


def floats(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64)


def padding() -> Tensor:
    """True where a position is padding: no row is all padding."""
    lengths = torch.tensor([16, 11, 16, 9, 16, 5, 13, 16])
    return torch.arange(SEQUENCE) >= lengths[:, None]


# -- from transformers --------------------------------------------------------------------------------------------------


def t5() -> tuple[nn.Module, Any, Any]:
    """Encoder and decoder: one table of relative positions for all layers of each, one embedding in three places."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    batch = {"input_ids": ids(), "attention_mask": (~padding()).long(), "labels": holed(ids(2, 12))}
    return T5ForConditionalGeneration(config), batch, None


def qwen3() -> tuple[nn.Module, Any, Any]:
    """Norms over the head width of queries and keys, grouped heads, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config), {"input_ids": ids(), "labels": holed(ids())}, None


def bert_classes() -> tuple[nn.Module, Any, Any]:
    """Classification: the first position alone reaches the pooler and the loss."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=6,
    )
    batch = {
        "input_ids": ids(),
        "attention_mask": (~padding()).long(),
        "token_type_ids": (torch.arange(SEQUENCE) > 6).long().expand(ROWS, -1).contiguous(),
        "labels": torch.tensor([0, 5, 2, 3, 1, 1, 4, 2]),
    }
    return BertForSequenceClassification(config), batch, None


# -- from torch.nn -------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """nn.TransformerEncoder with a causal mask and padding, positions from a buffer, a loss over positions that count."""

    positions: Tensor

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.register_buffer("positions", torch.randn(1, SEQUENCE, width, generator=random()) * 0.1, persistent=False)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, tokens: Tensor, padded: Tensor, tags: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        x = self.encoder(x, mask=causal, src_key_padding_mask=padded, is_causal=True)
        logits = self.out(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1), "logits": logits}


def transformer_encoder() -> tuple[nn.Module, Any, Any]:
    tags = torch.randint(0, 10, (ROWS, SEQUENCE), generator=random(3))
    tags[padding()] = -1
    return Tagger(), (ids(), padding(), tags), None


class Towers(nn.Module):
    """Two inputs, two towers, two losses: pairs against all others of the batch, and a score for each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(
            nn.Embedding(VOCABULARY, 32),
            nn.Linear(32, 64),
            nn.ReLU(),
            nn.Linear(64, 16),
        )
        self.image = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.score = nn.Bilinear(16, 16, 1)

    def forward(self, query: Tensor, picture: Tensor, clicks: Tensor) -> tuple[Tensor, Tensor]:
        a = F.normalize(self.text(query).mean(1), dim=-1)
        b = F.normalize(self.image(picture), dim=-1)
        logits = self.scale.exp() * a @ b.T
        targets = torch.arange(len(query), device=query.device)
        contrastive = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        clicked = F.binary_cross_entropy_with_logits(self.score(a, b).squeeze(-1), clicks)
        return contrastive + 0.3 * clicked, logits


def two_towers() -> tuple[nn.Module, Any, Any]:
    clicks = (torch.rand(ROWS, generator=random(4)) > 0.5).double()
    return Towers(), {"query": ids(), "picture": floats(ROWS, 24), "clicks": clicks}, None


class ThreeUses(nn.Module):
    """One matrix as the embedding, as a projection in the middle, and as the head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.first = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        self.middle = nn.Linear(width, VOCABULARY, bias=False)
        self.last = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.middle.weight = self.embed.weight
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.first:
            x = x + torch.tanh(block(x))
        x = x + self.middle(x).softmax(-1) @ self.embed.weight
        for block in self.last:
            x = x + torch.tanh(block(x))
        return self.head(x)


def three_uses() -> tuple[nn.Module, Any, Any]:
    return ThreeUses(), (ids(), ids(5)), lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels)


def plain_mlp() -> tuple[nn.Module, Any, Any]:
    """An nn.Sequential of Linears, as the first page of every tutorial has it."""
    widths = [24, 64, 32, 64, 32, 10]
    parts: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(a, b), nn.ReLU()]
    classes = torch.tensor([0, 9, 2, 3, 7, 1, 4, 2])
    return nn.Sequential(*parts[:-1]), (floats(ROWS, 24), classes), nn.CrossEntropyLoss(label_smoothing=0.1)


class CharCNN(nn.Module):
    """Convolutions over characters, max-pooling over time, two highway layers, a class for each row with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(12, 16, kernel) for kernel in (2, 3, 5))
        self.highway = nn.ModuleList(nn.Linear(48, 96) for _ in range(2))
        self.out = nn.Linear(48, 5)
        self.register_buffer("weights", torch.tensor([1.0, 0.5, 2.0, 1.5, 0.1]))

    def forward(self, characters: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(characters).transpose(1, 2)
        x = torch.cat([F.relu(conv(x)).max(dim=-1).values for conv in self.convs], dim=-1)
        for layer in self.highway:
            gate, value = layer(x).chunk(2, dim=-1)
            gate = torch.sigmoid(gate)
            x = gate * F.relu(value) + (1 - gate) * x
        logits = self.out(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels, weight=self.weights), logits


def char_cnn() -> tuple[nn.Module, Any, Any]:
    return CharCNN(), {"characters": ids(), "labels": torch.tensor([0, 4, 2, 3, 1, 1, 4, 2])}, None


TEXT: dict[str, Factory] = {
    "t5": t5,
    "qwen3": qwen3,
    "bert classes": bert_classes,
    "transformer encoder": transformer_encoder,
    "two towers": two_towers,
    "three uses": three_uses,
    "plain mlp": plain_mlp,
    "char cnn": char_cnn,
}
