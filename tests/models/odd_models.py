"""Models and kinds of plans in which nothing divides: heads, vocabularies and widths that no number of devices cuts evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 12


def tokens(vocabulary: int, sequence: int = 15) -> dict[str, Tensor]:
    """Labels are masked unevenly over rows; some are of the last word, which lies on the slice that is padded."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (ROWS, sequence), generator=generator)
    ids[:, 3] = vocabulary - 1
    labels = ids.clone()
    labels[0, :9] = -100
    labels[5, 2:5] = -100
    return {"input_ids": ids, "labels": labels}


def odd_gpt2() -> tuple[nn.Module, Any, Any]:
    """5 heads, a vocabulary of 97 shared by embedding and head, an inner width of 51, 33 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 96, "eos_token_id": 96}
    config = GPT2Config(
        n_embd=35, n_layer=3, n_head=5, n_inner=51, n_positions=33, vocab_size=97, use_cache=False, **none
    )
    return GPT2LMHeadModel(config), tokens(97), None


def odd_llama() -> tuple[nn.Module, Any, Any]:
    """9 heads in 3 groups, a vocabulary of 101, an inner width of 50."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=101,
        use_cache=False,
    )
    return LlamaForCausalLM(config), tokens(101), None


class Block(nn.Module):
    """Ops that do not keep zero: a sigmoid, and one key and value for all 7 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(28, 28), nn.Linear(28, 4), nn.Linear(28, 4)
        self.out, self.up, self.down = nn.Linear(28, 28), nn.Linear(28, 45), nn.Linear(45, 28)
        self.norm = nn.LayerNorm(28)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.query(x).view(b, s, 7, 4).transpose(1, 2)
        k, v = (part(x).view(b, s, 1, 4).transpose(1, 2).expand(b, 7, s, 4) for part in (self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.out(y.transpose(1, 2).reshape(b, s, 28)))
        return x + self.down(torch.sigmoid(self.up(x)))


class Gated(nn.Module):
    """Two such blocks, an embedding with a padding index, a head with a bias and a smoothed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 28, padding_idx=2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(28, 53)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.view(-1, 53), labels.view(-1), label_smoothing=0.1)


def gated() -> tuple[nn.Module, Any, Any]:
    return Gated(), tokens(53), None


class WithEmpty(nn.Module):
    """A parameter without elements, as of an adapter of rank 0, that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.down, self.up = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.zeros(8, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x + x @ self.down.T @ self.up.T)


def with_empty() -> tuple[nn.Module, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return WithEmpty(), (torch.randn(ROWS, 8, generator=generator), torch.arange(ROWS) % 4), nn.functional.cross_entropy


ODD: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "odd_gpt2": odd_gpt2,
    "odd_llama": odd_llama,
    "gated": gated,
    "with_empty": with_empty,
}
