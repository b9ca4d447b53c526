"""A Llama of transformers, built from a config, trains on two processes with tensor parallelism.

python examples/llama.py
"""

from __future__ import annotations

import torch
from eager import compared, train_on_one_device, windows
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

LR = 1e-3
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    use_cache=False,
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).double()


def main() -> tuple[list[float], list[float]]:
    data = windows(64, 32)
    batches = [{name: tensor[i : i + 8] for name, tensor in data.items()} for i in range(0, 64, 8)]
    with autopar.compile(build(), 2, batches[0], tensor=2, lr=LR) as program:
        losses = program.train(batches)
    alone = train_on_one_device(build(), batches, LR)
    print(compared(losses, alone))
    return losses, alone


if __name__ == "__main__":
    main()
