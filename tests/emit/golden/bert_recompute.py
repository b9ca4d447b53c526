"""bert on 2 devices: a mesh of data 2.

A step takes 8 rows in 2 microbatches of 4. Each device runs the layers below on its part of the rows.
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
from torch.utils.checkpoint import checkpoint

from runtime import fsdp, kernels, microbatches, whole_tensors
from runtime.spec import Layer, LayerSpec, Prelude, ProgramSpec, StageSpec, TensorSpec, Tensors, Total


class BertEmbeddings(Layer):
    """bert.embeddings: data on data; ZeRO 3, recomputed."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on data.
        self.token_type_embeddings = nn.Embedding(2, 32, **factory, dtype=torch.float64)
        self.position_embeddings = nn.Embedding(32, 32, **factory, dtype=torch.float64)
        self.LayerNorm = nn.LayerNorm(32, eps=1e-12, **factory, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, position_ids: torch.Tensor, word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, input_ids, token_type_ids, position_ids, word_embeddings_weight, use_reentrant=False, preserve_rng_state=False)

    def compute(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, position_ids: torch.Tensor, word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # input_ids (2, 16): S(0) on data
        # token_type_ids, position_ids (1, 16): R on data
        # word_embeddings_weight (96, 32): R on data
        # bert.embeddings.word_embeddings
        inputs_embeds = F.embedding(input_ids, word_embeddings_weight, padding_idx=0)
        # bert.embeddings
        embeddings = inputs_embeds + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(embeddings + self.position_embeddings(position_ids))


class BertLayer(Layer):
    """bert.encoder.layer.0 to bert.encoder.layer.3 (4 layers): data on data; ZeRO 3, recomputed."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on data.
        self.attention = nn.Module()
        self.attention.self_ = nn.Module()
        self.attention.self_.query = nn.Linear(32, 32, **factory, dtype=torch.float64)
        self.attention.self_.key_ = nn.Linear(32, 32, **factory, dtype=torch.float64)
        self.attention.self_.value = nn.Linear(32, 32, **factory, dtype=torch.float64)
        self.attention.output = nn.Module()
        self.attention.output.dense = nn.Linear(32, 32, **factory, dtype=torch.float64)
        self.attention.output.LayerNorm = nn.LayerNorm(32, eps=1e-12, **factory, dtype=torch.float64)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(32, 64, **factory, dtype=torch.float64)
        self.output = nn.Module()
        self.output.dense = nn.Linear(64, 32, **factory, dtype=torch.float64)
        self.output.LayerNorm = nn.LayerNorm(32, eps=1e-12, **factory, dtype=torch.float64)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, x, attention_mask, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on data
        # attention_mask (2, 16): S(0) on data
        # bert
        result = attention_mask.to(torch.bool).unsqueeze(1).unsqueeze(2)
        # attention.self
        query_layer_view = kernels.reshape(self.attention.self_.query(x), [2, 16, 4, 8], ("data", None, None, None))
        key_layer_view = kernels.reshape(self.attention.self_.key_(x), [2, 16, 4, 8], ("data", None, None, None))
        value_layer_view = kernels.reshape(self.attention.self_.value(x), [2, 16, 4, 8], ("data", None, None, None))
        attn_output = F.scaled_dot_product_attention(query_layer_view.transpose(1, 2), key_layer_view.transpose(1, 2), value_layer_view.transpose(1, 2), result, scale=0.3535533905932738)
        del result, query_layer_view, key_layer_view, value_layer_view
        # attention.output.dense
        hidden_states = self.attention.output.dense(attn_output.transpose(1, 2).reshape(2, 16, 32))
        del attn_output
        # attention.output.LayerNorm
        hidden_states_2 = self.attention.output.LayerNorm(hidden_states + x)
        del hidden_states
        # output.dense
        hidden_states_3 = self.output.dense(F.gelu(self.intermediate.dense(hidden_states_2)))
        return self.output.LayerNorm(hidden_states_3 + hidden_states_2)


class BertLMPredictionHead(Layer):
    """cls.predictions: data on data; ZeRO 3, recomputed."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on data.
        self.cls = nn.Module()
        self.cls.predictions = nn.Module()
        self.cls.predictions.transform = nn.Module()
        self.cls.predictions.transform.dense = nn.Linear(32, 32, **factory, dtype=torch.float64)
        self.cls.predictions.transform.LayerNorm = nn.LayerNorm(32, eps=1e-12, **factory, dtype=torch.float64)
        self.cls.predictions.bias = nn.Parameter(torch.empty(96, **factory, dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor, bert_embeddings_word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # Recomputed in the backward pass: only the arguments are kept.
        return checkpoint(self.compute, x, labels, valid_labels, bert_embeddings_word_embeddings_weight, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: torch.Tensor, labels: torch.Tensor, valid_labels: torch.Tensor, bert_embeddings_word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        # x (2, 16, 32): S(0) on data
        # labels (2, 16): S(0) on data
        # valid_labels (): R on data
        # bert_embeddings_word_embeddings_weight (96, 32): R on data
        # cls.predictions.transform.LayerNorm
        hidden_states = self.cls.predictions.transform.LayerNorm(F.gelu(self.cls.predictions.transform.dense(x)))
        # cls.predictions.decoder
        hidden_states_2 = F.linear(hidden_states, bert_embeddings_word_embeddings_weight, self.cls.predictions.bias)
        del hidden_states
        # BertForMaskedLM
        cross_entropy_sum = kernels.cross_entropy_sum(hidden_states_2, labels, ignore_index=-100, label_smoothing=0.0, partial_axes=("data",))
        return cross_entropy_sum / valid_labels


class Stage0(nn.Module):
    """bert.embeddings to cls.predictions."""

    SPEC = StageSpec(
        inputs={
            "input_ids": TensorSpec((8, 16), torch.int64, {"data": spmd.S(0)}),
            "labels": TensorSpec((8, 16), torch.int64, {"data": spmd.S(0)}),
            "attention_mask": TensorSpec((8, 16), torch.int64, {"data": spmd.S(0)}),
        },
        scalars=("valid_labels",), loss={"data": spmd.P},
        own=LayerSpec(zero=3, data_axes=("data",)),  # of the parameters that several layers share
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("token_type_ids", constants["token_type_ids"], persistent=False)
        self.register_buffer("position_ids", constants["position_ids"], persistent=False)
        self.bert_embeddings_word_embeddings_weight = nn.Parameter(torch.empty(96, 32, device=device, dtype=torch.float64))  # R on data
        self.bert_embeddings = BertEmbeddings(LayerSpec(zero=3, data_axes=("data",)), device=device)
        self.bert_encoder_layer = nn.ModuleDict()
        for i in range(4):
            self.bert_encoder_layer[str(i)] = BertLayer(LayerSpec(zero=3, data_axes=("data",)), device=device)
        self.cls_predictions = BertLMPredictionHead(LayerSpec(zero=3, data_axes=("data",)), device=device)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor, valid_labels: torch.Tensor) -> torch.Tensor:
        hidden = self.bert_embeddings(input_ids, self.token_type_ids, self.position_ids, self.bert_embeddings_word_embeddings_weight)
        for layer in self.bert_encoder_layer.values():
            hidden = layer(hidden, attention_mask)
        return self.cls_predictions(hidden, labels, valid_labels, self.bert_embeddings_word_embeddings_weight)


def prelude(batch: Tensors, constants: Tensors, total: Total) -> Tensors:
    """Scalars of the whole global batch, such as its number of valid tokens."""
    masked_lm_loss = total((batch["labels"] != -100).sum()).to(torch.float64)
    return {"valid_labels": masked_lm_loss}


PROGRAM = ProgramSpec(
    mesh={"data": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    prelude=Prelude(prelude, reads=("labels",), by_rows=True),
    ignored={"labels": -100},  # labels of rows that the loss leaves out
    schedule=microbatches.Microbatches, fsdp=fsdp.ShardedGroup, whole_tensors=whole_tensors.WholeTensors,
)
