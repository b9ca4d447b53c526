"""Trainers on PyTorch's FSDP2: torchtitan, and Hugging Face Accelerate."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.precision import FLOAT8, FP8, SPELLINGS
from autopar.techniques.activations import FULL, GRANULARITIES, KEEP
from autopar.trainers.flags import read_flags
from autopar.trainers.layout import stage_bounds
from autopar.trainers.options import Option
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import (
    FACT,
    Exported,
    Flag,
    Reading,
    Space,
    Trainer,
    TrainerCosts,
    granularity_word,
    switch,
    whole_number,
)


class FullyShardedCosts(TrainerCosts):
    """What trainers on FSDP2 have in common. The first and the last layer are in the root unit, whose parameters stay gathered from
    forward to backward."""

    evidence = "fsdp"

    def terms(self, s: Setting) -> dict[str, Any]:
        fused = "fused loss" in s.facts
        return {"fsdp": True, "loss_copies": 0 if fused else 2 if s.tensor > 1 else 1}

    def root_zero(self, s: Setting) -> int | None:
        return 2


def _degree(text: str) -> int:
    """Return a degree, or -1 for the remaining devices."""
    return -1 if text == "-1" else whole_number(text)


def _kind(text: str) -> str:
    if text.lower() not in GRANULARITIES:
        raise UsageError(f"activation checkpointing is {text!r}", f"these are read: {', '.join(GRANULARITIES)}")
    return GRANULARITIES[text.lower()]


def _precision(text: str) -> str:
    return SPELLINGS.get(text.lower(), text)


def _parts(text: str) -> list[list[str]]:
    """Return lists of names, from words or as Python writes them."""
    try:
        found = ast.literal_eval(text) if text.startswith("[") else [word.split(",") for word in text.split()]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        found = [None]
    if not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in found):
        raise UsageError(f"{text[:40]!r} is not a list of lists of module names", "torchtitan's have one list a stage")
    return list(found)


_, PART, _ = GRANULARITIES.values()

_TITAN = {
    "parallelism.tensor_parallel_degree": Flag("tensor", whole_number),
    "parallelism.pipeline_parallel_degree": Flag("pipeline", whole_number),
    "parallelism.context_parallel_degree": Flag("context", whole_number),
    "parallelism.expert_parallel_degree": Flag("expert", whole_number),
    "parallelism.data_parallel_shard_degree": Flag("shard", _degree),
    "parallelism.data_parallel_replicate_degree": Flag("replicate", whole_number),
    "parallelism.fsdp_reshard_after_forward": Flag("reshard", str),
    "parallelism.enable_sequence_parallel": Flag("sequence", switch),
    "parallelism.no_enable_sequence_parallel": Flag("sequence", False),
    "parallelism.pipeline_parallel_schedule": Flag("schedule", str),
    "parallelism.pipeline_parallel_microbatch_size": Flag("pipeline_microbatch", whole_number),
    "parallelism.pipeline_parallel_layers_per_stage": Flag("chunk_layers", whole_number),
    "parallelism.module_fqns_per_model_part": Flag("parts", _parts),
    "training.local_batch_size": Flag("local", whole_number),
    "training.global_batch_size": Flag("global_batch", _degree),
    "training.seq_len": Flag("seq", whole_number),
    # versions after 0.3 give a rank's microbatch in tokens
    "training.num_tokens_per_microbatch_per_dp_rank": Flag("local_tokens", whole_number),
    "training.max_context_length": Flag("seq", whole_number),
    "training.mixed_precision_param": Flag("precision", _precision),
    "activation_checkpoint": Flag("activations", str),
    "activation_checkpoint.mode": Flag("activations", str),
    "full_ac()": Flag("activations", "full"),
    "selective_ac()": Flag("activations", granularity_word(PART)),
    "float8_linear_converter()": Flag("precision", FLOAT8),
    "compile.enable": Flag(FACT, "compiled"),
    "compile.enable_async_tensor_parallel": Flag(FACT, "overlapped tensor"),
    "parallelism.enable_async_tensor_parallel": Flag(FACT, "overlapped tensor"),
    "memory_budget_ac()": Flag("activations", "memory-budget"),
    "chunked_loss_wrapper()": Flag(FACT, "fused loss"),
}
_SCHEDULES = {"1F1B": False, "Interleaved1F1B": True}


class Torchtitan(FullyShardedCosts, Trainer):
    name = "torchtitan"
    title = "torchtitan"
    space = Space(
        zero=(2, 3),
        activations=tuple(GRANULARITIES.values()),
        tensor=True,
        pipeline=True,
        context=True,
        expert=True,
        folds=(frozenset({"context", "tensor"}),),
        chunks=True,
        replicate=True,
        uneven=True,
        deviations=(FP8.name,),
    )
    facts = frozenset({"compiled", "flash attention", "fused loss"})
    flags = _TITAN

    def key(self, name: str) -> str:
        return name.lstrip("-").replace("-", "_")

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        fields = _titan_fields(s, graph)
        policy = granularity_word(s.activations)
        lines = [
            "# source this file, and start: torchrun ... -m torchtitan.train --module M --config C ${PLAN_ARGS[@]}"
        ]
        words = [_titan_words(section, name, value) for (section, name), value in fields.items()]
        lines += ["PLAN_ARGS=(", *(f"    {word}" for word in words), f"    activation_checkpoint:{policy}", ")"]
        return Exported(
            {
                "torchtitan_args.sh": "\n".join(lines) + "\n",
                "torchtitan_plan.py": _titan_function(fields, policy, "fused loss" in s.facts),
            },
            tuple(_titan_notes(s)),
        )

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        found = read_flags(options, self.flags, self.key)
        if found is None:
            return None
        values, facts, notes = dict(found.values), {"flash attention", *found.facts}, [*found.notes]
        pipeline, local, tokens = values.get("pipeline", 1), values.pop("local", 8), values.pop("local_tokens", None)
        if tokens and values.get("seq"):
            local = max(1, tokens // values["seq"])
        elif tokens:
            notes.append(
                f"{tokens} tokens of a rank's microbatch are not read, because max_context_length is not in the file"
            )
        micro = values.pop("pipeline_microbatch", 1)
        inner = math.prod(values.get(name, 1) for name in ("tensor", "pipeline", "context"))
        data = max(1, devices // inner)
        if values.get("global_batch", -1) == -1:
            values["global_batch"] = local * data
        values["microbatch"] = micro if pipeline > 1 else local
        if pipeline > 1 and values["global_batch"] != local * data:
            notes.append("gradient accumulation around a pipeline is priced as one pipeline of all microbatches")
        schedule = values.pop("schedule", "1F1B")
        if pipeline > 1 and schedule not in _SCHEDULES:
            raise UsageError(f"the schedule {schedule} is not priced", f"these are: {', '.join(_SCHEDULES)}")
        each = values.pop("chunk_layers", None)
        if pipeline > 1 and _SCHEDULES[schedule]:
            values["chunks"] = max(2, -(-(blocks + 2) // each) // pipeline) if each else 2
        parts = values.pop("parts", None)
        if pipeline > 1 and parts:
            values |= _stages(parts, blocks, pipeline)
        values |= _sharding(values, data, pipeline)
        values.setdefault("sequence", values.get("tensor", 1) > 1)
        if any(self.key(option.name) == "activation_checkpoint" and option.value is None for option in options):
            values["activations"] = "none"
        if "activations" not in values:
            notes.append("activation checkpointing is not set: torchtitan's default, selective, is priced")
        values["activations"] = _kind(values.get("activations", granularity_word(PART)))
        if values.get("expert", 1) > 1:
            values["folds"] = frozenset(name for name in ("context", "tensor") if values.get(name, 1) > 1)
        values.setdefault("precision", "bfloat16")
        return Reading(values, frozenset(facts), tuple(notes))


def _stages(parts: Sequence[Sequence[str]], blocks: int, pipeline: int) -> dict[str, Any]:
    """Return the chunks of a pipeline whose stages have these modules, and its cuts if the number of blocks is known."""
    if len(parts) % pipeline:
        raise UsageError(
            f"module_fqns_per_model_part has {len(parts)} stages, which {pipeline} pipeline ranks do not divide",
            "give every rank equally many",
        )
    chunks = {"chunks": len(parts) // pipeline}
    if not blocks:
        return chunks
    (whole,) = stage_modules((0, blocks + 2))
    if [name for part in parts for name in part] != whole:
        raise UsageError(
            f"module_fqns_per_model_part does not have the modules of {blocks} blocks in their order",
            f"stages together have {', '.join(whole[:2])}, ..., {', '.join(whole[-2:])}",
        )
    sizes = [len(part) - ("norm" in part) for part in parts]
    return chunks | {"cuts": tuple(itertools.accumulate(sizes))[:-1]}


def _sharding(values: dict[str, Any], data: int, pipeline: int) -> dict[str, Any]:
    """Return the ZeRO stage and the number of HSDP replicas of torchtitan's degrees."""
    policy, replicate = values.pop("reshard", "default"), values.pop("replicate", 1)
    shard = _shard_degree(values, data, replicate)
    if shard == 1 and values.get("context", 1) == 1:
        return {"zero": 0, "replicate": 1}
    stage = {"always": 3, "never": 2}.get(policy, 3 if pipeline == 1 else 2)
    return {"zero": stage, "replicate": replicate}


def _shard_degree(values: dict[str, Any], data: int, replicate: int) -> int:
    """Return the degree of sharding, which with the replicas makes up the data-parallel ranks. Raises ``UsageError`` if it does not."""
    shard = int(values.pop("shard", -1))
    if shard not in (-1, data // replicate) or data % replicate:
        raise UsageError(
            f"{replicate} replicas of {shard} shards are not the {data} data-parallel ranks of these devices",
            "change the degrees, or --devices",
        )
    return data // replicate


def _titan_fields(s: Setting, graph: Graph) -> dict[tuple[str, str], Any]:
    """Return torchtitan's configuration by (section, field)."""
    micro = {"pipeline_parallel_microbatch_size": s.microbatch} if s.pipeline > 1 else {}
    schedule = {"pipeline_parallel_schedule": "Interleaved1F1B" if s.chunks > 1 else "1F1B"} if s.pipeline > 1 else {}
    parts = {"module_fqns_per_model_part": stage_modules(stage_bounds(graph, s))} if s.pipeline > 1 else {}
    replicate = s.replicate if s.zero else s.data  # without ZeRO all ranks are replicas
    parallelism = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": s.data // replicate,
        "fsdp_reshard_after_forward": "always" if s.zero == 3 else "never",
        "tensor_parallel_degree": s.tensor,
        **({"enable_sequence_parallel": s.sequence} if s.tensor > 1 else {}),
        "context_parallel_degree": s.context,
        "expert_parallel_degree": s.expert,
        "pipeline_parallel_degree": s.pipeline,
        **schedule,
        **micro,
        **parts,
    }
    training = {
        "local_batch_size": s.microbatch * (s.microbatches if s.pipeline > 1 else 1),
        "global_batch_size": s.global_batch,
        "seq_len": graph.tokens // graph.batch_size,
        "mixed_precision_param": s.precision if s.precision in ("bfloat16", "float32") else "bfloat16",
        # torchtitan refuses them with a pipeline, and with experts whose tokens the host counts
        **({"disable_cuda_graphs": True} if s.pipeline > 1 or s.expert > 1 else {}),
    }
    facts = {"compiled": "enable", "overlapped tensor": "enable_async_tensor_parallel"}
    return {
        **{("parallelism", name): value for name, value in parallelism.items()},
        **{("training", name): value for name, value in training.items()},
        **{("compile", name): True for fact, name in facts.items() if fact in s.facts},
    }


def _titan_notes(s: Setting) -> Iterator[str]:
    yield "the model, its data and its optimizer are those of your --module and --config"
    if "fused loss" in s.facts:
        yield "priced with ChunkedLossWrapper as loss, as in torchtitan's own configurations: flags cannot set it, the function does"
    if s.context > 1:
        yield "context parallelism needs a model with attn_backend='flex'"
    if s.zero == 1 or (s.zero == 0 and s.context > 1):
        yield f"torchtitan has no ZeRO stage {s.zero} for these ranks: parameters are sharded and stay gathered"
    if s.precision not in ("bfloat16", "float32"):
        yield f"{s.precision} is not written: bfloat16 is, and products in 8 bits are a converter of your model_registry"


def _titan_words(section: str, name: str, value: Any) -> str:
    """Return a field as words of the command line: a switch has no value, and a list of lists of names is a word for each list."""
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no_'}{name}"
    if isinstance(value, list):
        return f"--{section}.{name} {' '.join(','.join(part) for part in value)}"
    return f"--{section}.{name} {value}"


def stage_modules(bounds: Sequence[int]) -> list[list[str]]:
    """Return the names of torchtitan's modules in each stage."""
    last = bounds[-1] - 1
    names = [["tok_embeddings"], *([f"layers.{i}"] for i in range(last - 1)), ["norm", "lm_head"]]
    return [[name for i in range(a, b) for name in names[i]] for a, b in pairwise(bounds)]


def _titan_function(fields: Mapping[tuple[str, str], Any], policy: str, chunked_loss: bool) -> str:
    """Return a Python function that sets the fields of a torchtitan configuration."""
    name = "None" if policy == "none" else f"{policy.title()}AC"
    value = name if name == "None" else f"{name}.Config()"
    lines = [
        '"""Sets the parallelism of a torchtitan configuration: call `planned` at the end of your function in config_registry."""'
    ]
    lines += ["", "from torchtitan.components.loss import ChunkedLossWrapper"] if chunked_loss else [""]
    lines += [f"from torchtitan.distributed.activation_checkpoint import {name}"] if name != "None" else []
    lines += ["from torchtitan.trainer import Trainer"]
    lines += ["", "", "def planned(config: Trainer.Config) -> Trainer.Config:"]
    lines += [f"    config.{section}.{field} = {value!r}" for (section, field), value in fields.items()]
    lines += [f"    config.activation_checkpoint = {value}"]
    if chunked_loss:
        lines += ["    if not isinstance(config.loss, ChunkedLossWrapper.Config):"]
        lines += ["        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)"]
    return "\n".join([*lines, "    return config"]) + "\n"


def _stage(text: str) -> int:
    """Return the ZeRO stage: FSDP1 names strategies, FSDP2 has a switch, whether parameters are freed after the forward."""
    stages = {
        "TRUE": 3,
        "FALSE": 2,
        "FULL_SHARD": 3,
        "HYBRID_SHARD": 3,
        "SHARD_GRAD_OP": 2,
        "_HYBRID_SHARD_ZERO2": 2,
        "NO_SHARD": 0,
    }
    if text.upper() not in stages:
        raise UsageError(f"{text!r} is no sharding", f"these are read: {', '.join(stages)}")
    return stages[text.upper()]


def _mixed_precision(text: str) -> str:
    """Return the precision; YAML reads an unquoted ``no`` as false."""
    return {"no": "float32", "false": "float32", "fp8": FLOAT8}.get(text.lower(), _precision(text))


_ACCELERATE = {
    "fsdp_config.fsdp_version": Flag("version", whole_number),
    "fsdp_config.fsdp_reshard_after_forward": Flag("reshard", _stage),
    "fsdp_config.fsdp_sharding_strategy": Flag("reshard", _stage),
    "fsdp_config.fsdp_activation_checkpointing": Flag("checkpointing", switch),
    "parallelism_config.parallelism_config_dp_replicate_size": Flag("replicate", whole_number),
    "parallelism_config.parallelism_config_dp_shard_size": Flag("shard", _degree),
    "parallelism_config.parallelism_config_tp_size": Flag("tensor", whole_number),
    "parallelism_config.parallelism_config_cp_size": Flag("context", whole_number),
    "mixed_precision": Flag("precision", _mixed_precision),
    "gradient_accumulation_steps": Flag("accumulation", whole_number),
    "num_processes": Flag("devices", whole_number),
    "dynamo_config.dynamo_backend": Flag("compiler", str),
    "deepspeed_config.deepspeed_config_file": Flag("deepspeed", str),
}


class Accelerate(FullyShardedCosts, Trainer):
    name = "accelerate"
    title = "Accelerate with FSDP2"
    space = Space(zero=(2, 3), tensor=True, sequence=False, context=True, replicate=True, deviations=(FP8.name,))
    facts = frozenset({"flash attention"})
    flags = _ACCELERATE

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        precision = {"float16": "fp16", "float32": "no"}.get(s.precision, "bf16")
        ranks = s.data * s.tensor * s.context
        shard = s.data // s.replicate
        fully_sharded = shard * s.context > 1 or ranks == 1
        lines = [
            "# accelerate launch --config_file accelerate.yaml your_script.py",
            "compute_environment: LOCAL_MACHINE",
            f"distributed_type: {'FSDP' if fully_sharded else 'MULTI_GPU'}",
            f"mixed_precision: '{precision}'",
            f"num_machines: {-(-ranks // cluster.gpus_per_node)}",
            f"num_processes: {ranks}",
            "machine_rank: 0",
            "main_training_function: main",
            "use_cpu: false",
            "debug: false",
        ]
        if fully_sharded:
            lines += [
                "fsdp_config:",
                "  fsdp_version: 2",
                f"  fsdp_reshard_after_forward: {str(s.zero == 3).lower()}",
                "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
                f"  fsdp_activation_checkpointing: {str(s.activations == FULL).lower()}",
                "  fsdp_state_dict_type: SHARDED_STATE_DICT",
                "  fsdp_cpu_ram_efficient_loading: true",
                "  fsdp_offload_params: false",
            ]
        if s.replicate > 1 or s.tensor > 1 or s.context > 1:
            lines += [
                "parallelism_config:",
                f"  parallelism_config_dp_replicate_size: {s.replicate}",
                f"  parallelism_config_dp_shard_size: {shard}",
                f"  parallelism_config_tp_size: {s.tensor}",
                f"  parallelism_config_cp_size: {s.context}",
            ]
        return Exported({"accelerate.yaml": "\n".join(lines) + "\n"}, tuple(_accelerate_notes(s, graph, cluster)))

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        found = read_flags(options, self.flags, self.key)
        sections = {option.name.partition(".")[0] for option in options}
        if found is not None and (other := found.values.get("deepspeed", "none")) != "none":
            raise UsageError(
                f"Accelerate starts DeepSpeed with the configuration {other}", f"give that file: --from {other}"
            )
        if found is None or not sections & {"fsdp_config", "parallelism_config"}:
            return None
        values, facts, notes = dict(found.values), {"flash attention", *found.facts}, [*found.notes]
        own = values.pop("devices", devices)
        if own != devices:
            notes.append(f"num_processes is {own}, and {devices} devices are priced")
        stage = values.pop("reshard", 3)
        values["zero"] = stage if "fsdp_config" in sections else 0
        inner = math.prod(values.get(name, 1) for name in ("tensor", "context"))
        _shard_degree(values, max(1, devices // inner), values.get("replicate", 1))
        if values.pop("version", 2) == 1:
            notes.append("FSDP1 is priced as FSDP2")
        values["activations"] = FULL if values.pop("checkpointing", False) else KEEP
        if values.pop("compiler", "NO").upper() not in ("NO", "EAGER"):
            facts.add("compiled")
        values.setdefault("precision", "float32")
        values["sequence"] = False
        return Reading(values, frozenset(facts), tuple(notes))


def _accelerate_notes(s: Setting, graph: Graph, cluster: Cluster) -> Iterator[str]:
    yield f"your script's arguments: per_device_train_batch_size={s.microbatch}, gradient_accumulation_steps={s.microbatches}"
    yield f"sequences of {graph.tokens // graph.batch_size} tokens"
    if s.data * s.tensor * s.context > cluster.gpus_per_node:
        yield "every node has its own --machine_rank, and all the same --main_process_ip and --main_process_port"
    if s.tensor > 1:
        yield "your script loads the model with tensor parallelism (from_pretrained with a tp_plan): Accelerate does not shard it"
    if s.context > 1:
        yield "your script enters accelerator.maybe_context_parallel around every step"
    if s.data // s.replicate * s.context == 1 and s.activations == FULL:
        yield "for the plan's memory call model.gradient_checkpointing_enable() in your script"
    if s.precision == "float8":
        yield "products in 8 bits are not written: they need an fp8_config of your choice"
