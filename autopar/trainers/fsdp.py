"""Trainers on PyTorch's FSDP2: torchtitan, and Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.precision import SPELLINGS
from autopar.techniques.activations import FULL, KEEP, SELECTIVE
from autopar.trainers.flags import read_flags
from autopar.trainers.layout import stage_bounds
from autopar.trainers.options import Option
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import FACT, Exported, Flag, Reading, Space, Trainer, whole_number


class FullyShardedTrainer(Trainer):
    """What trainers on FSDP2 have in common. The first and the last layer are in the root unit, whose parameters stay gathered from
    forward to backward."""

    evidence = "fsdp"

    def fuses(self, s: Setting) -> bool:
        return super().fuses(s) or "Megatron" in s.facts  # its kernels, those of Transformer Engine

    def overlap_tensor(self, s: Setting) -> float:
        return super().overlap_tensor(s) if "overlapped tensor" in s.facts else 0.0

    def terms(self, s: Setting) -> dict[str, Any]:
        fused = "fused loss" in s.facts
        return {"fsdp": True, "loss_copies": 0 if fused else 2 if s.tensor > 1 else 1}

    def root_zero(self, s: Setting) -> int | None:
        return 2


def _switch(text: str) -> bool:
    return text.lower() in ("true", "1", "yes", "on")


def _degree(text: str) -> int:
    """Return a degree, or -1 for the remaining devices."""
    return -1 if text == "-1" else whole_number(text)


def _kind(text: str) -> str:
    kinds = {"none": KEEP, "full": FULL, SELECTIVE: SELECTIVE}
    if text.lower() not in kinds:
        raise UsageError(f"activation checkpointing is {text!r}", f"these are read: {', '.join(kinds)}")
    return kinds[text.lower()]


def _precision(text: str) -> str:
    return SPELLINGS.get(text.lower(), text)


_TITAN = {
    "parallelism.tensor_parallel_degree": Flag("tensor", whole_number),
    "parallelism.pipeline_parallel_degree": Flag("pipeline", whole_number),
    "parallelism.context_parallel_degree": Flag("context", whole_number),
    "parallelism.expert_parallel_degree": Flag("expert", whole_number),
    "parallelism.data_parallel_shard_degree": Flag("shard", _degree),
    "parallelism.data_parallel_replicate_degree": Flag("replicate", whole_number),
    "parallelism.fsdp_reshard_after_forward": Flag("reshard", str),
    "parallelism.enable_sequence_parallel": Flag("sequence", _switch),
    "parallelism.pipeline_parallel_schedule": Flag("schedule", str),
    "parallelism.pipeline_parallel_microbatch_size": Flag("pipeline_microbatch", whole_number),
    "parallelism.pipeline_parallel_layers_per_stage": Flag("chunk_layers", whole_number),
    "training.local_batch_size": Flag("local", whole_number),
    "training.global_batch_size": Flag("global_batch", _degree),
    "training.seq_len": Flag("seq", whole_number),
    "training.mixed_precision_param": Flag("precision", _precision),
    "activation_checkpoint": Flag("activations", _kind),
    "activation_checkpoint.mode": Flag("activations", _kind),
    "full_ac": Flag("activations", FULL),
    "selective_ac": Flag("activations", SELECTIVE),
    "compile.enable": Flag(FACT, "compiled"),
    "compile.enable_async_tensor_parallel": Flag(FACT, "overlapped tensor"),
    "parallelism.enable_async_tensor_parallel": Flag(FACT, "overlapped tensor"),
    "chunked_loss_wrapper": Flag(FACT, "fused loss"),
}
_SCHEDULES = {"1F1B": False, "Interleaved1F1B": True}


class Torchtitan(FullyShardedTrainer):
    name = "torchtitan"
    title = "torchtitan"
    checked = "torchtitan 0.3.0"
    space = Space(
        zero=(2, 3),
        activations=(KEEP, SELECTIVE, FULL),
        tensor=True,
        pipeline=True,
        context=True,
        expert=True,
        folds=("all",),
        chunks=True,
        replicate=True,
        uneven=True,
    )
    facts = frozenset({"compiled", "flash attention", "fused loss"})

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        fields = _titan_fields(s, graph)
        policy = {KEEP: "none", SELECTIVE: SELECTIVE, FULL: "full"}[s.activations]
        words = [f"--{section}.{name} {_word(value)}" for (section, name), value in fields.items() if value is not True]
        words += [f"--{section}.{name}" for (section, name), value in fields.items() if value is True]
        words.append(f"activation_checkpoint:{policy}")
        lines = [
            "# source this file, and start: torchrun ... -m torchtitan.train --module M --config C ${PLAN_ARGS[@]}"
        ]
        lines += ["PLAN_ARGS=(", *(f"    {word}" for word in words), ")"]
        notes = ["the model, its data and its optimizer are those of your --module and --config"]
        return Exported(
            {"torchtitan_args.sh": "\n".join(lines) + "\n", "torchtitan_plan.py": _titan_function(fields, policy)},
            tuple(notes),
        )

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        found = read_flags(options, _TITAN, lambda name: name.lstrip("-").replace("-", "_"))
        if found is None:
            return None
        values, facts, notes = dict(found.values), {"flash attention", *found.facts}, [*found.notes]
        pipeline, local = values.get("pipeline", 1), values.pop("local", 8)
        micro = values.pop("pipeline_microbatch", 1)
        inner = math_product(values, ("tensor", "pipeline", "context"))
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
        values |= _sharding(values, data, pipeline)
        values.setdefault("sequence", values.get("tensor", 1) > 1)
        if values.get("expert", 1) > 1:
            values["folds"] = frozenset(name for name in ("context", "tensor") if values.get(name, 1) > 1)
        values.setdefault("precision", "bfloat16")
        return Reading(values, frozenset(facts), tuple(notes), found.options)


def math_product(values: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the product of the degrees ``names``."""
    found = 1
    for name in names:
        found *= values.get(name, 1)
    return found


def _sharding(values: dict[str, Any], data: int, pipeline: int) -> dict[str, Any]:
    """Return the ZeRO stage and the number of HSDP replicas of torchtitan's degrees."""
    shard, policy = values.pop("shard", -1), values.pop("reshard", "default")
    replicate = values.pop("replicate", 1)
    if shard == 1 and values.get("context", 1) == 1:
        return {"zero": 0, "replicate": 1}
    stage = {"always": 3, "never": 2}.get(policy, 3 if pipeline == 1 else 2)
    return {"zero": stage, "replicate": replicate}


def _titan_fields(s: Setting, graph: Graph) -> dict[tuple[str, str], Any]:
    """Return torchtitan's configuration by (section, field)."""
    bounds = stage_bounds(graph, s)
    micro = {"pipeline_parallel_microbatch_size": s.microbatch} if s.pipeline > 1 else {}
    schedule = {"pipeline_parallel_schedule": "Interleaved1F1B" if s.chunks > 1 else "1F1B"} if s.pipeline > 1 else {}
    parts = {"module_fqns_per_model_part": stage_modules(bounds)} if s.pipeline > 1 else {}
    parallelism = {
        "data_parallel_replicate_degree": s.replicate,
        "data_parallel_shard_degree": s.data // s.replicate,
        "fsdp_reshard_after_forward": "always" if s.zero == 3 else "never",
        "tensor_parallel_degree": s.tensor,
        "enable_sequence_parallel": s.sequence,
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
    }
    return {
        **{("parallelism", name): value for name, value in parallelism.items()},
        **{("training", name): value for name, value in training.items()},
        **({("compile", "enable"): True} if "compiled" in s.facts else {}),
    }


def stage_modules(bounds: Sequence[int]) -> list[list[str]]:
    """Return the names of torchtitan's modules in each stage."""
    last = bounds[-1] - 1
    names = [["tok_embeddings"], *([f"layers.{i}"] for i in range(last - 1)), ["norm", "lm_head"]]
    return [[name for i in range(a, b) for name in names[i]] for a, b in pairwise(bounds)]


def _word(value: Any) -> str:
    """Return a value as words of a command line: a list of lists of names is one word for each list."""
    if isinstance(value, list):
        return " ".join(",".join(part) for part in value)
    return str(value)


def _titan_function(fields: Mapping[tuple[str, str], Any], policy: str) -> str:
    """Return a Python function that sets the fields of a torchtitan configuration."""
    classes = {"none": "None", SELECTIVE: "SelectiveAC.Config()", "full": "FullAC.Config()"}
    name = classes[policy].partition(".")[0]
    lines = [
        '"""Sets the parallelism of a torchtitan configuration: call `planned` at the end of your function in config_registry."""'
    ]
    lines += ["", "from torchtitan.trainer import Trainer"]
    lines += [f"from torchtitan.distributed.activation_checkpoint import {name}"] if name != "None" else []
    lines += ["", "", "def planned(config: Trainer.Config) -> Trainer.Config:"]
    lines += [f"    config.{section}.{field} = {value!r}" for (section, field), value in fields.items()]
    lines += [f"    config.activation_checkpoint = {classes[policy]}", "    return config"]
    return "\n".join(lines) + "\n"


_ACCELERATE = {
    "fsdp_config.fsdp_version": Flag("version", whole_number),
    "fsdp_config.fsdp_reshard_after_forward": Flag("reshard", str),
    "fsdp_config.fsdp_activation_checkpointing": Flag("checkpointing", _switch),
    "parallelism_config.parallelism_config_dp_replicate_size": Flag("replicate", whole_number),
    "parallelism_config.parallelism_config_dp_shard_size": Flag("shard", _degree),
    "parallelism_config.parallelism_config_tp_size": Flag("tensor", whole_number),
    "parallelism_config.parallelism_config_cp_size": Flag("context", whole_number),
    "mixed_precision": Flag("precision", _precision),
    "gradient_accumulation_steps": Flag("accumulation", whole_number),
    "num_processes": Flag("devices", whole_number),
    "dynamo_config.dynamo_backend": Flag("compiler", str),
}


class Accelerate(FullyShardedTrainer):
    name = "accelerate"
    title = "Accelerate with FSDP2"
    checked = "accelerate 1.15.0"
    space = Space(zero=(2, 3), tensor=True, context=True, replicate=True)
    facts = frozenset({"flash attention"})

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[s.precision]
        nodes = -(-s.data * s.tensor * s.context // cluster.gpus_per_node)
        lines = [
            "# accelerate launch --config_file accelerate.yaml your_script.py",
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: FSDP",
            f"mixed_precision: '{precision}'",
            f"num_machines: {nodes}",
            f"num_processes: {s.data * s.tensor * s.context}",
            "machine_rank: 0",
            "main_training_function: main",
            "use_cpu: false",
            "debug: false",
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
                f"  parallelism_config_dp_shard_size: {s.data // s.replicate}",
                f"  parallelism_config_tp_size: {s.tensor}",
                f"  parallelism_config_cp_size: {s.context}",
            ]
        notes = (
            f"your script's arguments: per_device_train_batch_size={s.microbatch}, gradient_accumulation_steps={s.microbatches}",
            f"sequences of {graph.tokens // graph.batch_size} tokens",
        )
        return Exported({"accelerate.yaml": "\n".join(lines) + "\n"}, notes)

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        found = read_flags(options, _ACCELERATE, lambda name: name)
        if found is None or not any(option.name.startswith("fsdp_config") for option in options):
            return None
        values, facts, notes = dict(found.values), {"flash attention", *found.facts}, [*found.notes]
        own = values.pop("devices", devices)
        if own != devices:
            notes.append(f"num_processes is {own}, and {devices} devices are priced")
        values["zero"] = 3 if _reshards(values.pop("reshard", "true")) else 2
        values["activations"] = FULL if values.pop("checkpointing", False) else KEEP
        if values.pop("compiler", "NO").upper() not in ("NO", "EAGER"):
            facts.add("compiled")
        values["precision"] = {"no": "float32"}.get(values.get("precision", "no"), values.get("precision", "no"))
        values["sequence"] = False
        for name in ("version", "shard"):
            values.pop(name, None)
        return Reading(values, frozenset(facts), tuple(notes), found.options)


def _reshards(text: str) -> bool:
    """Return whether FSDP frees gathered parameters after the forward: version 1 names its strategies, version 2 has a switch."""
    return text.upper() in ("TRUE", "FULL_SHARD", "HYBRID_SHARD")
