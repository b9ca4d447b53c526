"""llama on 4 devices: a mesh of outer 2 x inner 2.

A step takes 8 rows. Each device runs the layers below on its part of the rows.

On each axis of the mesh a tensor has a type, which comments and calls name: S(d) is a slice of dim d; R the same values everywhere, and
terms of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

model.py is the model, from its layers to PROGRAM at the end; train.py trains it:

    torchrun --nproc-per-node 4 train.py --dataset FILE

runtime.py is the trainer, plan.json the plan with its prices, layouts.json says what of the original parameters each device holds.
Written by autopar; yours to edit.
"""

from __future__ import annotations

from collections.abc import Callable

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import flattened
import fsdp
import kernels
import kernels_overlap
import local_group
import microbatches
import publications
import whole_tensors
from spec import LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec


class Embedding(nn.Module):
    """model.embed_tokens: data on outer, data on inner; ZeRO 1."""

    SPEC = LayerSpec(zero=1, data_axes=("outer", "inner"))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(96, 32, **factory, dtype=torch.float64))  # R on outer, R on inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # input_ids (2, 16): S(0) on outer, S(0) on inner
        # model.embed_tokens
        embedding = F.embedding(input_ids, self.weight)
        return embedding


class LlamaDecoderLayer(nn.Module):
    """model.layers.0: data on outer, tensor on inner; ZeRO 3, recomputed."""

    SPEC = LayerSpec(zero=3, data_axes=("outer",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, I on inner
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Module()
        self.self_attn.q_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.self_attn.k_proj = nn.Module()
        self.self_attn.k_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.self_attn.v_proj = nn.Module()
        self.self_attn.v_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.self_attn.o_proj = nn.Module()
        self.self_attn.o_proj.weight = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # R on outer, S(1) on inner
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, I on inner
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Module()
        self.mlp.gate_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.mlp.up_proj = nn.Module()
        self.mlp.up_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.mlp.down_proj = nn.Module()
        self.mlp.down_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, S(1) on inner

    def forward(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, x, constant_0, constant_1, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # x (4, 16, 32): S(0) on outer, I on inner
        # constant_0 (1, 1, 16, 4): R on outer, R on inner
        # constant_1 (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        mul_1 = self.input_layernorm.weight * (x * rsqrt)
        del rsqrt
        # self_attn
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        linear, linear_1, linear_2 = kernels_overlap.linears(
            mul_1,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis="inner", src=spmd.I,
        )
        view = kernels.reshape(linear, [4, 16, 4, 4], ("outer", None, "inner", None))
        transpose = view.transpose(1, 2)
        view_1 = kernels.reshape(linear_1, [4, 16, 2, 4], ("outer", None, "inner", None))
        transpose_1 = view_1.transpose(1, 2)
        view_2 = kernels.reshape(linear_2, [4, 16, 2, 4], ("outer", None, "inner", None))
        cat = torch.cat([-transpose[..., 2:4], transpose[..., :2]], -1)
        cat_1 = torch.cat([-transpose_1[..., 2:4], transpose_1[..., :2]], -1)
        scaled_dot_product_attention = kernels.attention(transpose * constant_0 + cat * constant_1, transpose_1 * constant_0 + cat_1 * constant_1, view_2.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(4, 16, 16)
        del mul_1, linear, linear_1, linear_2, view, transpose, view_1, transpose_1, view_2, cat, cat_1, scaled_dot_product_attention
        # self_attn.o_proj
        linear_3_i = spmd.all_reduce(F.linear(reshape, self.self_attn.o_proj.weight), "inner", src=spmd.P, dst=spmd.I)
        add_3 = x + linear_3_i
        del reshape, linear_3_i
        # post_attention_layernorm
        rsqrt_1 = torch.rsqrt(torch.pow(add_3, 2).mean([-1], keepdim=True) + 1e-06)
        mul_7 = self.post_attention_layernorm.weight * (add_3 * rsqrt_1)
        del rsqrt_1
        # mlp
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        linear_4, linear_5 = kernels_overlap.linears(
            mul_7,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis="inner", src=spmd.I,
        )
        del mul_7
        # mlp.down_proj
        linear_6 = F.linear(F.silu(linear_4) * linear_5, self.mlp.down_proj.weight)
        linear_6_i = spmd.all_reduce(linear_6, "inner", src=spmd.P, dst=spmd.I)
        add_5 = add_3 + linear_6_i
        return add_5


class LlamaDecoderLayer_2(nn.Module):
    """model.layers.1: tensor on outer, tensor on inner; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=())

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on outer, I on inner
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Module()
        self.self_attn.q_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # S(0) on outer, S(0) on inner
        self.self_attn.k_proj = nn.Module()
        self.self_attn.k_proj.weight = nn.Parameter(torch.empty(4, 32, **factory, dtype=torch.float64))  # S(0) on outer, S(0) on inner
        self.self_attn.v_proj = nn.Module()
        self.self_attn.v_proj.weight = nn.Parameter(torch.empty(4, 32, **factory, dtype=torch.float64))  # S(0) on outer, S(0) on inner
        self.self_attn.o_proj = nn.Module()
        self.self_attn.o_proj.weight = nn.Parameter(torch.empty(32, 8, **factory, dtype=torch.float64))  # S(1) on outer, S(1) on inner
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on outer, I on inner
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Module()
        self.mlp.gate_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # S(0) on outer, S(0) on inner
        self.mlp.up_proj = nn.Module()
        self.mlp.up_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # S(0) on outer, S(0) on inner
        self.mlp.down_proj = nn.Module()
        self.mlp.down_proj.weight = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # S(1) on outer, S(1) on inner

    def forward(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # x (8, 16, 32): I on outer, I on inner
        # constant_0 (1, 1, 16, 4): R on outer, R on inner
        # constant_1 (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        mul_1 = self.input_layernorm.weight * (x * rsqrt)
        del rsqrt
        # self_attn
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        linear, linear_1, linear_2 = kernels_overlap.linears(
            mul_1,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis=("outer", "inner"), src=spmd.I,
        )
        view = kernels.reshape(linear, [8, 16, 2, 4], (None, None, ("outer", "inner"), None))
        transpose = view.transpose(1, 2)
        view_1 = kernels.reshape(linear_1, [8, 16, 1, 4], (None, None, ("outer", "inner"), None))
        transpose_1 = view_1.transpose(1, 2)
        view_2 = kernels.reshape(linear_2, [8, 16, 1, 4], (None, None, ("outer", "inner"), None))
        cat = torch.cat([-transpose[..., 2:4], transpose[..., :2]], -1)
        cat_1 = torch.cat([-transpose_1[..., 2:4], transpose_1[..., :2]], -1)
        scaled_dot_product_attention = kernels.attention(transpose * constant_0 + cat * constant_1, transpose_1 * constant_0 + cat_1 * constant_1, view_2.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(8, 16, 8)
        del mul_1, linear, linear_1, linear_2, view, transpose, view_1, transpose_1, view_2, cat, cat_1, scaled_dot_product_attention
        # self_attn.o_proj
        linear_3_i = flattened.all_reduce(F.linear(reshape, self.self_attn.o_proj.weight), ("outer", "inner"), src=spmd.P, dst=spmd.I)
        add_3 = x + linear_3_i
        del reshape, linear_3_i
        # post_attention_layernorm
        rsqrt_1 = torch.rsqrt(torch.pow(add_3, 2).mean([-1], keepdim=True) + 1e-06)
        mul_7 = self.post_attention_layernorm.weight * (add_3 * rsqrt_1)
        del rsqrt_1
        # mlp
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        linear_4, linear_5 = kernels_overlap.linears(
            mul_7,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis=("outer", "inner"), src=spmd.I,
        )
        del mul_7
        # mlp.down_proj
        linear_6 = F.linear(F.silu(linear_4) * linear_5, self.mlp.down_proj.weight)
        linear_6_i = flattened.all_reduce(linear_6, ("outer", "inner"), src=spmd.P, dst=spmd.I)
        add_5 = add_3 + linear_6_i
        return add_5


class LlamaDecoderLayer_3(nn.Module):
    """model.layers.2: data on outer, tensor+sequence on inner; ZeRO 2."""

    SPEC = LayerSpec(zero=2, data_axes=("outer",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, I on inner
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Module()
        self.self_attn.q_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.self_attn.k_proj = nn.Module()
        self.self_attn.k_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.self_attn.v_proj = nn.Module()
        self.self_attn.v_proj.weight = nn.Parameter(torch.empty(8, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.self_attn.o_proj = nn.Module()
        self.self_attn.o_proj.weight = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # R on outer, S(1) on inner
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, I on inner
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Module()
        self.mlp.gate_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.mlp.up_proj = nn.Module()
        self.mlp.up_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, S(0) on inner
        self.mlp.down_proj = nn.Module()
        self.mlp.down_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, S(1) on inner

    def forward(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 32): S(0) on outer, S(1) on inner
        # constant_0 (1, 1, 16, 4): R on outer, R on inner
        # constant_1 (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        input_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.input_layernorm.weight, "inner", src=spmd.I, dst=spmd.R))
        mul_1 = input_layernorm_weight_r * (x * rsqrt)
        del rsqrt, input_layernorm_weight_r
        # self_attn
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        linear, linear_1, linear_2 = kernels_overlap.linears(
            mul_1,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis="inner", src=spmd.S(1),
        )
        view = kernels.reshape(linear, [4, 16, 4, 4], ("outer", None, "inner", None))
        transpose = view.transpose(1, 2)
        view_1 = kernels.reshape(linear_1, [4, 16, 2, 4], ("outer", None, "inner", None))
        transpose_1 = view_1.transpose(1, 2)
        view_2 = kernels.reshape(linear_2, [4, 16, 2, 4], ("outer", None, "inner", None))
        cat = torch.cat([-transpose[..., 2:4], transpose[..., :2]], -1)
        cat_1 = torch.cat([-transpose_1[..., 2:4], transpose_1[..., :2]], -1)
        scaled_dot_product_attention = kernels.attention(transpose * constant_0 + cat * constant_1, transpose_1 * constant_0 + cat_1 * constant_1, view_2.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(4, 16, 16)
        del mul_1, linear, linear_1, linear_2, view, transpose, view_1, transpose_1, view_2, cat, cat_1, scaled_dot_product_attention
        # self_attn.o_proj
        linear_3_s = spmd.reduce_scatter(F.linear(reshape, self.self_attn.o_proj.weight), "inner", src=spmd.P, dst=spmd.S(1))
        add_3 = x + linear_3_s
        del reshape, linear_3_s
        # post_attention_layernorm
        rsqrt_1 = torch.rsqrt(torch.pow(add_3, 2).mean([-1], keepdim=True) + 1e-06)
        post_attention_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.post_attention_layernorm.weight, "inner", src=spmd.I, dst=spmd.R))
        mul_7 = post_attention_layernorm_weight_r * (add_3 * rsqrt_1)
        del rsqrt_1, post_attention_layernorm_weight_r
        # mlp
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        linear_4, linear_5 = kernels_overlap.linears(
            mul_7,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis="inner", src=spmd.S(1),
        )
        del mul_7
        # mlp.down_proj
        linear_6 = F.linear(F.silu(linear_4) * linear_5, self.mlp.down_proj.weight)
        linear_6_s = spmd.reduce_scatter(linear_6, "inner", src=spmd.P, dst=spmd.S(1))
        add_5 = add_3 + linear_6_s
        return add_5


class LlamaDecoderLayer_4(nn.Module):
    """model.layers.3: data on outer, data on inner; ZeRO 1."""

    SPEC = LayerSpec(zero=1, data_axes=("outer", "inner"))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Module()
        self.self_attn.q_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.self_attn.k_proj = nn.Module()
        self.self_attn.k_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.self_attn.v_proj = nn.Module()
        self.self_attn.v_proj.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.self_attn.o_proj = nn.Module()
        self.self_attn.o_proj.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Module()
        self.mlp.gate_proj.weight = nn.Parameter(torch.empty(64, 32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.mlp.up_proj = nn.Module()
        self.mlp.up_proj.weight = nn.Parameter(torch.empty(64, 32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.mlp.down_proj = nn.Module()
        self.mlp.down_proj.weight = nn.Parameter(torch.empty(32, 64, **factory, dtype=torch.float64))  # R on outer, R on inner

    def forward(self, x: torch.Tensor, constant_0: torch.Tensor, constant_1: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on outer, S(0) on inner
        # constant_0 (1, 1, 16, 4): R on outer, R on inner
        # constant_1 (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        mul_1 = self.input_layernorm.weight * (x * rsqrt)
        del rsqrt
        # self_attn
        view = kernels.reshape(F.linear(mul_1, self.self_attn.q_proj.weight), [2, 16, 8, 4], (("outer", "inner"), None, None, None))
        transpose = view.transpose(1, 2)
        view_1 = kernels.reshape(F.linear(mul_1, self.self_attn.k_proj.weight), [2, 16, 4, 4], (("outer", "inner"), None, None, None))
        transpose_1 = view_1.transpose(1, 2)
        view_2 = kernels.reshape(F.linear(mul_1, self.self_attn.v_proj.weight), [2, 16, 4, 4], (("outer", "inner"), None, None, None))
        cat = torch.cat([-transpose[..., 2:4], transpose[..., :2]], -1)
        cat_1 = torch.cat([-transpose_1[..., 2:4], transpose_1[..., :2]], -1)
        scaled_dot_product_attention = kernels.attention(transpose * constant_0 + cat * constant_1, transpose_1 * constant_0 + cat_1 * constant_1, view_2.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(2, 16, 32)
        add_3 = x + F.linear(reshape, self.self_attn.o_proj.weight)
        del mul_1, view, transpose, view_1, transpose_1, view_2, cat, cat_1, scaled_dot_product_attention, reshape
        # post_attention_layernorm
        rsqrt_1 = torch.rsqrt(torch.pow(add_3, 2).mean([-1], keepdim=True) + 1e-06)
        mul_7 = self.post_attention_layernorm.weight * (add_3 * rsqrt_1)
        del rsqrt_1
        # mlp
        mul_8 = F.silu(F.linear(mul_7, self.mlp.gate_proj.weight)) * F.linear(mul_7, self.mlp.up_proj.weight)
        add_5 = add_3 + F.linear(mul_8, self.mlp.down_proj.weight)
        return add_5


class LlamaForCausalLMHead(nn.Module):
    """lm_head: data on outer, data on inner; ZeRO 1."""

    SPEC = LayerSpec(zero=1, data_axes=("outer", "inner"))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on outer, R on inner
        self.lm_head = nn.Module()
        self.lm_head.weight = nn.Parameter(torch.empty(96, 32, **factory, dtype=torch.float64))  # R on outer, R on inner

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on outer, S(0) on inner
        # labels (2, 16): S(0) on outer, S(0) on inner
        # valid_labels (): R on outer, R on inner
        # model.norm
        rsqrt = torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        # lm_head
        linear = F.linear(self.model.norm.weight * (x * rsqrt), self.lm_head.weight)
        del rsqrt
        # LlamaForCausalLM
        cross_entropy_sum = kernels.cross_entropy_sum(linear, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], ignore_index=-100, label_smoothing=0.0, partial_axes=("outer", "inner"))
        div = cross_entropy_sum / valid_labels
        return div


class Stage0(nn.Module):
    """model.embed_tokens to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"outer": spmd.S(0), "inner": spmd.S(0)}),
            "labels": TensorSpec((8, 16), torch.int64, {"outer": spmd.S(0), "inner": spmd.S(0)}),
        },
        scalars=("valid_labels",),
        loss={"outer": spmd.P, "inner": spmd.P},
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("constant_0", constants["constant_0"], persistent=False)
        self.register_buffer("constant_1", constants["constant_1"], persistent=False)
        self.model_embed_tokens = Embedding(device=device)
        self.model_layers_0 = LlamaDecoderLayer(device=device)
        self.model_layers_1 = LlamaDecoderLayer_2(device=device)
        self.model_layers_2 = LlamaDecoderLayer_3(device=device)
        self.model_layers_3 = LlamaDecoderLayer_4(device=device)
        self.lm_head = LlamaForCausalLMHead(device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model_embed_tokens(input_ids)
        hidden_2 = spmd.all_gather(hidden, "inner", src=spmd.S(0), dst=spmd.I)
        hidden = self.model_layers_0(hidden_2, self.constant_0, self.constant_1)
        hidden_3 = spmd.all_gather(hidden, "outer", src=spmd.S(0), dst=spmd.I)
        hidden = self.model_layers_1(hidden_3, self.constant_0, self.constant_1)
        hidden_4 = spmd.convert(hidden, "outer", src=spmd.I, dst=spmd.S(0))
        hidden_4_2 = spmd.convert(hidden_4, "inner", src=spmd.I, dst=spmd.S(1))
        hidden = self.model_layers_2(hidden_4_2, self.constant_0, self.constant_1)
        hidden_5 = spmd.all_to_all(hidden, "inner", src=spmd.S(1), dst=spmd.S(0))
        hidden = self.model_layers_3(hidden_5, self.constant_0, self.constant_1)
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
    mesh={"outer": 2, "inner": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    schedule=microbatches.Microbatches,
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    flattened=(("outer", "inner"),),
    local=local_group.LocalGroup,
    fsdp=fsdp.ShardedGroup,
    publications=publications.Publications,
    whole_tensors=whole_tensors.WholeTensors,
)
