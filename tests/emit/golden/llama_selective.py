"""llama on 2 devices: a mesh of tensor 2.

A step takes 8 rows. Each device runs the layers below on its part of the rows.
Comments and calls name the type of a tensor on each axis of the mesh: S(d) is a slice of dim d; R the same values everywhere, and terms
of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

    torchrun --nproc-per-node 2 train.py --dataset FILE

trains PROGRAM, at the end of this file, with the trainer in runtime/. plan.json is the plan with its prices, and layouts.json says what of
the original parameters each device holds. Written by autopar; yours to edit.
"""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn

from runtime import kernels, kernels_overlap, kernels_vocab, microbatches, recomputing, whole_tensors
from runtime.spec import Layer, LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec, Tensors, Total


class Embedding(Layer):
    """model.embed_tokens: tensor+sequence on tensor; ZeRO 0, recomputed in part."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(96, 16, **factory, dtype=torch.float64))  # S(1) on tensor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass, but for what is kept.
        return recomputing.selectively(self.compute, input_ids)

    def compute(self, input_ids: torch.Tensor) -> torch.Tensor:
        # input_ids (8, 16): R on tensor
        return spmd.all_to_all(F.embedding(input_ids, self.weight), "tensor", src=spmd.S(2), dst=spmd.S(1))


class LlamaDecoderLayer(Layer):
    """model.layers.0 to model.layers.3 (4 layers): tensor+sequence on tensor; ZeRO 0, recomputed in part."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass, but for what is kept.
        return recomputing.selectively(self.compute, x, cos, sin)

    def compute(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # x (8, 8, 32): S(1) on tensor
        # cos, sin (1, 1, 16, 4): R on tensor
        # input_layernorm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        input_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.input_layernorm.weight, "tensor", src=spmd.I, dst=spmd.R))
        hidden_states_2 = input_layernorm_weight_r * hidden_states
        del hidden_states, input_layernorm_weight_r
        # self_attn
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        q_proj, k_proj, v_proj = recomputing.keep(
            kernels_overlap.linears,
            hidden_states_2,
            [self.self_attn.q_proj.weight, self.self_attn.k_proj.weight, self.self_attn.v_proj.weight],
            axis="tensor", src=spmd.S(1),
        )
        query_states = kernels.reshape(q_proj, [8, 16, 4, 4], (None, None, "tensor", None)).transpose(1, 2)
        key_states = kernels.reshape(k_proj, [8, 16, 2, 4], (None, None, "tensor", None)).transpose(1, 2)
        value_states = kernels.reshape(v_proj, [8, 16, 2, 4], (None, None, "tensor", None)).transpose(1, 2)
        q_embed = query_states * cos + torch.cat([-query_states[..., 2:4], query_states[..., :2]], -1) * sin
        k_embed = key_states * cos + torch.cat([-key_states[..., 2:4], key_states[..., :2]], -1) * sin
        attn_output = recomputing.keep(kernels.attention, q_embed, k_embed, value_states, scale=0.5, enable_gqa=True, is_causal=True)
        del hidden_states_2, q_proj, k_proj, v_proj, query_states, key_states, value_states, q_embed, k_embed
        # self_attn.o_proj
        attn_output_2 = F.linear(attn_output.transpose(1, 2).reshape(8, 16, 16), self.self_attn.o_proj.weight)
        attn_output_s = recomputing.keep(spmd.reduce_scatter, attn_output_2, "tensor", src=spmd.P, dst=spmd.S(1))
        hidden_states_3 = x + attn_output_s
        del attn_output, attn_output_2, attn_output_s
        # post_attention_layernorm
        variance = torch.pow(hidden_states_3, 2).mean([-1], keepdim=True)
        post_attention_layernorm_weight_r = kernels.dense_gradient(spmd.convert(self.post_attention_layernorm.weight, "tensor", src=spmd.I, dst=spmd.R))
        hidden_states_4 = post_attention_layernorm_weight_r * (hidden_states_3 * torch.rsqrt(variance + 1e-06))
        del variance, post_attention_layernorm_weight_r
        # mlp
        # backward: the reduce-scatter of the input's gradient runs while the weights' gradients are computed
        gate_proj, up_proj = recomputing.keep(
            kernels_overlap.linears,
            hidden_states_4,
            [self.mlp.gate_proj.weight, self.mlp.up_proj.weight],
            axis="tensor", src=spmd.S(1),
        )
        del hidden_states_4
        # mlp.down_proj
        down_proj = F.linear(F.silu(gate_proj) * up_proj, self.mlp.down_proj.weight)
        down_proj_s = spmd.reduce_scatter(down_proj, "tensor", src=spmd.P, dst=spmd.S(1))
        return hidden_states_3 + down_proj_s


class LlamaForCausalLMHead(Layer):
    """lm_head: tensor+sequence on tensor; ZeRO 0, recomputed in part."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # I on tensor
        self.lm_head = nn.Module()
        self.lm_head.weight = nn.Parameter(torch.empty(48, 32, **factory, dtype=torch.float64))  # S(0) on tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass, but for what is kept.
        return recomputing.selectively(self.compute, x, labels, valid_labels)

    def compute(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # x (8, 8, 32): S(1) on tensor
        # labels (8, 16): R on tensor
        # valid_labels (): I on tensor
        # model.norm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-06)
        model_norm_weight_r = kernels.dense_gradient(spmd.convert(self.model.norm.weight, "tensor", src=spmd.I, dst=spmd.R))
        hidden_states_2 = model_norm_weight_r * hidden_states
        del hidden_states, model_norm_weight_r
        # lm_head
        # backward: the reduce-scatter of the input's gradient runs while the weight's gradient is computed
        logits = recomputing.keep(
            kernels_overlap.linear,
            hidden_states_2,
            self.lm_head.weight,
            axis="tensor", src=spmd.S(1),
        )
        del hidden_states_2
        # LlamaForCausalLM
        loss_cross_entropy_sum = kernels_vocab.vocab_parallel_cross_entropy_sum(logits, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], "tensor", ignore_index=-100, label_smoothing=0.0, partial_axes=())
        return loss_cross_entropy_sum / valid_labels


class Stage0(nn.Module):
    """model.embed_tokens to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
            "labels": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
        },
        scalars=("valid_labels",), loss={"tensor": spmd.I},
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("cos", constants["cos"], persistent=False)
        self.register_buffer("sin", constants["sin"], persistent=False)
        self.model_embed_tokens = Embedding(LayerSpec(zero=0, data_axes=()), device=device)
        self.model_layers = nn.ModuleDict()
        for i in range(4):
            self.model_layers[str(i)] = LlamaDecoderLayer(LayerSpec(zero=0, data_axes=()), device=device)
        self.lm_head = LlamaForCausalLMHead(LayerSpec(zero=0, data_axes=()), device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model_embed_tokens(input_ids)
        for layer in self.model_layers.values():
            hidden = layer(hidden, self.cos, self.sin)
        return self.lm_head(hidden, labels, valid_labels)


def prelude(batch: Tensors, constants: Tensors, total: Total) -> Tensors:
    """Scalars of the whole global batch, such as its number of valid tokens."""
    loss_ne = F.pad(batch["labels"], [0, 1], value=-100.0)[..., 1:17] != -100
    return {"valid_labels": total(loss_ne.sum()).to(torch.float64)}


PROGRAM = ProgramSpec(
    mesh={"tensor": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    schedule=microbatches.Microbatches, whole_tensors=whole_tensors.WholeTensors,
)
