"""mixtral on 2 devices: a mesh of expert 2.

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

from runtime import kernels, kernels_experts, microbatches, whole_tensors
from runtime.spec import Layer, LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec, Tensors, Total


class Embedding(Layer):
    """model.embed_tokens: expert on expert; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(96, 32, **factory, dtype=torch.float64))  # R on expert

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # input_ids (4, 16): S(0) on expert
        return F.embedding(input_ids, self.weight)


class MixtralDecoderLayer(Layer):
    """model.layers.0 to model.layers.3 (4 layers): expert on expert; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on expert
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(32, 32, bias=False, **factory, dtype=torch.float64)  # R on expert
        self.self_attn.k_proj = nn.Linear(32, 32, bias=False, **factory, dtype=torch.float64)  # R on expert
        self.self_attn.v_proj = nn.Linear(32, 32, bias=False, **factory, dtype=torch.float64)  # R on expert
        self.self_attn.o_proj = nn.Linear(32, 32, bias=False, **factory, dtype=torch.float64)  # R on expert
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on expert
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(32, 4, bias=False, **factory, dtype=torch.float64)  # R on expert
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Module()
        self.mlp.experts.gate_up_proj.part0 = nn.Parameter(torch.empty(2, 48, 32, **factory, dtype=torch.float64))  # S(0) on expert
        self.mlp.experts.gate_up_proj.part1 = nn.Parameter(torch.empty(2, 48, 32, **factory, dtype=torch.float64))  # S(0) on expert
        self.mlp.experts.down_proj = nn.Parameter(torch.empty(2, 32, 48, **factory, dtype=torch.float64))  # S(0) on expert

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # x (4, 16, 32): S(0) on expert
        # cos, sin (1, 1, 16, 8): R on expert
        # input_layernorm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-05)
        hidden_states_2 = self.input_layernorm.weight * hidden_states
        del hidden_states
        # self_attn
        query_states_view = kernels.reshape(self.self_attn.q_proj(hidden_states_2), [4, 16, 4, 8], ("expert", None, None, None))
        query_states = query_states_view.transpose(1, 2)
        key_states_view = kernels.reshape(self.self_attn.k_proj(hidden_states_2), [4, 16, 4, 8], ("expert", None, None, None))
        key_states = key_states_view.transpose(1, 2)
        value_states_view = kernels.reshape(self.self_attn.v_proj(hidden_states_2), [4, 16, 4, 8], ("expert", None, None, None))
        q_embed = query_states * cos + torch.cat([-query_states[..., 4:8], query_states[..., :4]], -1) * sin
        k_embed = key_states * cos + torch.cat([-key_states[..., 4:8], key_states[..., :4]], -1) * sin
        attn_output = kernels.attention(q_embed, k_embed, value_states_view.transpose(1, 2), scale=0.3535533905932738, is_causal=True)
        del hidden_states_2, query_states_view, query_states, key_states_view, key_states, value_states_view, q_embed, k_embed
        # self_attn.o_proj
        attn_output_2 = self.self_attn.o_proj(attn_output.transpose(1, 2).reshape(4, 16, 32))
        hidden_states_3 = x + attn_output_2
        del attn_output, attn_output_2
        # post_attention_layernorm
        variance = torch.pow(hidden_states_3, 2).mean([-1], keepdim=True)
        hidden_states_4 = self.post_attention_layernorm.weight * (hidden_states_3 * torch.rsqrt(variance + 1e-05))
        del variance
        # mlp.gate
        router_top_value, router_indices = torch.topk(F.softmax(self.mlp.gate(hidden_states_4), -1), 2)
        router_top_value_2 = router_top_value / router_top_value.sum([-1], keepdim=True)
        del router_top_value
        # mlp.experts
        # dispatch tokens to their experts over expert, run expert_body, and combine the results with the router's weights
        final_hidden_states = kernels_experts.experts(
            hidden_states_4, router_indices, router_top_value_2,
            [self.mlp.experts.gate_up_proj.part0, self.mlp.experts.gate_up_proj.part1, self.mlp.experts.down_proj], self.expert_body, 4,
            owners=("expert",), exchange=("expert",),
        )
        return hidden_states_3 + final_hidden_states

    @staticmethod
    def expert_body(rows: torch.Tensor, counts: torch.Tensor, gate_up_proj_part0: torch.Tensor, gate_up_proj_part1: torch.Tensor, down_proj: torch.Tensor) -> torch.Tensor:
        # rows sorted by expert, counts of each; globally gate_up_proj_part0 (4, 48, 32), gate_up_proj_part1 (4, 48, 32), down_proj (4, 32, 48)
        # mlp.experts
        out = kernels_experts.grouped_linear(rows, gate_up_proj_part0, counts)
        out_2 = kernels_experts.grouped_linear(rows, gate_up_proj_part1, counts)
        return kernels_experts.grouped_linear(F.silu(out) * out_2, down_proj, counts)


class MixtralForCausalLMHead(Layer):
    """lm_head: expert on expert; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on expert.
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))
        self.lm_head = nn.Linear(32, 96, bias=False, **factory, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        # x (4, 16, 32): S(0) on expert
        # labels (4, 16): S(0) on expert
        # valid_labels (): R on expert
        # model.norm
        hidden_states = x * torch.rsqrt(torch.pow(x, 2).mean([-1], keepdim=True) + 1e-05)
        # lm_head
        logits = self.lm_head(self.model.norm.weight * hidden_states)
        del hidden_states
        # MixtralForCausalLM
        loss_cross_entropy_sum = kernels.cross_entropy_sum(logits, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], ignore_index=-100, label_smoothing=0.0, partial_axes=("expert",))
        return loss_cross_entropy_sum / valid_labels


class Stage0(nn.Module):
    """model.embed_tokens to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"expert": spmd.S(0)}),
            "labels": TensorSpec((8, 16), torch.int64, {"expert": spmd.S(0)}),
        },
        scalars=("valid_labels",), loss={"expert": spmd.P},
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("cos", constants["cos"], persistent=False)
        self.register_buffer("sin", constants["sin"], persistent=False)
        self.model_embed_tokens = Embedding(LayerSpec(zero=0, data_axes=("expert",)), device=device)
        self.model_layers = nn.ModuleDict()
        for i in range(4):
            self.model_layers[str(i)] = MixtralDecoderLayer(LayerSpec(zero=0, data_axes=("expert",)), device=device)
        self.lm_head = MixtralForCausalLMHead(LayerSpec(zero=0, data_axes=("expert",)), device=device)

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
    mesh={"expert": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    schedule=microbatches.Microbatches, whole_tensors=whole_tensors.WholeTensors,
)
