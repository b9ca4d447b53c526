"""llama on 4 devices: a mesh of outer 2 x inner 2.

A step takes 8 rows. Each device runs the layers below on its part of the rows.
Comments and calls name the type of a tensor on each axis of the mesh: S(d) is a slice of dim d; R the same values everywhere, and terms
of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

    torchrun --nproc-per-node 4 train.py --dataset FILE

trains PROGRAM, at the end of this file, with the trainer in runtime/. plan.json is the plan with its prices, and layouts.json says what of
the original parameters each device holds. Written by autopar; yours to edit.
"""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime import flattened, fsdp, kernels, kernels_overlap, microbatches, whole_tensors
from runtime.spec import Layer, LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec, Tensors, Total


class Embedding(Layer):
    """model.embed_tokens: data on outer, data on inner; ZeRO 1."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(96, 32, **factory, dtype=torch.float64))  # R on outer, R on inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # input_ids (2, 16): S(0) on outer, S(0) on inner
        return F.embedding(input_ids, self.weight)


class LlamaDecoderLayer(Layer):
    """model.layers.0: data on outer, tensor on inner; ZeRO 3, recomputed."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, x, cos, sin, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # x (4, 16, 32): S(0) on outer, I on inner
        # cos, sin (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        hidden_states_2 = self.input_layernorm.weight * hidden_states
        del hidden_states
        # self_attn
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        q_proj, k_proj, v_proj = kernels_overlap.linears(
            hidden_states_2,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis="inner", src=spmd.I,
        )
        query_states = kernels.reshape(q_proj, [4, 16, 4, 4], ("outer", None, "inner", None)).transpose(1, 2)
        key_states = kernels.reshape(k_proj, [4, 16, 2, 4], ("outer", None, "inner", None)).transpose(1, 2)
        value_states = kernels.reshape(v_proj, [4, 16, 2, 4], ("outer", None, "inner", None)).transpose(1, 2)
        q_embed = query_states * cos + torch.cat([-query_states[..., 2:4], query_states[..., :2]], -1) * sin
        k_embed = key_states * cos + torch.cat([-key_states[..., 2:4], key_states[..., :2]], -1) * sin
        attn_output = kernels.attention(q_embed, k_embed, value_states, scale=0.5, enable_gqa=True, is_causal=True)
        del hidden_states_2, q_proj, k_proj, v_proj, query_states, key_states, value_states, q_embed, k_embed
        # self_attn.o_proj
        attn_output_2 = F.linear(attn_output.transpose(1, 2).reshape(4, 16, 16), self.self_attn.o_proj.weight)
        attn_output_i = spmd.all_reduce(attn_output_2, "inner", src=spmd.P, dst=spmd.I)
        hidden_states_3 = x + attn_output_i
        del attn_output, attn_output_2, attn_output_i
        # post_attention_layernorm
        variance = torch.pow(hidden_states_3, 2).mean([-1], keepdim=True)
        hidden_states_4 = self.post_attention_layernorm.weight * (hidden_states_3 * torch.rsqrt(variance + 1e-06))
        del variance
        # mlp
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        gate_proj, up_proj = kernels_overlap.linears(
            hidden_states_4,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis="inner", src=spmd.I,
        )
        del hidden_states_4
        # mlp.down_proj
        down_proj = F.linear(F.silu(gate_proj) * up_proj, self.mlp.down_proj.weight)
        down_proj_i = spmd.all_reduce(down_proj, "inner", src=spmd.P, dst=spmd.I)
        return hidden_states_3 + down_proj_i


class LlamaDecoderLayer_2(Layer):
    """model.layers.1: tensor on outer, tensor on inner; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # x (8, 16, 32): I on outer, I on inner
        # cos, sin (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        hidden_states_2 = self.input_layernorm.weight * hidden_states
        del hidden_states
        # self_attn
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        q_proj, k_proj, v_proj = kernels_overlap.linears(
            hidden_states_2,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis=("outer", "inner"), src=spmd.I,
        )
        query_states_view = kernels.reshape(q_proj, [8, 16, 2, 4], (None, None, ("outer", "inner"), None))
        query_states = query_states_view.transpose(1, 2)
        key_states_view = kernels.reshape(k_proj, [8, 16, 1, 4], (None, None, ("outer", "inner"), None))
        key_states = key_states_view.transpose(1, 2)
        value_states_view = kernels.reshape(v_proj, [8, 16, 1, 4], (None, None, ("outer", "inner"), None))
        q_embed = query_states * cos + torch.cat([-query_states[..., 2:4], query_states[..., :2]], -1) * sin
        k_embed = key_states * cos + torch.cat([-key_states[..., 2:4], key_states[..., :2]], -1) * sin
        attn_output = kernels.attention(q_embed, k_embed, value_states_view.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        del hidden_states_2, q_proj, k_proj, v_proj, query_states_view, query_states, key_states_view, key_states, value_states_view, q_embed, k_embed
        # self_attn.o_proj
        attn_output_2 = F.linear(attn_output.transpose(1, 2).reshape(8, 16, 8), self.self_attn.o_proj.weight)
        attn_output_i = flattened.all_reduce(attn_output_2, ("outer", "inner"), src=spmd.P, dst=spmd.I)
        hidden_states_3 = x + attn_output_i
        del attn_output, attn_output_2, attn_output_i
        # post_attention_layernorm
        variance = torch.pow(hidden_states_3, 2).mean([-1], keepdim=True)
        hidden_states_4 = self.post_attention_layernorm.weight * (hidden_states_3 * torch.rsqrt(variance + 1e-06))
        del variance
        # mlp
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        gate_proj, up_proj = kernels_overlap.linears(
            hidden_states_4,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis=("outer", "inner"), src=spmd.I,
        )
        del hidden_states_4
        # mlp.down_proj
        down_proj = F.linear(F.silu(gate_proj) * up_proj, self.mlp.down_proj.weight)
        down_proj_i = flattened.all_reduce(down_proj, ("outer", "inner"), src=spmd.P, dst=spmd.I)
        return hidden_states_3 + down_proj_i


class LlamaDecoderLayer_3(Layer):
    """model.layers.2: data on outer, tensor+sequence on inner; ZeRO 2."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 32): S(0) on outer, S(1) on inner
        # cos, sin (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        input_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.input_layernorm.weight, "inner", src=spmd.I, dst=spmd.R))
        hidden_states_2 = input_layernorm_weight_r * hidden_states
        del hidden_states, input_layernorm_weight_r
        # self_attn
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        q_proj, k_proj, v_proj = kernels_overlap.linears(
            hidden_states_2,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis="inner", src=spmd.S(1),
        )
        query_states = kernels.reshape(q_proj, [4, 16, 4, 4], ("outer", None, "inner", None)).transpose(1, 2)
        key_states = kernels.reshape(k_proj, [4, 16, 2, 4], ("outer", None, "inner", None)).transpose(1, 2)
        value_states = kernels.reshape(v_proj, [4, 16, 2, 4], ("outer", None, "inner", None)).transpose(1, 2)
        q_embed = query_states * cos + torch.cat([-query_states[..., 2:4], query_states[..., :2]], -1) * sin
        k_embed = key_states * cos + torch.cat([-key_states[..., 2:4], key_states[..., :2]], -1) * sin
        attn_output = kernels.attention(q_embed, k_embed, value_states, scale=0.5, enable_gqa=True, is_causal=True)
        del hidden_states_2, q_proj, k_proj, v_proj, query_states, key_states, value_states, q_embed, k_embed
        # self_attn.o_proj
        attn_output_2 = F.linear(attn_output.transpose(1, 2).reshape(4, 16, 16), self.self_attn.o_proj.weight)
        attn_output_s = spmd.reduce_scatter(attn_output_2, "inner", src=spmd.P, dst=spmd.S(1))
        hidden_states_3 = x + attn_output_s
        del attn_output, attn_output_2, attn_output_s
        # post_attention_layernorm
        variance = torch.pow(hidden_states_3, 2).mean([-1], keepdim=True)
        post_attention_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.post_attention_layernorm.weight, "inner", src=spmd.I, dst=spmd.R))
        hidden_states_4 = post_attention_layernorm_weight_r * (hidden_states_3 * torch.rsqrt(variance + 1e-06))
        del variance, post_attention_layernorm_weight_r
        # mlp
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        gate_proj, up_proj = kernels_overlap.linears(
            hidden_states_4,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis="inner", src=spmd.S(1),
        )
        del hidden_states_4
        # mlp.down_proj
        down_proj = F.linear(F.silu(gate_proj) * up_proj, self.mlp.down_proj.weight)
        down_proj_s = spmd.reduce_scatter(down_proj, "inner", src=spmd.P, dst=spmd.S(1))
        return hidden_states_3 + down_proj_s


class LlamaDecoderLayer_4(Layer):
    """model.layers.3: data on outer, data on inner; ZeRO 1."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on outer, R on inner.
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(32, 32, bias=False, **factory, dtype=torch.float64)
        self.self_attn.k_proj = nn.Linear(32, 16, bias=False, **factory, dtype=torch.float64)
        self.self_attn.v_proj = nn.Linear(32, 16, bias=False, **factory, dtype=torch.float64)
        self.self_attn.o_proj = nn.Linear(32, 32, bias=False, **factory, dtype=torch.float64)
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(32, 64, bias=False, **factory, dtype=torch.float64)
        self.mlp.up_proj = nn.Linear(32, 64, bias=False, **factory, dtype=torch.float64)
        self.mlp.down_proj = nn.Linear(64, 32, bias=False, **factory, dtype=torch.float64)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on outer, S(0) on inner
        # cos, sin (1, 1, 16, 4): R on outer, R on inner
        # input_layernorm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        hidden_states_2 = self.input_layernorm.weight * hidden_states
        del hidden_states
        # self_attn
        query_states_view = kernels.reshape(self.self_attn.q_proj(hidden_states_2), [2, 16, 8, 4], (("outer", "inner"), None, None, None))
        query_states = query_states_view.transpose(1, 2)
        key_states_view = kernels.reshape(self.self_attn.k_proj(hidden_states_2), [2, 16, 4, 4], (("outer", "inner"), None, None, None))
        key_states = key_states_view.transpose(1, 2)
        value_states_view = kernels.reshape(self.self_attn.v_proj(hidden_states_2), [2, 16, 4, 4], (("outer", "inner"), None, None, None))
        q_embed = query_states * cos + torch.cat([-query_states[..., 2:4], query_states[..., :2]], -1) * sin
        k_embed = key_states * cos + torch.cat([-key_states[..., 2:4], key_states[..., :2]], -1) * sin
        attn_output = kernels.attention(q_embed, k_embed, value_states_view.transpose(1, 2), scale=0.5, enable_gqa=True, is_causal=True)
        del hidden_states_2, query_states_view, query_states, key_states_view, key_states, value_states_view, q_embed, k_embed
        # self_attn.o_proj
        attn_output_2 = self.self_attn.o_proj(attn_output.transpose(1, 2).reshape(2, 16, 32))
        hidden_states_3 = x + attn_output_2
        del attn_output, attn_output_2
        # post_attention_layernorm
        variance = torch.pow(hidden_states_3, 2).mean([-1], keepdim=True)
        hidden_states_4 = self.post_attention_layernorm.weight * (hidden_states_3 * torch.rsqrt(variance + 1e-06))
        del variance
        # mlp.down_proj
        down_proj = self.mlp.down_proj(F.silu(self.mlp.gate_proj(hidden_states_4)) * self.mlp.up_proj(hidden_states_4))
        return hidden_states_3 + down_proj


class LlamaForCausalLMHead(Layer):
    """lm_head: data on outer, data on inner; ZeRO 1."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on outer, R on inner.
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))
        self.lm_head = nn.Linear(32, 96, bias=False, **factory, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on outer, S(0) on inner
        # labels (2, 16): S(0) on outer, S(0) on inner
        # valid_labels (): R on outer, R on inner
        # model.norm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        # lm_head
        logits = self.lm_head(self.model.norm.weight * hidden_states)
        del hidden_states
        # LlamaForCausalLM
        loss_cross_entropy_sum = kernels.cross_entropy_sum(logits, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], ignore_index=-100, label_smoothing=0.0, partial_axes=("outer", "inner"))
        return loss_cross_entropy_sum / valid_labels


class Stage0(nn.Module):
    """model.embed_tokens to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"outer": spmd.S(0), "inner": spmd.S(0)}),
            "labels": TensorSpec((8, 16), torch.int64, {"outer": spmd.S(0), "inner": spmd.S(0)}),
        },
        scalars=("valid_labels",), loss={"outer": spmd.P, "inner": spmd.P},
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("cos", constants["cos"], persistent=False)
        self.register_buffer("sin", constants["sin"], persistent=False)
        self.model_embed_tokens = Embedding(LayerSpec(zero=1, data_axes=("outer", "inner")), device=device)
        self.model_layers = nn.ModuleDict()
        self.model_layers["0"] = LlamaDecoderLayer(LayerSpec(zero=3, data_axes=("outer",)), device=device)
        self.model_layers["1"] = LlamaDecoderLayer_2(LayerSpec(zero=0, data_axes=()), device=device)
        self.model_layers["2"] = LlamaDecoderLayer_3(LayerSpec(zero=2, data_axes=("outer",)), device=device)
        self.model_layers["3"] = LlamaDecoderLayer_4(LayerSpec(zero=1, data_axes=("outer", "inner")), device=device)
        self.lm_head = LlamaForCausalLMHead(LayerSpec(zero=1, data_axes=("outer", "inner")), device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model_embed_tokens(input_ids)
        hidden = spmd.all_gather(hidden, "inner", src=spmd.S(0), dst=spmd.I)
        hidden = self.model_layers["0"](hidden, self.cos, self.sin)
        hidden = spmd.all_gather(hidden, "outer", src=spmd.S(0), dst=spmd.I)
        hidden = self.model_layers["1"](hidden, self.cos, self.sin)
        hidden = spmd.convert(hidden, "outer", src=spmd.I, dst=spmd.S(0))
        hidden = spmd.convert(hidden, "inner", src=spmd.I, dst=spmd.S(1))
        hidden = self.model_layers["2"](hidden, self.cos, self.sin)
        hidden = spmd.all_to_all(hidden, "inner", src=spmd.S(1), dst=spmd.S(0))
        hidden = self.model_layers["3"](hidden, self.cos, self.sin)
        return self.lm_head(hidden, labels, valid_labels)


def prelude(batch: Tensors, constants: Tensors, total: Total) -> Tensors:
    """Scalars of the whole global batch, such as its number of valid tokens."""
    loss_ne = F.pad(batch["labels"], [0, 1], value=-100.0)[..., 1:17] != -100
    return {"valid_labels": total(loss_ne.sum()).to(torch.float64)}


PROGRAM = ProgramSpec(
    mesh={"outer": 2, "inner": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    flattened=(("outer", "inner"),),
    schedule=microbatches.Microbatches, fsdp=fsdp.ShardedGroup, whole_tensors=whole_tensors.WholeTensors,
)
