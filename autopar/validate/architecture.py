"""Reads the architecture of a row's model; sizes that the row lacks are those of the published model that it names.

Sizes have the names of ``docs/evidence/validation.md`` or those of a transformers ``config.json``.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.validate.fields import RowError, integer
from autopar.zoo.catalogue import CATALOGUE

_MAX_LAYERS = 10_000  # the largest allowed number of layers
_GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek", "glm", "gpt-oss", "gpt_oss", "kimi")
_UNPRICED = (
    r"mamba|jamba|rwkv|hybrid|state.space|linear.attention|deltanet|qwen3-?next|nemotron-?h\b"  # layers without a price
)
_ATTENTION = r"mla|latent|mha|gqa|mqa|multi.head|multi.query|grouped|full|causal|dense|flash|sliding|window|softmax"
_LATENT = r"\bmla\b|latent"
_PARAMETERS_TOLERANCE = 0.03  # by how much two published parameter counts of a model differ

_LAYERS = ("n_layers", "num_hidden_layers", "n_layer")
_HIDDEN = ("hidden", "hidden_size", "n_embd")
_HEADS = ("n_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads")
_FFN = ("ffn_hidden", "intermediate_size", "n_inner")
_EXPERT_FFN = ("moe_ffn_hidden", "moe_intermediate_size")
_EXPERTS = ("n_experts", "num_experts", "experts", "n_routed_experts", "num_local_experts")
_CHOSEN = ("experts_per_token", "moe_top_k", "top_k", "num_experts_per_tok")
_GROUPS = ("n_group", "moe_router_num_groups")
_CHOSEN_GROUPS = ("topk_group", "moe_router_group_topk")
_DENSE = ("n_dense_layers", "dense_layers", "first_k_dense_replace")
_PREDICTORS = ("n_mtp_layers", "mtp_num_layers", "num_nextn_predict_layers")
_EVERY = ("moe_layer_freq", "moe_every", "interleave_moe_layer_step", "decoder_sparse_step")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (arXiv:2405.04434, section 2.1): the ranks of compressed queries (0 if they are whole) and of
    compressed keys and values, and the dims of a head: without position, with it, and of values."""

    query_rank: int
    rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer, described by its sizes. Rows with equal architectures and batches share one capture.

    ``head`` is the dim of a head, 0 for ``hidden / heads``. Of a mixture, ``expert_ffn`` is the width of an expert (0: ``ffn``); the first
    ``dense_layers`` blocks have an MLP of width ``ffn`` instead of experts; a token's experts are in at most ``chosen_groups`` of
    ``groups`` equal groups. ``qk_norm``: queries and keys are normalised. ``squared_relu``: the activation of an MLP without gate.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocabulary: int
    seq: int
    tied: bool
    dropout: bool
    experts: int = 0
    experts_per_token: int = 0
    head: int = 0
    latent: LatentAttention | None = None
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    qk_norm: bool = False
    squared_relu: bool = False
    groups: int = 1
    chosen_groups: int = 1

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads


def read_architecture(model: Mapping[str, Any] | None, tensor: int, float16: bool) -> Architecture:
    """Return the architecture of a row's model, whose vocabulary is padded for ``tensor`` ranks, as Megatron does.

    Recipes of the ``float16`` era used dropout 0.1, later ones use none. Raises ``RowError`` for a missing or invalid size, and for layers
    that have no price.
    """
    if model is None:
        raise RowError("model is missing")
    model = _completed(model)
    family = " ".join(str(model.get(key) or "") for key in ("family", "name", "model_type")).lower()
    _check_priced(model, family)
    hidden, heads = integer(model, *_HIDDEN, least=1), integer(model, *_HEADS, least=1)
    given_gate, tied, dropout = (model.get(key) for key in ("gated_mlp", "tied_embeddings", "dropout"))
    gated = any(word in family for word in _GATED) if given_gate is None else bool(given_gate)
    if dropout is None:
        dropout = float16 and not gated
    tied = model.get("tie_word_embeddings") if tied is None else tied
    latent = _latent(model)
    head = integer(model, "head_dim", "kv_channels", default=0)
    if hidden % heads and not head and not latent:
        raise RowError(f"hidden = {hidden} does not divide into n_heads = {heads}")
    kv_heads = heads if latent else integer(model, *_KV_HEADS, default=heads, least=1)
    if heads % kv_heads:
        raise RowError(f"n_heads = {heads} does not divide into n_kv_heads = {kv_heads}")
    layers = integer(model, *_LAYERS, least=1)
    if layers > _MAX_LAYERS:
        raise RowError(f"n_layers = {layers} is more than {_MAX_LAYERS}")
    vocabulary = integer(model, "vocab", "vocab_size", least=1)
    if vocabulary % tensor:
        part = 128 * tensor
        vocabulary = -(-vocabulary // part) * part
    experts = integer(model, *_EXPERTS, default=0)
    if model.get("moe") is True and not experts:
        raise RowError("n_experts is missing")
    if experts and not gated:
        raise RowError("gated_mlp = false: experts without a gate have no price")
    ffn = integer(model, *_FFN, *_EXPERT_FFN, default=4 * hidden, least=1)
    expert_ffn = integer(model, *_EXPERT_FFN, default=ffn, least=1) if experts else 0
    groups, chosen_groups = _groups(model, experts) if experts else (1, 1)
    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=gated,
        vocabulary=vocabulary,
        seq=integer(model, "seq_len", "seq_length", least=1),
        tied=(not gated) if tied is None else bool(tied),
        dropout=bool(dropout),
        experts=experts,
        experts_per_token=integer(model, *_CHOSEN, default=2),
        head=0 if latent or head * heads == hidden else head,
        latent=latent,
        expert_ffn=expert_ffn,
        shared_experts=_shared_experts(model, expert_ffn) if experts else 0,
        dense_layers=_dense_layers(model, layers) if experts else 0,
        qk_norm="qwen3" in family and not latent,
        squared_relu="nemotron" in family and not gated,
        groups=groups,
        chosen_groups=chosen_groups,
    )


def _check_priced(model: Mapping[str, Any], family: str) -> None:
    """Raise ``RowError`` if the model has layers that no captured model has."""
    attention = str(model.get("attention") or "").lower()
    if found := re.search(_UNPRICED, f"{family} {attention}"):
        raise RowError(f"layers of the kind {found.group()!r} have no price")
    if attention and not re.search(_ATTENTION, attention):
        raise RowError(f"attention = {attention!r} has no price")
    if integer(model, *_PREDICTORS, default=0):
        name = next(key for key in _PREDICTORS if model.get(key) is not None)
        raise RowError(f"{name} = {model[name]}: layers that predict further tokens have no price")


def _latent(model: Mapping[str, Any]) -> LatentAttention | None:
    if model.get("kv_lora_rank") is None and not re.search(_LATENT, str(model.get("attention") or "").lower()):
        return None
    return LatentAttention(
        query_rank=integer(model, "q_lora_rank", default=0),
        rank=integer(model, "kv_lora_rank", least=1),
        plain=integer(model, "qk_nope_head_dim", least=1),
        rotary=integer(model, "qk_rope_head_dim", least=1),
        value=integer(model, "v_head_dim", least=1),
    )


def _shared_experts(model: Mapping[str, Any], expert_ffn: int) -> int:
    """Return the number of experts that every token takes; a shared expert may be given by its width."""
    count = integer(model, "n_shared_experts", "num_shared_experts", default=0)
    width = integer(model, "shared_expert_ffn_hidden", "shared_expert_intermediate_size", default=0)
    if width and not count:
        count, rest = divmod(width, expert_ffn)
        if rest:
            raise RowError(f"a shared expert of width {width} is not a multiple of an expert of width {expert_ffn}")
    return count


def _groups(model: Mapping[str, Any], experts: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those that a token's experts are in at most."""
    groups, chosen = integer(model, *_GROUPS, default=1, least=1), integer(model, *_CHOSEN_GROUPS, default=1, least=1)
    if experts % groups or chosen > groups:
        raise RowError(f"{chosen} of {groups} groups of n_experts = {experts} can't be chosen")
    return groups, chosen


def _dense_layers(model: Mapping[str, Any], layers: int) -> int:
    """Return how many of the first blocks have no experts; ``moe_layer_freq`` may be a list with a 1 for each block that has them."""
    key = next((key for key in _EVERY if model.get(key) is not None), None)
    pattern = model[key] if key else 1
    if isinstance(pattern, list):
        dense = pattern.index(1) if 1 in pattern else len(pattern)
        if len(pattern) != layers or pattern != [0] * dense + [1] * (layers - dense):
            raise RowError(f"{key}: blocks with and without experts take turns, which has no price")
    else:
        if key and integer(model, key, least=1) > 1:
            raise RowError(f"{key} = {pattern}: blocks with and without experts take turns, which has no price")
        dense = integer(model, *_DENSE, default=0)
    if dense >= layers:
        raise RowError(f"n_dense_layers = {dense} leaves none of n_layers = {layers} with experts")
    return dense


def _completed(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model with the missing sizes of the published model that it names, unless the sizes that it has contradict them."""
    given = {key: value for key, value in model.items() if value is not None}
    for config in _named(model):
        if all(_agree(given, config, keys) for keys in (_HIDDEN, _HEADS, _EXPERTS)):
            return {**config, **given}
    return model


def _agree(given: Mapping[str, Any], config: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    ours, theirs = ([data[key] for key in keys if key in data] for data in (given, config))
    return not ours or not theirs or ours[0] == theirs[0]


def _named(model: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the configurations of published models with the row's name, then those of its family with its number of parameters."""
    names = [_plain(name) for key in ("name", "family") if isinstance(name := model.get(key), str)]
    billions = model.get("params_b")
    for name, (_, config) in _published().items():
        if name in names:
            yield config
    if isinstance(billions, (int, float)) and not isinstance(billions, bool):
        for name, (parameters, config) in _published().items():
            near = abs(billions * 1e9 / parameters - 1) <= _PARAMETERS_TOLERANCE
            if near and any(family and name.startswith(family) for family in names):
                yield config


def _plain(name: str) -> str:
    """Return a model's name without what spellings differ in: case, punctuation and words such as "Instruct"."""
    words = re.sub(
        r"\b(instruct|base|hf|pretrain(ing)?|model|meta|nvidia|openai)\b", " ", name.lower().replace("_", "-")
    )
    return re.sub(r"[^a-z0-9]", "", words)


@functools.cache
def _published() -> dict[str, tuple[float, Mapping[str, Any]]]:
    """Return the number of parameters and the configuration of published models by plain name: the zoo's and those in ``models.toml``."""
    found = {_plain(entry.name): (entry.parameters, entry.config) for entry in CATALOGUE if entry.seq}
    data = tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))
    found |= {_plain(name): (entry["parameters"], entry["config"]) for name, entry in data["models"].items()}
    return found | {_plain(name): found[_plain(other)] for name, other in data["also"].items()}
