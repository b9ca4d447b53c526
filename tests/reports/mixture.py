"""The mixture of experts that is trained on limited nodes: a small Qwen3-MoE of transformers, whose experts have most of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from autopar.bench.models import BenchModel, token_loss

ROWS, LENGTH, VOCABULARY = 32, 128, 2048


def config(**options: Any) -> Qwen3MoeConfig:
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "moe_intermediate_size": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }
    return Qwen3MoeConfig(**{**sizes, **options})


def build() -> nn.Module:
    return Qwen3MoeForCausalLM(config())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_fn(output: Any, labels: Tensor) -> Tensor:
    return token_loss(output.logits, labels)


MODEL = BenchModel("mixture:MODEL", build, batch, loss_fn, ROWS, ROWS * LENGTH, config().num_hidden_layers)
