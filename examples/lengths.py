"""Batches of several lengths under one plan: 512 and 1,024 tokens, in a program that was planned for 1,024.

A plan is for one shape. A shorter batch is padded on its right, where a causal model does not look, and the padding has the label -100,
which the mean over tokens leaves out: the loss and the gradients are those of the short batch. A padded row costs as much as a full one.

    python examples/lengths.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from eager import compared, train_on_one_device, windows
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

IGNORED = -100  # of transformers' losses, and of cross_entropy
ROWS, LENGTHS, LR = 4, (512, 1024), 1e-3


def padded(batch: Mapping[str, Tensor], rows: int, length: int) -> dict[str, Tensor]:
    """The batch with ``rows`` rows of ``length`` tokens, the new ones without a label, for causal models whose loss is a mean of labels."""
    filled = {}
    for name, tensor in batch.items():
        room = (0, length - tensor.shape[1], 0, rows - tensor.shape[0])
        if min(room) < 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and the plan is for ({rows}, {length})")
        filled[name] = F.pad(tensor, room, value=IGNORED if name == "labels" else 0)
    return filled


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def main() -> tuple[list[float], list[float]]:
    batches = [{n: t[:, :length] for n, t in windows(ROWS, 1024).items()} for length in LENGTHS * 3]
    example = padded(batches[0], ROWS, max(LENGTHS))
    with autopar.compile(build(), 2, example, lr=LR) as program:
        losses = [program.step(padded(batch, ROWS, max(LENGTHS))) for batch in batches]
    alone = train_on_one_device(build(), batches, LR)  # with the batches as they are
    print(compared(losses, alone))
    return losses, alone


if __name__ == "__main__":
    main()
