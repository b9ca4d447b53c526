"""A mixture of experts (transformers' Mixtral) with expert parallelism: each of two processes has half of the experts of each layer.

python examples/moe.py
"""

from __future__ import annotations

import torch
from eager import compared, train_on_one_device, windows
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.plan import Role

LR = 1e-3


def build() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    module = MixtralForCausalLM(config).double()
    module.set_experts_implementation("eager")  # the one that runs in float64 on one device
    return module


def main() -> tuple[list[float], list[float], int]:
    data = windows(48, 32)
    batches = [{name: tensor[i : i + 8] for name, tensor in data.items()} for i in range(0, 48, 8)]
    with autopar.compile(build(), 2, batches[0], expert=2, lr=LR) as program:
        losses = program.train(batches)
        sharded = sum(Role.EXPERT in layer.strategy.roles for layer in program.plan.layers)
    alone = train_on_one_device(build(), batches, LR)
    print(f"{sharded} layers with expert parallelism; {compared(losses, alone)}")
    return losses, alone, sharded


if __name__ == "__main__":
    main()
