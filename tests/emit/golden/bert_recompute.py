"""bert on 2 devices: a mesh of data 2.

A step takes 8 rows in 2 microbatches of 4. Each device runs the layers below on its part of the rows.

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
from torch.utils.checkpoint import checkpoint

import fsdp
import kernels
import microbatches
import publications
import whole_tensors
from spec import LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec


class BertEmbeddings(nn.Module):
    """bert.embeddings: data on data; ZeRO 3, recomputed."""

    SPEC = LayerSpec(zero=3, data_axes=("data",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.token_type_embeddings = nn.Module()
        self.token_type_embeddings.weight = nn.Parameter(torch.empty(2, 32, **factory, dtype=torch.float64))  # R on data
        self.position_embeddings = nn.Module()
        self.position_embeddings.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on data
        self.LayerNorm = nn.Module()
        self.LayerNorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.LayerNorm.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data

    def forward(self, input_ids: torch.Tensor, constant_1: torch.Tensor, constant_0: torch.Tensor, word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, input_ids, constant_1, constant_0, word_embeddings_weight, use_reentrant=False, preserve_rng_state=False)

    def compute(self, input_ids: torch.Tensor, constant_1: torch.Tensor, constant_0: torch.Tensor, word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # input_ids (2, 16): S(0) on data
        # constant_1 (1, 16): R on data
        # constant_0 (1, 16): R on data
        # word_embeddings_weight (96, 32): R on data
        # bert.embeddings.word_embeddings
        embedding = F.embedding(input_ids, word_embeddings_weight, padding_idx=0)
        # bert.embeddings.token_type_embeddings
        embedding_1 = F.embedding(constant_1, self.token_type_embeddings.weight)
        # bert.embeddings.position_embeddings
        embedding_2 = F.embedding(constant_0, self.position_embeddings.weight)
        # bert.embeddings.LayerNorm
        layer_norm = F.layer_norm(embedding + embedding_1 + embedding_2, [32], self.LayerNorm.weight, self.LayerNorm.bias, eps=1e-12)
        return layer_norm


class BertLayer(nn.Module):
    """bert.encoder.layer.0 to bert.encoder.layer.3 (4 layers): data on data; ZeRO 3, recomputed."""

    SPEC = LayerSpec(zero=3, data_axes=("data",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.self_ = nn.Module()
        self.attention.self_.query = nn.Module()
        self.attention.self_.query.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on data
        self.attention.self_.query.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.attention.self_.key_ = nn.Module()
        self.attention.self_.key_.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on data
        self.attention.self_.key_.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.attention.self_.value = nn.Module()
        self.attention.self_.value.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on data
        self.attention.self_.value.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.attention.output = nn.Module()
        self.attention.output.dense = nn.Module()
        self.attention.output.dense.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on data
        self.attention.output.dense.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.attention.output.LayerNorm = nn.Module()
        self.attention.output.LayerNorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.attention.output.LayerNorm.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Module()
        self.intermediate.dense.weight = nn.Parameter(torch.empty(64, 32, **factory, dtype=torch.float64))  # R on data
        self.intermediate.dense.bias = nn.Parameter(torch.empty(64, **factory, dtype=torch.float64))  # R on data
        self.output = nn.Module()
        self.output.dense = nn.Module()
        self.output.dense.weight = nn.Parameter(torch.empty(32, 64, **factory, dtype=torch.float64))  # R on data
        self.output.dense.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.output.LayerNorm = nn.Module()
        self.output.LayerNorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.output.LayerNorm.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, x, attention_mask, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on data
        # attention_mask (2, 16): S(0) on data
        # attention.self.query
        linear = F.linear(x, self.attention.self_.query.weight, self.attention.self_.query.bias)
        # attention.self
        view = kernels.reshape(linear, [2, 16, 4, 8], ("data", None, None, None))
        del linear
        # attention.self.key
        linear_1 = F.linear(x, self.attention.self_.key_.weight, self.attention.self_.key_.bias)
        # attention.self
        view_1 = kernels.reshape(linear_1, [2, 16, 4, 8], ("data", None, None, None))
        del linear_1
        # attention.self.value
        linear_2 = F.linear(x, self.attention.self_.value.weight, self.attention.self_.value.bias)
        # attention.self
        view_2 = kernels.reshape(linear_2, [2, 16, 4, 8], ("data", None, None, None))
        scaled_dot_product_attention = F.scaled_dot_product_attention(view.transpose(1, 2), view_1.transpose(1, 2), view_2.transpose(1, 2), attention_mask.to(torch.bool).unsqueeze(1).unsqueeze(2), scale=0.3535533905932738)
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(2, 16, 32)
        del view, view_1, linear_2, view_2, scaled_dot_product_attention
        # attention.output.dense
        linear_3 = F.linear(reshape, self.attention.output.dense.weight, self.attention.output.dense.bias)
        del reshape
        # attention.output.LayerNorm
        layer_norm = F.layer_norm(linear_3 + x, [32], self.attention.output.LayerNorm.weight, self.attention.output.LayerNorm.bias, eps=1e-12)
        del linear_3
        # intermediate.dense
        linear_4 = F.linear(layer_norm, self.intermediate.dense.weight, self.intermediate.dense.bias)
        # output.dense
        linear_5 = F.linear(F.gelu(linear_4), self.output.dense.weight, self.output.dense.bias)
        del linear_4
        # output.LayerNorm
        layer_norm_1 = F.layer_norm(linear_5 + layer_norm, [32], self.output.LayerNorm.weight, self.output.LayerNorm.bias, eps=1e-12)
        return layer_norm_1


class BertLMPredictionHead(nn.Module):
    """cls.predictions: data on data; ZeRO 3, recomputed."""

    SPEC = LayerSpec(zero=3, data_axes=("data",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.cls = nn.Module()
        self.cls.predictions = nn.Module()
        self.cls.predictions.transform = nn.Module()
        self.cls.predictions.transform.dense = nn.Module()
        self.cls.predictions.transform.dense.weight = nn.Parameter(torch.empty(32, 32, **factory, dtype=torch.float64))  # R on data
        self.cls.predictions.transform.dense.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.cls.predictions.transform.LayerNorm = nn.Module()
        self.cls.predictions.transform.LayerNorm.weight = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.cls.predictions.transform.LayerNorm.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self.cls.predictions.bias = nn.Parameter(torch.empty(96, **factory, dtype=torch.float64))  # R on data

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor, bert_embeddings_word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, x, labels, valid_labels, bert_embeddings_word_embeddings_weight, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor, bert_embeddings_word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on data
        # labels (2, 16): S(0) on data
        # valid_labels (): R on data
        # bert_embeddings_word_embeddings_weight (96, 32): R on data
        # cls.predictions.transform.dense
        linear = F.linear(x, self.cls.predictions.transform.dense.weight, self.cls.predictions.transform.dense.bias)
        # cls.predictions.transform.LayerNorm
        layer_norm = F.layer_norm(F.gelu(linear), [32], self.cls.predictions.transform.LayerNorm.weight, self.cls.predictions.transform.LayerNorm.bias, eps=1e-12)
        del linear
        # cls.predictions.decoder
        linear_1 = F.linear(layer_norm, bert_embeddings_word_embeddings_weight, self.cls.predictions.bias)
        del layer_norm
        # BertForMaskedLM
        cross_entropy_sum = kernels.cross_entropy_sum(linear_1, labels, ignore_index=-100, label_smoothing=0.0, partial_axes=("data",))
        div = cross_entropy_sum / valid_labels
        return div


class Stage0(nn.Module):
    """bert.embeddings to cls.predictions."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"data": spmd.S(0)}),
            "labels": TensorSpec((8, 16), torch.int64, {"data": spmd.S(0)}),
            "attention_mask": TensorSpec((8, 16), torch.int64, {"data": spmd.S(0)}),
        },
        scalars=("valid_labels",),
        loss={"data": spmd.P},
        own=LayerSpec(zero=3, data_axes=("data",)),  # of the parameters that several layers share
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("constant_1", constants["constant_1"], persistent=False)
        self.register_buffer("constant_0", constants["constant_0"], persistent=False)
        self.bert_embeddings_word_embeddings_weight = nn.Parameter(torch.empty(96, 32, device=device, dtype=torch.float64))  # R on data
        self.bert_embeddings = BertEmbeddings(device=device)
        self.bert_encoder_layer_0 = BertLayer(device=device)
        self.bert_encoder_layer_1 = BertLayer(device=device)
        self.bert_encoder_layer_2 = BertLayer(device=device)
        self.bert_encoder_layer_3 = BertLayer(device=device)
        self.cls_predictions = BertLMPredictionHead(device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.bert_embeddings(input_ids, self.constant_1, self.constant_0, self.bert_embeddings_word_embeddings_weight)
        for layer in (self.bert_encoder_layer_0, self.bert_encoder_layer_1, self.bert_encoder_layer_2, self.bert_encoder_layer_3):
            hidden = layer(hidden, attention_mask)
        loss = self.cls_predictions(hidden, labels, valid_labels, self.bert_embeddings_word_embeddings_weight)
        return loss


def prelude(
    batch: dict[str, torch.Tensor],
    constants: dict[str, torch.Tensor],
    total: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Scalars of the whole global batch, such as its number of valid tokens."""
    ne = batch["labels"] != -100
    sum_1 = total(ne.sum())
    to = sum_1.to(torch.float64)
    return {"valid_labels": to}


PROGRAM = ProgramSpec(
    mesh={"data": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    schedule=microbatches.Microbatches,
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    fsdp=fsdp.ShardedGroup,
    publications=publications.Publications,
    whole_tensors=whole_tensors.WholeTensors,
)
