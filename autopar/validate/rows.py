"""A row of a file of measurements: what was trained, where, how, and what was measured.

Rows are JSON objects with the fields of ``docs/ground-truth.md``. Strangers' files have gaps: a field that is missing or ``null``
takes the default that the table there gives, and a row that lacks what no default can replace is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import UsageError


class RowError(UsageError):
    """A row that cannot be priced; the message says which field is to blame."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer by its sizes; what tells one capture from another."""

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
class Setting:
    """Degrees and recipe. ``facts`` are words found in the row's prose, such as ``"eager"`` (see ``_FACTS``)."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    chunks: int
    sequence: bool
    zero: int
    recompute: str  # "none", "full" or "selective"
    precision: str  # "bfloat16", "float16", "float32" or "float8"
    global_batch: int
    microbatch: int
    facts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the row says of the machines; names as they stand there."""

    gpu: str
    devices: int
    per_node: int
    network: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a step and bytes at the peak, ``None`` where nothing was printed; whether it failed."""

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


# Words of a row's prose (schedule, recompute, precision, interconnect, notes) that say how it was run.
_FACTS = {
    "eager": r"\beager\b",
    "overlap off": r"overlap (is )?(switched )?off|no overlap|without overlap",
    "all-to-all context": r"\ba2a\b|all-to-all|ulysses",
    "end layers count": r"embedding layers count as pipeline layers",
    "DeepSpeed": r"deepspeed",
    "device memory": r"nvidia-smi",
    "reserved memory": r"\breserved\b",
    "Megatron": r"\bmegatron",
    "async tensor": r"async.?tp|async tensor",
    "unfused attention": r"(unfused|no flash|without flash|non-flash)",
    "flash attention": r"(?<!no )(?<!non-)(?<!without )flash",
}
_PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16",
               "fp32": "float32", "float32": "float32", "tf32": "float32", "fp8": "float8", "float8": "float8",
               "mxfp8": "float8", "nvfp8": "float8"}  # fmt: skip


def labels(data: Mapping[str, Any], number: int) -> tuple[str, str, str]:
    """The row's id, source and group: for reports alone."""
    source = data.get("source")
    if isinstance(source, Mapping):
        source = source.get("title") or source.get("name") or source.get("url") or "?"
    return str(data.get("id") or f"line {number}"), str(source or "?"), str(data.get("group") or "?")


def read_row(data: Mapping[str, Any], number: int) -> Row:
    """The row as records.

    Raises:
        RowError: a field that no default can replace is missing or makes no sense.
    """
    name, source, group = labels(data, number)
    setting = _setting(data)
    return Row(name, source, group, _architecture(data, setting), setting, _hardware(data), measured(data))


def _integer(data: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
            raise RowError(f"{key} = {value!r} is not a whole number")
        return int(value)
    if default is None:
        raise RowError(f"{keys[0]} is not given")
    return default


def _architecture(data: Mapping[str, Any], setting: Setting) -> Architecture:
    model = data.get("model")
    if not isinstance(model, Mapping):
        raise RowError("model is not given")
    hidden, heads = _integer(model, "hidden"), _integer(model, "n_heads")
    gated = model.get("gated_mlp")
    family = str(model.get("family") or "").lower()
    if gated is None:
        gated = any(word in family for word in ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek"))
    dropout = model.get("dropout")
    if dropout is None:  # the recipes of the float16 years trained with dropout 0.1, today's do without
        dropout = 0.1 if setting.precision == "float16" and not gated else 0.0
    tied = model.get("tied_embeddings")
    if hidden % max(heads, 1):
        raise RowError(f"hidden = {hidden} does not divide into n_heads = {heads}")
    vocabulary = _integer(model, "vocab")
    if vocabulary % setting.tensor:  # as Megatron pads it
        part = 128 * setting.tensor
        vocabulary = -(-vocabulary // part) * part
    return Architecture(
        layers=_integer(model, "n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_integer(model, "n_kv_heads", default=heads),
        ffn=_integer(model, "ffn_hidden", "moe_ffn_hidden", default=4 * hidden),
        gated=bool(gated),
        vocabulary=vocabulary,
        seq=_integer(model, "seq_len"),
        tied=(not gated) if tied is None else bool(tied),
        dropout=bool(dropout),
        experts=_integer(model, "n_experts", "num_experts", "experts", default=0),
        experts_per_token=_integer(model, "experts_per_token", "moe_top_k", "top_k", default=2),
    )


def _setting(data: Mapping[str, Any]) -> Setting:
    tensor, pipeline = _integer(data, "tp"), _integer(data, "pp")
    context, expert = _integer(data, "cp", default=1), _integer(data, "ep", default=1)
    devices = _integer(data, "n_gpus")
    group = tensor * pipeline * context
    if not group or devices % group:
        raise RowError(f"tp * pp * cp = {group} does not divide n_gpus = {devices}")
    degree = devices // group
    prose = " ".join(
        str(data.get(key) or "") for key in ("schedule", "recompute", "precision", "interconnect", "notes")
    )
    facts = frozenset(fact for fact, pattern in _FACTS.items() if re.search(pattern, prose, re.IGNORECASE))
    sequence = data.get("sequence_parallel")
    batch = _integer(data, "global_batch")
    microbatch = _integer(data, "micro_batch", default=1)
    if not microbatch or not batch or batch % (degree * microbatch):
        raise RowError(f"global_batch = {batch} does not divide into dp * micro_batch = {degree} * {microbatch}")
    return Setting(
        data=degree,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        chunks=max(1, _integer(data, "vp", default=1)),
        sequence=tensor > 1 and (sequence is None or bool(sequence)),
        zero=_integer(data, "zero_stage", default=1),
        recompute=_recompute(data.get("recompute")),
        precision=_precision(data.get("precision")),
        global_batch=batch,
        microbatch=microbatch,
        facts=facts,
    )


def _recompute(value: object) -> str:
    text = str(value or "none").lower()
    for known in ("full", "selective", "none"):
        if text.startswith(known):
            return known
    if text in ("true", "false"):
        return "full" if text == "true" else "none"
    raise RowError(f"recompute = {value!r} is neither none, selective nor full")


def _precision(value: object) -> str:
    words = re.split(r"[^a-z0-9]+", str(value or "bf16").lower())
    for word in words:
        if word in _PRECISIONS:
            return _PRECISIONS[word]
    raise RowError(f"precision = {value!r} is not known")


def _hardware(data: Mapping[str, Any]) -> Hardware:
    gpu = data.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        raise RowError("gpu is not given")
    devices = _integer(data, "n_gpus")
    per_node = _integer(data, "gpus_per_node", default=8)
    if per_node < 1:
        raise RowError("gpus_per_node = 0")
    return Hardware(gpu, devices, per_node, str(data.get("interconnect") or ""))


def measured(data: Mapping[str, Any]) -> Measured:
    """What the row reports: a step time as printed, or from the tokens per second, or as derived by whoever made the file."""
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
