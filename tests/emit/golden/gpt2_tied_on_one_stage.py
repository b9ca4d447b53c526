"""gpt2 on 2 devices: a mesh of tensor 2.

A step takes 8 rows. Each device runs the layers below on its part of the rows.

On each axis of the mesh a tensor has a type, which comments and calls name: S(d) is a slice of dim d; R the same values everywhere, and
terms of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

model.py is the model, from its layers to PROGRAM at the end; train.py trains it:

    torchrun --nproc-per-node 2 train.py --dataset FILE

runtime.py is the trainer, plan.json the plan with its prices, layouts.json says what of the original parameters each device holds.
Written by autopar; yours to edit.
"""

from __future__ import annotations

from collections.abc import Callable

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn

import kernels
import kernels_overlap
import kernels_vocab
import local_group
import microbatches
import whole_tensors
from spec import LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec


class GPT2LMHeadModelEmbeddings(nn.Module):
    """transformer.wte: tensor on tensor; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wpe = nn.Module()
        self.transformer.wpe.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # S(0) on tensor

    def forward(self, input_ids: torch.Tensor, constant_0: torch.Tensor, transformer_wte_weight: torch.Tensor) -> torch.Tensor:
        # input_ids (8, 16): R on tensor
        # constant_0 (1, 16): R on tensor
        # transformer_wte_weight (48, 32): S(0) on tensor
        # transformer.wte
        embedding = kernels_vocab.masked_embedding(input_ids, transformer_wte_weight, axis="tensor")
        # transformer.wpe
        embedding_1 = kernels_vocab.masked_embedding(constant_0, self.transformer.wpe.weight, axis="tensor")
        # transformer
        add_i = spmd.all_reduce(embedding + embedding_1, "tensor", src=spmd.P, dst=spmd.I)
        return add_i


class GPT2Block(nn.Module):
    """transformer.h.0 to transformer.h.3 (4 layers): tensor on tensor; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.ln_1 = nn.Module()
        self.ln_1.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.ln_1.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.attn = nn.Module()
        self.attn.c_attn = nn.Module()
        self.attn.c_attn.weight = nn.Module()
        self.attn.c_attn.weight.part0 = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # S(1) on tensor
        self.attn.c_attn.bias = nn.Module()
        self.attn.c_attn.bias.part0 = nn.Parameter(torch.empty(16, **factory, dtype=torch.float64))  # S(0) on tensor
        self.attn.c_attn.weight.part1 = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # S(1) on tensor
        self.attn.c_attn.bias.part1 = nn.Parameter(torch.empty(16, **factory, dtype=torch.float64))  # S(0) on tensor
        self.attn.c_attn.weight.part2 = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # S(1) on tensor
        self.attn.c_attn.bias.part2 = nn.Parameter(torch.empty(16, **factory, dtype=torch.float64))  # S(0) on tensor
        self.attn.c_proj = nn.Module()
        self.attn.c_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.attn.c_proj.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.ln_2 = nn.Module()
        self.ln_2.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.ln_2.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Module()
        self.mlp.c_fc.weight = nn.Parameter(torch.empty(32, 64, **factory, dtype=torch.float64))  # S(1) on tensor
        self.mlp.c_fc.bias = nn.Parameter(torch.empty(64, **factory, dtype=torch.float64))  # S(0) on tensor
        self.mlp.c_proj = nn.Module()
        self.mlp.c_proj.weight = nn.Parameter(torch.empty(64, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.mlp.c_proj.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x (8, 16, 32): I on tensor
        # ln_1
        layer_norm = F.layer_norm(x, [32], self.ln_1.weight, self.ln_1.bias)
        # attn.c_attn
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        linear, linear_1, linear_2 = kernels_overlap.linears(
            layer_norm,
            [self.attn.c_attn.weight.part0.t(), self.attn.c_attn.weight.part1.t(), self.attn.c_attn.weight.part2.t()],
            [self.attn.c_attn.bias.part0, self.attn.c_attn.bias.part1, self.attn.c_attn.bias.part2],
            axis="tensor", src=spmd.I,
        )
        del layer_norm
        # attn
        view = kernels.reshape(linear_1, [8, 16, 2, 8], (None, None, "tensor", None))
        view_1 = kernels.reshape(linear_2, [8, 16, 2, 8], (None, None, "tensor", None))
        view_2 = kernels.reshape(linear, [8, 16, 2, 8], (None, None, "tensor", None))
        scaled_dot_product_attention = kernels.attention(view_2.transpose(1, 2), view.transpose(1, 2), view_1.transpose(1, 2), scale=0.3535533905932738, is_causal=True)
        del linear, linear_1, linear_2, view, view_1, view_2
        # attn.c_proj
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(8, 16, 16)
        linear_3_i = spmd.all_reduce(F.linear(reshape, self.attn.c_proj.weight.t()), "tensor", src=spmd.P, dst=spmd.I)
        add_4 = linear_3_i + self.attn.c_proj.bias + x
        del scaled_dot_product_attention, reshape, linear_3_i
        # ln_2
        layer_norm_1 = F.layer_norm(add_4, [32], self.ln_2.weight, self.ln_2.bias)
        # mlp.c_fc
        # backward: the all-reduce of the input's gradient runs while the weight's gradient is computed
        linear_4 = kernels_overlap.linear(
            layer_norm_1,
            self.mlp.c_fc.weight.t(),
            self.mlp.c_fc.bias,
            axis="tensor", src=spmd.I,
        )
        del layer_norm_1
        # mlp.act
        mul_2 = (linear_4 + torch.pow(linear_4, 3.0) * 0.044715) * 0.7978845608028654
        # mlp.c_proj
        linear_5 = F.linear(linear_4 * 0.5 * (torch.tanh(mul_2) + 1.0), self.mlp.c_proj.weight.t())
        linear_5_i = spmd.all_reduce(linear_5, "tensor", src=spmd.P, dst=spmd.I)
        add_9 = add_4 + (linear_5_i + self.mlp.c_proj.bias)
        return add_9


class GPT2LMHeadModelHead(nn.Module):
    """lm_head: tensor on tensor; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.ln_f = nn.Module()
        self.transformer.ln_f.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.transformer.ln_f.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor, transformer_wte_weight: torch.Tensor) -> torch.Tensor:
        # x (8, 16, 32): I on tensor
        # labels (8, 16): R on tensor
        # valid_labels (): I on tensor
        # transformer_wte_weight (48, 32): S(0) on tensor
        # transformer.ln_f
        layer_norm = F.layer_norm(x, [32], self.transformer.ln_f.weight, self.transformer.ln_f.bias)
        # lm_head
        # backward: the all-reduce of the input's gradient runs while the weight's gradient is computed
        linear = kernels_overlap.linear(layer_norm, transformer_wte_weight, axis="tensor", src=spmd.I)
        del layer_norm
        # GPT2LMHeadModel
        cross_entropy_sum = kernels_vocab.vocab_parallel_cross_entropy_sum(linear, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], "tensor", ignore_index=-100, label_smoothing=0.0, partial_axes=())
        div = cross_entropy_sum / valid_labels
        return div


class Stage0(nn.Module):
    """transformer.wte to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
            "labels": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
        },
        scalars=("valid_labels",),
        loss={"tensor": spmd.I},
        own=LayerSpec(zero=0, data_axes=()),  # of the parameters that several layers share
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("constant_0", constants["constant_0"], persistent=False)
        self.transformer_wte_weight = nn.Parameter(torch.empty(48, 32, device=device, dtype=torch.float64))  # S(0) on tensor
        self.transformer_wte = GPT2LMHeadModelEmbeddings(device=device)
        self.transformer_h_0 = GPT2Block(device=device)
        self.transformer_h_1 = GPT2Block(device=device)
        self.transformer_h_2 = GPT2Block(device=device)
        self.transformer_h_3 = GPT2Block(device=device)
        self.lm_head = GPT2LMHeadModelHead(device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer_wte(input_ids, self.constant_0, self.transformer_wte_weight)
        for layer in (self.transformer_h_0, self.transformer_h_1, self.transformer_h_2, self.transformer_h_3):
            hidden = layer(hidden)
        loss = self.lm_head(hidden, labels, valid_labels, self.transformer_wte_weight)
        return loss


def prelude(
    batch: dict[str, torch.Tensor],
    constants: dict[str, torch.Tensor],
    total: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Scalars of the whole global batch, such as its number of valid tokens."""
    pad = F.pad(batch["labels"], [0, 1], value=-100.0)
    slice_1 = pad[..., 1:17]
    ne = slice_1 != -100
    sum_1 = total(ne.sum())
    to = sum_1.to(torch.float64)
    return {"valid_labels": to}


PROGRAM = ProgramSpec(
    mesh={"tensor": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    schedule=microbatches.Microbatches,
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    local=local_group.LocalGroup,
    whole_tensors=whole_tensors.WholeTensors,
)
