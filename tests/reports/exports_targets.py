"""Exported configurations, each read by the parser or the configuration classes of its own trainer.

``exports.py`` runs this file in another environment, once for each trainer: cases come as JSON on standard input, and a line of JSON
goes out for each. It imports nothing of this project. A case has ``files``, the exported texts, and ``wanted``, the setting that they say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]


def words_of(text: str) -> list[str]:
    """The words of PLAN_ARGS, as bash reads them."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "plan.sh")
        script.write_text(text)
        command = ["bash", "-c", 'source "$1"; printf "%s\\0" "${PLAN_ARGS[@]}"', "bash", str(script)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def same(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{what} is {found!r}, and the setting says {wanted!r}")


@contextlib.contextmanager
def surroundings(**values: str) -> Iterator[None]:
    """These environment variables, and afterwards those of before."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# torchtitan

TITANS = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "llama3-405b": ("llama3", "llama3_70b"),  # its own needs a GPU for products in 8 bits
    "qwen3-8b": ("qwen3", "sft_qwen3_8b_math"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}
"""torchtitan's configuration of a model. The others are debug models, dense or with experts. All get the model's number of blocks."""


def titan(case: Case) -> list[str]:
    from torchtitan.config import ConfigManager

    own = TITANS.get(case["model"])
    module, name = own or (("qwen3", "qwen3_moe_debug") if case["experts"] else ("llama3", "llama3_debugmodel"))
    words = words_of(case["files"]["torchtitan_args.sh"])
    config = ConfigManager().parse_args(["--module", module, "--config", name, *words])
    registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
    scope: dict[str, Any] = {}
    exec(compile(case["files"]["torchtitan_plan.py"], "torchtitan_plan.py", "exec"), scope)
    set_by_function = dataclasses.replace(scope["planned"](getattr(registry, name)()))  # which validates it again
    for section in ("parallelism", "training", "compile", "activation_checkpoint", "loss"):
        same(f"{section} by the function", getattr(set_by_function, section), getattr(config, section))
    _titan_fields(config, case["wanted"])
    done = [f"ConfigManager, {name}", "planned"]
    model = config.model_spec.model
    model.layers = (model.layers * case["blocks"])[: case["blocks"]]
    return done + _titan_parallelized(config, case)


def _titan_fields(config: Any, wanted: dict[str, Any]) -> None:
    p, t, s = config.parallelism, config.training, wanted
    unsharded = s["zero"] == 0
    fields = {
        "tensor_parallel_degree": s["tensor"],
        "pipeline_parallel_degree": s["pipeline"],
        "context_parallel_degree": s["context"],
        "expert_parallel_degree": s["expert"],
        "data_parallel_replicate_degree": s["data"] if unsharded else s["replicate"],
        "data_parallel_shard_degree": 1 if unsharded else s["data"] // s["replicate"],
        "fsdp_reshard_after_forward": "always" if s["zero"] == 3 else "never",
    }
    if s["tensor"] > 1:
        fields["enable_sequence_parallel"] = s["sequence"]
    if s["pipeline"] > 1:
        fields["pipeline_parallel_schedule"] = "1F1B" if s["chunks"] == 1 else "Interleaved1F1B"
        fields["pipeline_parallel_microbatch_size"] = s["microbatch"]
    for name, value in fields.items():
        same(name, getattr(p, name), value)
    local = s["microbatch"] * (s["microbatches"] if s["pipeline"] > 1 else 1)
    same("local_batch_size", t.local_batch_size, local)
    same("global_batch_size", t.global_batch_size, s["global_batch"])
    same("seq_len", t.seq_len, s["seq"])
    same("mixed_precision_param", t.mixed_precision_param, s["precision"])
    kind = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    same(
        "activation_checkpoint",
        kind,
        {"keep": "NoneType", "selective": "SelectiveAC", "full": "FullAC"}[s["activations"]],
    )
    same("compile.enable", config.compile.enable, "compiled" in s["facts"])


def _titan_parallelized(config: Any, case: Case) -> list[str]:
    """Build the model on the meta device, and parallelize rank 0 of it on a process group that sends nothing."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as distributed

    s, world, spec = case["wanted"], case["world"], config.model_spec
    config.parallelism.spmd_backend = "partial_dtensor"
    parallel_dims.device_type = "cpu"
    degrees = ParallelDims.from_config(config.parallelism, world)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        degrees.build_mesh()
        batch = degrees.get_mesh("batch").size() if degrees.dp_enabled else 1
        same("data-parallel ranks", batch, s["data"])
        steps, rest = divmod(config.training.global_batch_size, config.training.local_batch_size * batch)
        same("rest of the batch", rest, 0)
        same("accumulated batches", steps, 1 if s["pipeline"] > 1 else s["microbatches"])
        distributed.set_spmd_backend(config.parallelism.spmd_backend)
        spec.model.update_from_config(config=config)
        with torch.device("meta"):
            model = spec.model.build()
        if parts := config.parallelism.module_fqns_per_model_part:
            _titan_stages(parts, model, s)
        common = {
            "parallel_dims": degrees, "training": config.training, "parallelism": config.parallelism,
            "compile_config": config.compile, "ac_config": config.activation_checkpoint, "dump_folder": "outputs",
        }  # fmt: skip
        if degrees.pp_enabled:
            loss = config.loss.build(compile_config=config.compile)
            more = {"device": torch.device("cpu"), "model_config": spec.model, "parallelize_fn": spec.parallelize_fn}
            schedule, built, *_ = spec.pipelining_fn(model, loss_fn=loss, **more, **common)
            same("stages of rank 0", len(built), s["chunks"])
            same("microbatches", schedule._n_microbatches, s["microbatches"])
        else:
            spec.parallelize_fn(model, **common)
    finally:
        dist.destroy_process_group()
    return ["ParallelDims", f"rank 0 of {world} parallelized on meta"]


def _titan_stages(parts: list[list[str]], model: Any, wanted: dict[str, Any]) -> None:
    names = [name for part in parts for name in part]
    blocks = len(model.layers)
    same("modules of all stages", names, ["tok_embeddings", *(f"layers.{i}" for i in range(blocks)), "norm", "lm_head"])
    missing = set(names) - {name for name, _ in model.named_modules()}
    same("names that the model lacks", missing, set())
    sizes = [len(part) - ("norm" in part) for part in parts]
    same("layers of the stages", sizes, [b - a for a, b in zip(wanted["bounds"], wanted["bounds"][1:], strict=False)])


# Megatron-Core

MEGATRON_LISTS = ("recompute_modules",)
"""Flags with several words."""
TRAINING_ONLY = {"micro_batch_size", "global_batch_size", "seq_length", "pipeline_model_parallel_layout"}
"""What is in no class of megatron-core, besides the layout, which has a class of its own."""


def megatron_flags(text: str) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    for word in words_of(text):
        if word.startswith("--"):
            found[name := word.removeprefix("--").replace("-", "_")] = []
        else:
            found[name].append(word)
    flags: dict[str, Any] = {}
    for name, words in found.items():
        value = words if name in MEGATRON_LISTS else words[0] if words else True
        assert name in MEGATRON_LISTS or len(words) < 2, (name, words)
        flags[name] = int(value) if str(value).isdecimal() else value
    return flags


def have_fused_permutations() -> None:
    """Let Megatron find the permutations of Transformer Engine, which needs a GPU. Nothing calls them."""
    from megatron.core.transformer.moe import moe_utils

    for name in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        if getattr(moe_utils, f"fused_{name}", None) is None:
            setattr(moe_utils, f"fused_{name}", have_fused_permutations)


def megatron(case: Case) -> list[str]:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    have_fused_permutations()
    flags, s = megatron_flags(case["files"]["megatron_args.sh"]), case["wanted"]
    values = dict(flags)
    values["attention_backend"] = AttnBackend[values.get("attention_backend", "auto")]
    values["virtual_pipeline_model_parallel_size"] = values.pop("num_virtual_stages_per_pipeline_rank", None)
    values["grad_reduce_in_fp32"] = not values.pop("grad_reduce_in_bf16", False)
    values["params_dtype"] = values["pipeline_dtype"] = torch.bfloat16 if values.get("bf16") else torch.float32
    values |= {"num_layers": case["blocks"], "hidden_size": case["hidden"], "num_attention_heads": case["heads"]}
    values |= {"num_moe_experts": case["experts"]} if case["experts"] else {}
    values |= {"add_bias_linear": False} if case["experts"] else {}
    values |= {"multi_latent_attention": True} if "--multi-latent-attention" in case["megatron_model"] else {}
    used: set[str] = set()
    for cls in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig):
        fields = {field.name for field in dataclasses.fields(cls)}
        used |= fields & set(values)
        cls(**{name: value for name, value in values.items() if name in fields})
    renamed = {"num_virtual_stages_per_pipeline_rank", "grad_reduce_in_bf16"}
    same("flags that no class has", set(flags) - used - renamed - TRAINING_ONLY, set())
    done = ["TransformerConfig, DistributedDataParallelConfig, OptimizerConfig"]
    if layout := flags.get("pipeline_model_parallel_layout"):
        _megatron_layout(layout, case)
        done.append("PipelineParallelLayerLayout")
    data = case["world"] // (s["tensor"] * s["pipeline"] * s["context"])
    RankGenerator(tp=s["tensor"], ep=1, dp=data, pp=s["pipeline"], cp=s["context"], order="tp-cp-ep-dp-pp")
    experts = flags.get("expert_tensor_parallel_size", s["tensor"]), flags.get("expert_model_parallel_size", 1)
    copies, rest = divmod(case["world"], experts[0] * experts[1] * s["pipeline"])
    same("ranks that experts leave over", rest, 0)
    RankGenerator(tp=experts[0], ep=experts[1], dp=copies, pp=s["pipeline"], cp=1, order="tp-cp-ep-dp-pp")
    return [*done, "RankGenerator"]


def _megatron_layout(text: str, case: Case) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    s, bounds = case["wanted"], case["wanted"]["bounds"]
    layout = PipelineParallelLayerLayout.from_str(text, s["pipeline"])
    layout.validate_layer_layout(case["blocks"], None)
    same("chunks", layout.virtual_pipeline_model_parallel_size, s["chunks"])
    parallel_state.set_virtual_pipeline_model_parallel_world_size(s["chunks"])
    for stage, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rank, chunk = stage % s["pipeline"], stage // s["pipeline"]
        blocks = [i - 1 for i in range(start, stop) if 0 < i <= case["blocks"]]
        found = layout.get_layer_id_list(LayerType.decoder, vp_stage=chunk, pp_rank=rank)
        same(f"blocks of stage {stage}", list(found), blocks)


def megatron_lm(case: Case) -> list[str]:
    """Megatron-LM's own parser and checks, of the checkout on the search path. Two questions need a GPU: which generation it is, and what
    products it has."""
    import torch

    if not hasattr(typing, "override"):  # a decorator without effect, which Python has from 3.12
        typing.override = lambda method: method
    from megatron.core import package_info
    from megatron.training import arguments

    s = case["wanted"]
    have_fused_permutations()
    arguments.get_device_arch_version = lambda: 9  # Hopper
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    text = case["files"]["megatron_args.sh"]
    exports = [line.removeprefix("export ") for line in text.splitlines() if line.startswith("export ")]
    variables = dict(line.split("=", 1) for line in exports)
    sys.argv = ["pretrain_gpt.py", *words_of(text), *case["megatron_model"]]
    with surroundings(WORLD_SIZE=str(case["world"]), RANK="0", LOCAL_RANK="0", **variables):
        with contextlib.redirect_stdout(sys.stderr):
            args = arguments.validate_args(arguments.parse_args())
            config = arguments.core_transformer_config_from_args(args)
    for name, value in {
        "data_parallel_size": s["data"],
        "tensor_model_parallel_size": s["tensor"],
        "pipeline_model_parallel_size": s["pipeline"],
        "context_parallel_size": s["context"],
        "expert_model_parallel_size": s["expert"],
        "virtual_pipeline_model_parallel_size": s["chunks"] if s["chunks"] > 1 else None,
        "micro_batch_size": s["microbatch"],
        "global_batch_size": s["global_batch"],
        "seq_length": s["seq"],
        "sequence_parallel": s["sequence"],
        "use_distributed_optimizer": s["zero"] > 0,
        "bf16": s["precision"] == "bfloat16",
        "recompute_granularity": None if s["activations"] == "keep" else s["activations"],
        "recompute_num_layers": (s["recomputed"] or 1) if s["activations"] == "full" else None,
    }.items():
        same(name, getattr(args, name), value)
    same("expert_tensor_parallel_size", args.expert_tensor_parallel_size, 1 if "tensor" in s["folds"] else s["tensor"])
    same("num_layers", config.num_layers, case["blocks"])
    return [
        f"parse_args, validate_args and TransformerConfig of Megatron-LM {package_info.__version__.partition('+')[0]}"
    ]


# DeepSpeed and Accelerate


def deepspeed(case: Case) -> list[str]:
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    s = case["wanted"]
    comm.get_rank = lambda: 0
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: case["world"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ds_config.json")
        path.write_text(case["files"]["ds_config.json"])
        config = DeepSpeedConfig(str(path), mpu=ranks)
    for name, value in {
        "train_batch_size": s["global_batch"],
        "train_micro_batch_size_per_gpu": s["microbatch"],
        "gradient_accumulation_steps": s["microbatches"],
        "world_size": case["world"],
    }.items():
        same(name, getattr(config, name), value)
    same("stage", int(config.zero_config.stage), s["zero"])
    same("bf16", config.bfloat16_config.enabled, s["precision"] == "bfloat16")
    unknown = set(json.loads(case["files"]["ds_config.json"])["zero_optimization"]) - set(
        type(config.zero_config).model_fields
    )
    same("fields that ZeRO lacks", unknown, set())
    return ["DeepSpeedConfig"]


def accelerate(case: Case) -> list[str]:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    s = case["wanted"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "accelerate.yaml")
        path.write_text(case["files"]["accelerate.yaml"])
        same("num_processes", ClusterConfig.from_yaml_file(str(path)).num_processes, case["world"])
        command = ["--config_file", str(path), "--main_process_ip", "127.0.0.1", "--main_process_port", "0", "train.py"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
        known = set(vars(launch_command_parser().parse_args(["train.py"])))
        cluster = ClusterConfig.from_yaml_file(str(path))
    same("keys that no argument has", {*cluster.fsdp_config, *cluster.parallelism_config} - known, set())
    same("mixed_precision", args.mixed_precision, {"bfloat16": "bf16", "float32": "no"}[s["precision"]])
    same("num_machines", args.num_machines, case["nodes"])
    with surroundings(**prepare_multi_gpu_env(args)):
        degrees, plugin = ParallelismConfig(), FullyShardedDataParallelPlugin()
    if s["replicate"] > 1 or s["tensor"] > 1 or s["context"] > 1:
        found = degrees.dp_replicate_size, degrees.dp_shard_size, degrees.tp_size, degrees.cp_size
        same("degrees", found, (s["replicate"], s["data"] // s["replicate"], s["tensor"], s["context"]))
        state = {"num_processes": case["world"], "is_fsdp2": plugin.fsdp_version == 2, "multi_device": True}
        degrees._validate_accelerator(
            SimpleNamespace(
                **state,
                is_main_process=True,
                distributed_type=args.distributed_type if hasattr(args, "distributed_type") else "FSDP",
            )
        )
    same("fsdp_version", plugin.fsdp_version, 2)
    same("reshard_after_forward", plugin.reshard_after_forward, s["zero"] == 3)
    same("activation_checkpointing", plugin.activation_checkpointing, s["activations"] == "full")
    return ["ClusterConfig", "accelerate launch", "ParallelismConfig", "FullyShardedDataParallelPlugin"]


TARGETS: dict[str, Callable[[Case], list[str]]] = {
    "torchtitan": titan, "megatron": megatron, "megatron-lm": megatron_lm, "deepspeed": deepspeed, "accelerate": accelerate,
}  # fmt: skip


def main() -> None:
    target, cases = TARGETS[sys.argv[1]], json.load(sys.stdin)
    if sys.argv[1] == "torchtitan":
        import torch
        from torchtitan.tools import utils

        utils.device_type, utils.device_module = "cpu", torch.cpu
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainers print is no result
    for case in cases:
        line: dict[str, Any] = {name: case[name] for name in ("model", "devices", "trainer")}
        try:
            line["accepted"] = target(case)
        except (Exception, SystemExit) as error:
            line["refused"] = f"{type(error).__name__}: {error}".strip()[:400]
            import traceback

            traceback.print_exc()
        print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
