"""llama on 2 devices: a mesh of tensor 2.

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
import selective
import whole_tensors
from spec import LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec


class Embedding(nn.Module):
    """model.embed_tokens: tensor+sequence on tensor; ZeRO 0, recomputed in part."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(96, 16, **factory, dtype=torch.float64))  # S(1) on tensor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass, but for what is kept.
        return selective.selectively(self.compute, input_ids)

    def compute(self, input_ids: torch.Tensor) -> torch.Tensor:
        # input_ids (8, 16): R on tensor
        # model.embed_tokens
        embedding_s = spmd.all_to_all(F.embedding(input_ids, self.weight), "tensor", src=spmd.S(2), dst=spmd.S(1))
        return embedding_s


class LlamaDecoderLayer(nn.Module):
    """model.layers.0 to model.layers.3 (4 layers): tensor+sequence on tensor; ZeRO 0, recomputed in part."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Module()
        self.self_attn.q_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.self_attn.k_proj = nn.Module()
        self.self_attn.k_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.self_attn.v_proj = nn.Module()
        self.self_attn.v_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.self_attn.o_proj = nn.Module()
        self.self_attn.o_proj.weight = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # S(1) on tensor
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Module()
        self.mlp.gate_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.mlp.up_proj = nn.Module()
        self.mlp.up_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # S(0) on tensor
        self.mlp.down_proj = nn.Module()
        self.mlp.down_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # S(1) on tensor

    def forward(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass, but for what is kept.
        return selective.selectively(self.compute, x, constant_0, constant_1)

    def compute(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # x (8, 8, 32): S(1) on tensor
        # constant_0 (1, 1, 16, 4): R on tensor
        # constant_1 (1, 1, 16, 4): R on tensor
        # input_layernorm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        input_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.input_layernorm.weight, "tensor", src=spmd.I, dst=spmd.R))
        mul_1 = input_layernorm_weight_r * (x * rsqrt)
        del rsqrt, input_layernorm_weight_r
        # self_attn
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        linear, linear_1, linear_2 = selective.keep(
            kernels_overlap.linears,
            mul_1,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis="tensor", src=spmd.S(1),
        )
        view = kernels.reshape(linear, [8, 16, 4, 4], (None, None, "tensor", None))
        transpose = view.transpose(1, 2)
        view_1 = kernels.reshape(linear_1, [8, 16, 2, 4], (None, None, "tensor", None))
        transpose_1 = view_1.transpose(1, 2)
        view_2 = kernels.reshape(linear_2, [8, 16, 2, 4], (None, None, "tensor", None))
        cat = torch.cat([-transpose[..., 2:4], transpose[..., :2]], -1)
        cat_1 = torch.cat([-transpose_1[..., 2:4], transpose_1[..., :2]], -1)
        scaled_dot_product_attention = selective.keep(kernels.attention, transpose * constant_0 + cat * constant_1, transpose_1 * constant_0 + cat_1 * constant_1, view_2.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(8, 16, 16)
        del mul_1, linear, linear_1, linear_2, view, transpose, view_1, transpose_1, view_2, cat, cat_1, scaled_dot_product_attention
        # self_attn.o_proj
        linear_3_s = selective.keep(spmd.reduce_scatter, F.linear(reshape, self.self_attn.o_proj.weight), "tensor", src=spmd.P, dst=spmd.S(1))
        add_3 = x + linear_3_s
        del reshape, linear_3_s
        # post_attention_layernorm
        rsqrt_1 = torch.rsqrt(torch.pow(add_3, 2).mean([-1], keepdim=True) + 1e-06)
        post_attention_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.post_attention_layernorm.weight, "tensor", src=spmd.I, dst=spmd.R))
        mul_7 = post_attention_layernorm_weight_r * (add_3 * rsqrt_1)
        del rsqrt_1, post_attention_layernorm_weight_r
        # mlp
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        linear_4, linear_5 = selective.keep(
            kernels_overlap.linears,
            mul_7,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis="tensor", src=spmd.S(1),
        )
        del mul_7
        # mlp.down_proj
        linear_6 = F.linear(F.silu(linear_4) * linear_5, self.mlp.down_proj.weight)
        linear_6_s = spmd.reduce_scatter(linear_6, "tensor", src=spmd.P, dst=spmd.S(1))
        add_5 = add_3 + linear_6_s
        return add_5


class LlamaForCausalLMHead(nn.Module):
    """lm_head: tensor+sequence on tensor; ZeRO 0, recomputed in part."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.lm_head = nn.Module()
        self.lm_head.weight = nn.Parameter(torch.empty(48, 32, **factory, dtype=torch.float64))  # S(0) on tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass, but for what is kept.
        return selective.selectively(self.compute, x, labels, valid_labels)

    def compute(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # x (8, 8, 32): S(1) on tensor
        # labels (8, 16): R on tensor
        # valid_labels (): I on tensor
        # model.norm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        model_norm_weight_r = kernels.dense_gradient(spmd.convert(self.model.norm.weight, "tensor", src=spmd.I, dst=spmd.R))
        mul_1 = model_norm_weight_r * (x * rsqrt)
        del rsqrt, model_norm_weight_r
        # lm_head
        # backward: the reduce-scatter of the input's gradient runs while the weight's gradient is computed
        linear = selective.keep(
            kernels_overlap.linear,
            mul_1,
            self.lm_head.weight,
            axis="tensor", src=spmd.S(1),
        )
        del mul_1
        # LlamaForCausalLM
        cross_entropy_sum = kernels_vocab.vocab_parallel_cross_entropy_sum(linear, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], "tensor", ignore_index=-100, label_smoothing=0.0, partial_axes=())
        div = cross_entropy_sum / valid_labels
        return div


class Stage0(nn.Module):
    """model.embed_tokens to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
            "labels": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
        },
        scalars=("valid_labels",),
        loss={"tensor": spmd.I},
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("constant_0", constants["constant_0"], persistent=False)
        self.register_buffer("constant_1", constants["constant_1"], persistent=False)
        self.model_embed_tokens = Embedding(device=device)
        self.model_layers_0 = LlamaDecoderLayer(device=device)
        self.model_layers_1 = LlamaDecoderLayer(device=device)
        self.model_layers_2 = LlamaDecoderLayer(device=device)
        self.model_layers_3 = LlamaDecoderLayer(device=device)
        self.lm_head = LlamaForCausalLMHead(device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model_embed_tokens(input_ids)
        for layer in (self.model_layers_0, self.model_layers_1, self.model_layers_2, self.model_layers_3):
            hidden = layer(hidden, self.constant_0, self.constant_1)
        loss = self.lm_head(hidden, labels, valid_labels)
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
