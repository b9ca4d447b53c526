"""Reads a row of a file of measurements: the model, the machines, the trainer's setting, and the measurements.

A row is a JSON object with the fields in ``docs/evidence/validation.md``; a missing or ``null`` field has the default in that table. A row
that lacks a required field is refused with the field's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import UsageError
from autopar.precision import FLOAT8, SPELLINGS, TF32
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.technique import Technique
from autopar.trainers.setting import Setting


class RowError(UsageError):
    """The row can't be priced; the message names the field that is missing or invalid."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer, described by its sizes. Rows with equal architectures and batches share one capture."""

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


@dataclass(frozen=True, slots=True)
class Hardware:
    """The row's machines; ``gpu`` and ``network`` are spelled as in the row."""

    gpu: str
    devices: int
    per_node: int
    network: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured seconds per step and peak bytes, ``None`` if unknown, and whether the run failed for lack of memory."""

    step_s: float | None
    memory_bytes: float | None
    failed: bool


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    source: str
    group: str
    architecture: Architecture
    setting: Setting
    hardware: Hardware
    measured: Measured


# fact about how a row was run -> pattern that finds it in the row's prose (``_PROSE``)
_FACTS = {
    "eager": r"\beager\b",
    "compiled": r"\bcompil",
    "overlap off": r"overlap (is )?(switched )?off|no overlap|without overlap",
    "all-to-all context": r"\ba2a\b|all-to-all|ulysses",
    "DeepSpeed": r"deepspeed",
    "device memory": r"nvidia-smi",
    "reserved memory": r"\breserved\b",
    "Megatron": r"\bmegatron|\bnemo\b|\bmcore\b|distributed.?(fused.?adam|optimizer)|transformer.?engine",
    "16-bit gradients": r"distributed_fused_adam|grad_(sync|reduce)_dtype\W{1,3}bf16|(bf16|bfloat16) grad",
    "overlapped gradients": r"overlap[ _-]?grad|gradient.{0,12}overlap",
    "overlapped tensor": r"(ub_)?tp_comm_overlap|async.?tp|async tensor",
    "fused loss": r"fused (ce\b|cross|loss)|liger",
    "unfused attention": r"(unfused|no flash|without flash|non-flash)",
    "flash attention": r"(?<!no )(?<!non-)(?<!without )flash",
}
_PROSE = ("schedule", *ACTIVATIONS.run_fields, "precision", "interconnect", "notes", "quote")
_MAX_INTEGER = 2**40  # the largest allowed number in a row
_MAX_LAYERS = 10_000  # the largest allowed number of layers
_PRECISIONS = SPELLINGS | {TF32: TF32} | dict.fromkeys(("fp8", "float8", "mxfp8", "nvfp8"), FLOAT8)


def labels(data: Mapping[str, Any], number: int) -> tuple[str, str, str]:
    """Return the row's id, source and group."""
    source = data.get("source")
    if isinstance(source, Mapping):
        source = source.get("title") or source.get("name") or source.get("url") or "?"
    return str(data.get("id") or f"line {number}"), str(source or "?"), str(data.get("group") or "?")


def read_row(data: Mapping[str, Any], number: int) -> Row:
    """Read a row. Raises ``RowError`` for a missing field without a default, or an invalid value."""
    name, source, group = labels(data, number)
    setting = _setting(data)
    return Row(name, source, group, _architecture(data, setting), setting, _hardware(data), measured(data))


def _integer(data: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 0) -> int:
    """Return the integer under the first of ``keys`` that the row has. Raises ``RowError`` if it is not an integer from ``least`` to
    ``_MAX_INTEGER``, or if the row has none of the keys and there is no ``default``."""
    for key in keys:
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not float(value).is_integer():
            raise RowError(f"{key} = {value!r} is not a whole number")
        if not least <= value <= _MAX_INTEGER:
            raise RowError(f"{key} = {value:g} is not between {least} and {_MAX_INTEGER:g}")
        return int(value)
    if default is None:
        raise RowError(f"{keys[0]} is missing")
    return default


def _architecture(data: Mapping[str, Any], setting: Setting) -> Architecture:
    model = data.get("model")
    if not isinstance(model, Mapping):
        raise RowError("model is missing")
    hidden = _integer(model, "hidden", "hidden_size", least=1)
    heads = _integer(model, "n_heads", "num_attention_heads", least=1)
    gated = model.get("gated_mlp")
    family = str(model.get("family") or "").lower()
    if gated is None:
        gated = any(word in family for word in ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek"))
    dropout = model.get("dropout")
    if dropout is None:  # recipes of the float16 era used dropout 0.1, later ones use none
        dropout = 0.1 if setting.precision == "float16" and not gated else 0.0
    tied = model.get("tied_embeddings")
    if hidden % heads:
        raise RowError(f"hidden = {hidden} does not divide into n_heads = {heads}")
    kv_heads = _integer(model, "n_kv_heads", "num_key_value_heads", default=heads, least=1)
    if heads % kv_heads:
        raise RowError(f"n_heads = {heads} does not divide into n_kv_heads = {kv_heads}")
    layers = _integer(model, "n_layers", "num_hidden_layers", least=1)
    if layers > _MAX_LAYERS:
        raise RowError(f"n_layers = {layers} is more than {_MAX_LAYERS}")
    vocabulary = _integer(model, "vocab", "vocab_size", least=1)
    if vocabulary % setting.tensor:  # pad it, as Megatron does
        part = 128 * setting.tensor
        vocabulary = -(-vocabulary // part) * part
    experts = _integer(model, "n_experts", "num_experts", "experts", default=0)
    if setting.expert > 1 and (not experts or experts % setting.expert):
        raise RowError(f"ep = {setting.expert} does not divide the model's {experts} experts (n_experts)")
    wide = ("ffn_hidden", "intermediate_size")
    inner = ("moe_ffn_hidden", *wide) if experts else (*wide, "moe_ffn_hidden")
    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=_integer(model, *inner, default=4 * hidden, least=1),
        gated=bool(gated),
        vocabulary=vocabulary,
        seq=_integer(model, "seq_len", "seq_length", least=1),
        tied=(not gated) if tied is None else bool(tied),
        dropout=bool(dropout),
        experts=experts,
        experts_per_token=_integer(model, "experts_per_token", "moe_top_k", "top_k", default=2),
    )


def _setting(data: Mapping[str, Any]) -> Setting:
    devices = _integer(data, "n_gpus", least=1)
    context, expert = _integer(data, "cp", default=1, least=1), _integer(data, "ep", default=1, least=1)
    tensor, pipeline = _integer(data, "tp", least=1), _integer(data, "pp", least=1)
    group = tensor * pipeline * context
    if devices % group:
        raise RowError(f"tp * pp * cp = {group} does not divide n_gpus = {devices}")
    degree = devices // group
    if degree % expert:  # expert parallelism divides the data-parallel ranks
        raise RowError(f"ep = {expert} does not divide dp = {degree}")
    prose = " ".join(str(data.get(key) or "") for key in _PROSE)
    facts = frozenset(fact for fact, pattern in _FACTS.items() if re.search(pattern, prose, re.IGNORECASE))
    sequence = data.get("sequence_parallel")
    batch = _integer(data, "global_batch", least=1)
    microbatch = _integer(data, "micro_batch", default=1, least=1)
    if batch % (degree * microbatch):
        raise RowError(f"global_batch = {batch} does not divide into dp * micro_batch = {degree} * {microbatch}")
    return Setting(
        data=degree,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        chunks=max(1, _integer(data, "vp", default=1)),
        sequence=tensor > 1 and (sequence is None or bool(sequence)),
        zero=_zero(data),
        activations=_value(ACTIVATIONS, data),
        precision=_precision(data.get("precision")),
        global_batch=batch,
        microbatch=microbatch,
        facts=facts,
        replicate=_hsdp_replicas(data, degree * context, tensor * context),
    )


def _hsdp_replicas(data: Mapping[str, Any], data_ranks: int, inner: int) -> int:
    """Return the number of HSDP replicas: one, or the number of nodes if the row's flags say that FSDP shards only within a node.

    Each data-parallel rank has ``inner`` devices, for tensor and context parallelism.
    """
    flags = data.get("flags")
    if not isinstance(flags, list) or not any(str(flag).endswith("within_a_node_only") for flag in flags):
        return 1
    shard_ranks = _integer(data, "gpus_per_node", default=8, least=1) // inner
    return data_ranks // shard_ranks if shard_ranks > 1 and data_ranks % shard_ranks == 0 else 1


def _zero(data: Mapping[str, Any]) -> int:
    stage = _integer(data, "zero_stage", default=1)
    if stage > 3:
        raise RowError(f"zero_stage = {stage}: there are stages 0 to 3")
    return stage


def _value(technique: Technique, data: Mapping[str, Any]) -> str:
    try:
        return technique.of_run(data)
    except UsageError as error:
        raise RowError(error.message) from None


def _precision(value: object) -> str:
    words = re.split(r"[^a-z0-9]+", str(value or "bf16").lower())
    for word in words:
        if word in _PRECISIONS:
            return _PRECISIONS[word]
    raise RowError(f"precision = {value!r} is not known")


def _hardware(data: Mapping[str, Any]) -> Hardware:
    gpu = data.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        raise RowError("gpu is missing")
    devices = _integer(data, "n_gpus", least=1)
    per_node = _integer(data, "gpus_per_node", default=8, least=1)
    return Hardware(gpu, devices, per_node, str(data.get("interconnect") or ""))


def measured(data: Mapping[str, Any]) -> Measured:
    """Return the row's measurements. The step time is the published one, else that of the published tokens per second, else the one that
    the file's author derived."""
    printed, derived = data.get("measured") or {}, data.get("derived") or {}

    def number(value: object) -> float | None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        return float(value) if good else None  # type: ignore[arg-type]

    step = number(printed.get("step_time_s"))
    rate = number(printed.get("tokens_per_s_per_gpu"))
    model = data.get("model") or {}
    if step is None and rate is not None:
        sizes = [number(data.get("global_batch")), number(model.get("seq_len")), number(data.get("n_gpus"))]
        if all(sizes):
            batch, seq, devices = (float(size or 0) for size in sizes)
            step = batch * seq / (rate * devices)
    if step is None:
        step = next(
            (s for key, value in derived.items() if key.startswith("step_time_s") and (s := number(value))), None
        )
    memory = number(printed.get("peak_mem_gb"))
    failed = bool(data.get("oom"))
    return Measured(None if failed else step, None if failed or memory is None else memory * 2**30, failed)
