"""gpt2 on 2 devices: a mesh of tensor 2.

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

from runtime import kernels, kernels_overlap, kernels_vocab, microbatches, whole_tensors
from runtime.spec import Layer, LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec, Tensors, Total


class GPT2LMHeadModelEmbeddings(Layer):
    """transformer.wte: tensor on tensor; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.transformer = nn.Module()
        self.transformer.wpe = nn.Module()
        self.transformer.wpe.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # S(0) on tensor

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, transformer_wte_weight: torch.Tensor) -> torch.Tensor:
        # input_ids (8, 16): R on tensor
        # position_ids (1, 16): R on tensor
        # transformer_wte_weight (48, 32): S(0) on tensor
        # transformer.wte
        inputs_embeds = kernels_vocab.masked_embedding(input_ids, transformer_wte_weight, axis="tensor")
        # transformer.wpe
        position_embeds = kernels_vocab.masked_embedding(position_ids, self.transformer.wpe.weight, axis="tensor")
        return spmd.all_reduce(inputs_embeds + position_embeds, "tensor", src=spmd.P, dst=spmd.I)


class GPT2Block(Layer):
    """transformer.h.0 to transformer.h.3 (4 layers): tensor on tensor; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        self.ln_1 = nn.LayerNorm(32, eps=1e-05, **factory, dtype=torch.float64)  # I on tensor
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
        self.ln_2 = nn.LayerNorm(32, eps=1e-05, **factory, dtype=torch.float64)  # I on tensor
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
        hidden_states = self.ln_1(x)
        # attn.c_attn
        # backward: the all-reduce of the input's gradient runs while the weights' gradients are computed
        x_2, x_3, x_4 = kernels_overlap.linears(
            hidden_states,
            [self.attn.c_attn.weight.part0.t(), self.attn.c_attn.weight.part1.t(), self.attn.c_attn.weight.part2.t()],
            [self.attn.c_attn.bias.part0, self.attn.c_attn.bias.part1, self.attn.c_attn.bias.part2],
            axis="tensor", src=spmd.I,
        )
        del hidden_states
        # attn
        key_states = kernels.reshape(x_3, [8, 16, 2, 8], (None, None, "tensor", None)).transpose(1, 2)
        value_states = kernels.reshape(x_4, [8, 16, 2, 8], (None, None, "tensor", None)).transpose(1, 2)
        query_states = kernels.reshape(x_2, [8, 16, 2, 8], (None, None, "tensor", None)).transpose(1, 2)
        attn_output = kernels.attention(query_states, key_states, value_states, scale=0.3535533905932738, is_causal=True)
        del x_2, x_3, x_4, key_states, value_states, query_states
        # attn.c_proj
        x_linear = F.linear(attn_output.transpose(1, 2).reshape(8, 16, 16), self.attn.c_proj.weight.t())
        x_linear_i = spmd.all_reduce(x_linear, "tensor", src=spmd.P, dst=spmd.I)
        hidden_states_2 = x_linear_i + self.attn.c_proj.bias + x
        del attn_output, x_linear, x_linear_i
        # ln_2
        hidden_states_3 = self.ln_2(hidden_states_2)
        # mlp.c_fc
        # backward: the all-reduce of the input's gradient runs while the weight's gradient is computed
        x_5 = kernels_overlap.linear(
            hidden_states_3,
            self.mlp.c_fc.weight.t(),
            self.mlp.c_fc.bias,
            axis="tensor", src=spmd.I,
        )
        del hidden_states_3
        # mlp.act
        act = torch.tanh((x_5 + torch.pow(x_5, 3.0) * 0.044715) * 0.7978845608028654) + 1.0
        # mlp.c_proj
        x_linear_i_2 = spmd.all_reduce(F.linear(x_5 * 0.5 * act, self.mlp.c_proj.weight.t()), "tensor", src=spmd.P, dst=spmd.I)
        return hidden_states_2 + (x_linear_i_2 + self.mlp.c_proj.bias)


class GPT2LMHeadModelHead(Layer):
    """lm_head: tensor on tensor; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is I on tensor.
        self.transformer = nn.Module()
        self.transformer.ln_f = nn.LayerNorm(32, eps=1e-05, **factory, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor, transformer_wte_weight: torch.Tensor) -> torch.Tensor:
        # x (8, 16, 32): I on tensor
        # labels (8, 16): R on tensor
        # valid_labels (): I on tensor
        # transformer_wte_weight (48, 32): S(0) on tensor
        # transformer.ln_f
        hidden_states = self.transformer.ln_f(x)
        # lm_head
        # backward: the all-reduce of the input's gradient runs while the weight's gradient is computed
        logits = kernels_overlap.linear(hidden_states, transformer_wte_weight, axis="tensor", src=spmd.I)
        del hidden_states
        # GPT2LMHeadModel
        loss_cross_entropy_sum = kernels_vocab.vocab_parallel_cross_entropy_sum(logits, F.pad(labels, [0, 1], value=-100.0)[..., 1:17], "tensor", ignore_index=-100, label_smoothing=0.0, partial_axes=())
        return loss_cross_entropy_sum / valid_labels


class Stage0(nn.Module):
    """transformer.wte to lm_head."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
            "labels": TensorSpec((8, 16), torch.int64, {"tensor": spmd.R}),
        },
        scalars=("valid_labels",), loss={"tensor": spmd.I},
        own=LayerSpec(zero=0, data_axes=()),  # of the parameters that several layers share
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("position_ids", constants["position_ids"], persistent=False)
        self.transformer_wte_weight = nn.Parameter(torch.empty(48, 32, device=device, dtype=torch.float64))  # S(0) on tensor
        self.transformer_wte = GPT2LMHeadModelEmbeddings(LayerSpec(zero=0, data_axes=()), device=device)
        self.transformer_h = nn.ModuleDict()
        for i in range(4):
            self.transformer_h[str(i)] = GPT2Block(LayerSpec(zero=0, data_axes=()), device=device)
        self.lm_head = GPT2LMHeadModelHead(LayerSpec(zero=0, data_axes=()), device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer_wte(input_ids, self.position_ids, self.transformer_wte_weight)
        for layer in self.transformer_h.values():
            hidden = layer(hidden)
        return self.lm_head(hidden, labels, valid_labels, self.transformer_wte_weight)


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
