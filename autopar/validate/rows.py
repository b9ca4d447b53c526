"""Reads a row of a file of measurements: the model, the machines, the trainer's setting, and the measurements.

A row is a JSON object with the fields in ``docs/evidence/validation.md``; a missing or ``null`` field has the default in that table, or
several possible values. A row that lacks a required field is refused with the field's name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.precision import FLOAT16
from autopar.schedules import INTERLEAVED, V_SHAPED
from autopar.techniques import Options
from autopar.techniques.activations import ACTIVATIONS
from autopar.trainers.setting import Setting
from autopar.validate.architecture import Architecture, read_architecture
from autopar.validate.fields import RowError, integer
from autopar.validate.words import (
    dense_layers,
    expert_tensor_degree,
    facts_of,
    microbatches,
    options_of,
    precision_of,
    recomputed,
    schedule_of,
)

__all__ = ["Architecture", "Hardware", "Measured", "Row", "RowError", "labels", "measured", "read_row"]

_CHUNKS = (2, 4, 8)  # numbers of stages of a device that trainers choose from, under interleaving


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
    """A row as it was read. If it leaves fields open whose value differs from run to run, ``settings`` has a setting for every combination
    of their possible values, and ``unknown`` the fields' names; ``choices`` are the combinations, in the order of ``settings``."""

    id: str
    source: str
    group: str
    architecture: Architecture
    settings: tuple[Setting, ...]
    hardware: Hardware
    measured: Measured
    unknown: tuple[str, ...] = ()
    choices: tuple[tuple[Any, ...], ...] = ((),)

    @property
    def setting(self) -> Setting:
        """The setting, or the first of the possible ones."""
        return self.settings[0]


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
    architecture = read_architecture(_model(data), setting.tensor, setting.precision == FLOAT16)
    experts = architecture.experts
    setting = dataclasses.replace(setting, folds=_folds(data, setting, experts))
    if setting.expert > 1 and (not experts or experts % setting.expert):
        raise RowError(f"ep = {setting.expert} does not divide the model's {experts} experts (n_experts)")
    possible = _possible(data, setting, architecture)
    unknown = tuple(field for field, values in possible.items() if len(values) > 1)
    combinations = [dict(zip(possible, values, strict=True)) for values in itertools.product(*possible.values())]
    return Row(
        name,
        source,
        group,
        architecture,
        tuple(_with(data, setting, values) for values in combinations),
        _hardware(data),
        measured(data),
        unknown,
        tuple(tuple(values[field] for field in unknown) for values in combinations),
    )


def _model(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the row's model, which may be a name, with what the row says of it elsewhere."""
    model = data.get("model")
    if isinstance(model, str) and model:
        model = {"name": model}
    if not isinstance(model, Mapping):
        return None
    said = {"seq_len": data.get("seq_len") if model.get("seq_len") is None else model["seq_len"]}
    if (dense := dense_layers(data)) is not None:
        said["n_dense_layers"] = dense
    return {**model, **said}


def _possible(data: Mapping[str, Any], setting: Setting, architecture: Architecture) -> dict[str, tuple[Any, ...]]:
    """Return the possible values of the fields that differ from run to run: one if the row has the field, else the usual ones."""
    sizes = microbatches(data, setting.global_batch // setting.data)
    chunks: tuple[int, ...] = (setting.chunks,)
    if setting.schedule == INTERLEAVED and data.get("vp") is None:
        each = architecture.layers // setting.pipeline
        chunks = tuple(n for n in _CHUNKS if each % n == 0) or _CHUNKS[:1]
    return {ACTIVATIONS.run_fields[0]: recomputed(data), "micro_batch": sizes, "vp": chunks}


def _with(data: Mapping[str, Any], setting: Setting, values: Mapping[str, Any]) -> Setting:
    """Return the setting with one of its possible values of each field. A run with virtual stages is a tuned recipe, which overlaps."""
    options, chunks = options_of(data, values[ACTIVATIONS.run_fields[0]]), values["vp"]
    facts = setting.facts | ({"overlapped gradients", "overlapped tensor"} if chunks > 1 else set())
    return dataclasses.replace(setting, options=options, microbatch=values["micro_batch"], chunks=chunks, facts=facts)


def _setting(data: Mapping[str, Any]) -> Setting:
    """Return the row's setting; ``_with`` sets what may have several values."""
    devices = integer(data, "n_gpus", least=1)
    context, expert = integer(data, "cp", default=1, least=1), integer(data, "ep", default=1, least=1)
    tensor, pipeline = integer(data, "tp", least=1), integer(data, "pp", least=1)
    group = tensor * pipeline * context
    if devices % group:
        raise RowError(f"tp * pp * cp = {group} does not divide n_gpus = {devices}")
    degree = devices // group
    given = data.get("sequence_parallel")
    sequence = tensor > 1 and (given is None or bool(given))
    batch = integer(data, "global_batch", least=1)
    microbatch = integer(data, "micro_batch", default=1, least=1)
    if batch % (degree * microbatch):
        raise RowError(f"global_batch = {batch} does not divide into dp * micro_batch = {degree} * {microbatch}")
    schedule = schedule_of(data, pipeline)
    return Setting(
        data=degree,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        chunks=max(1, integer(data, "vp", default=2 if schedule in V_SHAPED else 1)),
        sequence=sequence,
        zero=_zero(data),
        options=Options(),
        precision=precision_of(data.get("precision")),
        global_batch=batch,
        microbatch=microbatch,
        facts=facts_of(data),
        replicate=_hsdp_replicas(data, degree * context, tensor * context),
        schedule=schedule,
    )


def _folds(data: Mapping[str, Any], s: Setting, experts: int) -> frozenset[str]:
    """Return the axes besides the data-parallel one over which experts are distributed.

    Experts have a grid of their own over a stage's ranks (Megatron's parallel folding): ``etp`` tensor-parallel ranks share an expert. If
    the row has no ``etp``, it is ``tp``, as of other layers, unless there are fewer experts than ``tp * ep`` ranks or too few ranks for
    ``ep``: then it is 1. Experts are distributed over tensor-parallel ranks first (if ``etp`` is 1), over context-parallel ranks if they
    have to be, and then over data-parallel ranks.
    """
    etp = integer(data, "etp", "expert_tp", default=expert_tensor_degree(data) or 0) or None
    if s.expert == 1 and not (experts and etp == 1 < s.tensor):
        return frozenset()
    if etp not in (None, 1, s.tensor):
        raise RowError(f"etp = {etp} is neither 1 nor tp = {s.tensor}")
    if etp == 1 < s.tensor and not s.sequence:
        raise RowError("sequence_parallel is false: without it, experts over tensor-parallel ranks have no price")
    whole: tuple[tuple[str, ...], ...] = ((), ("context",))
    over_tensor: tuple[tuple[str, ...], ...] = (("tensor",), ("tensor", "context")) if s.sequence else ()
    if etp == 1:
        tried = over_tensor or whole
    elif etp == s.tensor:
        tried = whole
    else:
        tried = over_tensor + whole if s.tensor * s.expert > experts else whole + over_tensor
    for names in tried:
        folded = math.prod({"tensor": s.tensor, "context": s.context}[name] for name in names)
        if s.expert % folded == 0 and s.data % (s.expert // folded) == 0:
            return frozenset(names) if s.context > 1 else frozenset(names) - {"context"}
    raise RowError(
        f"ep = {s.expert} does not divide dp = {s.data}, nor dp with the whole of tp = {s.tensor} or cp = {s.context}"
    )


def _hsdp_replicas(data: Mapping[str, Any], data_ranks: int, inner: int) -> int:
    """Return the number of HSDP replicas: one, or the number of nodes if the row's flags say that FSDP shards only within a node.

    Each data-parallel rank has ``inner`` devices, for tensor and context parallelism.
    """
    flags = data.get("flags")
    if not isinstance(flags, list) or not any(str(flag).endswith("within_a_node_only") for flag in flags):
        return 1
    shard_ranks = integer(data, "gpus_per_node", default=8, least=1) // inner
    return data_ranks // shard_ranks if shard_ranks > 1 and data_ranks % shard_ranks == 0 else 1


def _zero(data: Mapping[str, Any]) -> int:
    stage = integer(data, "zero_stage", default=1)
    if stage > 3:
        raise RowError(f"zero_stage = {stage}: there are stages 0 to 3")
    return stage


def _hardware(data: Mapping[str, Any]) -> Hardware:
    gpu = data.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        raise RowError("gpu is missing")
    devices = integer(data, "n_gpus", least=1)
    per_node = integer(data, "gpus_per_node", default=8, least=1)
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
    if step is None and rate is not None:
        sizes = [
            number(data.get("global_batch")),
            number((_model(data) or {}).get("seq_len")),
            number(data.get("n_gpus")),
        ]
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
