"""The plans that ``exports.py`` exports: ten pairs of a model and a cluster, and one with pinned decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopar.cli.commands import cluster_and_options, load
from autopar.cli.options import PlanRequest
from autopar.errors import InfeasibleError
from autopar.trainers import TRAINERS
from autopar.trainers.choose import best_setting
from autopar.trainers.layout import stage_bounds
from autopar.trainers.setting import Setting
from autopar.zoo import find

Line = dict[str, Any]

PLANS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("gpt2", "1xA100-80GB", {}),
    ("gpt2-xl", "8xA100-40GB", {}),
    ("llama3-8b", "8xH100-80GB", {}),
    ("llama3-8b", "8x8xH100-80GB", {"seq": 131072, "global_batch": 32}),
    ("qwen3-8b", "2x8xH100-80GB", {}),
    ("qwen3-30b-a3b", "4x8xH100-80GB", {}),
    ("mixtral-8x7b", "8x8xH100-80GB", {}),
    ("llama3-70b", "16x8xH100-80GB", {}),
    ("llama3-405b", "256x8xH100-80GB", {}),
    ("deepseek-v3", "256x8xH800-80GB", {}),
)
PINNED: dict[str, dict[str, Any]] = {
    "megatron": {"tensor": 2, "pipeline": 4, "chunks": 4, "activations": "full"},
    "torchtitan": {"tensor": 2, "replicate": 2, "zero": 3, "activations": "full"},
    "deepspeed": {"zero": 2, "activations": "full"},
    "accelerate": {"tensor": 2, "replicate": 2, "zero": 3, "activations": "full"},
}
"""Decisions that the best plans lack: llama3-8b on 16 GPUs has them by a pin."""


FAULTS = (
    ("torchtitan", "llama3-8b", "torchtitan_args.sh", "layers.3,layers.4 layers.5", "layers.3 layers.4,layers.5"),
    ("torchtitan", "llama3-8b", "torchtitan_args.sh", "    --training.disable_cuda_graphs\n", ""),
    ("torchtitan", "qwen3-8b", "torchtitan_args.sh", "forward always", "forward never"),
    ("megatron", "llama3-405b", "megatron_args.sh", "tt|t", "t|tt"),
    ("megatron", "qwen3-8b", "megatron_args.sh", "--cross-entropy-loss-fusion", "--cross-entropy-fusion"),
    ("deepspeed", "qwen3-8b", "ds_config.json", '"stage": 3', '"stage": 2'),
    ("deepspeed", "qwen3-8b", "ds_config.json", "overlap_comm", "overlap_communication"),
    ("accelerate", "llama3-70b", "accelerate.yaml", "num_processes: 128", "num_processes: 64"),
    ("accelerate", "llama3-70b", "accelerate.yaml", "fsdp_reshard_after_forward:", "fsdp_reshard_after_forwards:"),
    ("accelerate", "deepseek-v3", "accelerate.yaml", "dp_shard_size: 128", "dp_shard_size: 64"),
)
"""A trainer, a model, and a word of its exported file that another replaces: each must be noticed."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def wanted(s: Setting, bounds: Sequence[int], seq: int) -> Line:
    """A setting as JSON, with what follows from it."""
    found = {name: getattr(s, name) for name in s.__slots__ if name not in ("facts", "cuts", "folds", "options")}
    found |= {"activations": s.activations, "facts": sorted(s.facts), "folds": sorted(s.folds)}
    return found | {"microbatches": s.microbatches, "bounds": list(bounds), "seq": seq}


def cases() -> Iterator[Line]:
    """Every plan for every trainer: a case, or a line that says why there is none."""
    for model, devices, sizes in PLANS:
        yield from _of_plan(PlanRequest(model=model, devices=devices, **sizes), {}, "")  # type: ignore[arg-type]
    yield from _of_plan(PlanRequest(model="llama3-8b", devices="2x8xH100-80GB"), PINNED, ", pinned")


def _of_plan(request: PlanRequest, pins: dict[str, dict[str, Any]], label: str) -> Iterator[Line]:
    cluster, _ = cluster_and_options(request)
    graph = load(request, cluster).capture()
    seq, config, blocks = graph.tokens // graph.batch_size, find(request.model).config, len(graph.layers) - 2
    for name, trainer in TRAINERS.items():
        line: Line = {"part": "plans", "trainer": name, "model": request.model}
        line["devices"] = f"{request.devices}, {seq:,} tokens{label}"
        try:
            setting = best_setting(graph, cluster, trainer, pins.get(name)).setting
        except InfeasibleError as error:
            yield line | {"no_plan": error.message}
            continue
        exported = trainer.export(setting, graph, cluster)
        yield line | {
            "files": dict(exported.files),
            "notes": list(exported.notes),
            "wanted": wanted(setting, stage_bounds(graph, setting), seq),
            "world": cluster.count,
            "nodes": -(-cluster.count // cluster.gpus_per_node),
            "blocks": blocks,
            "hidden": config.get("hidden_size", config.get("n_embd")),
            "heads": config.get("num_attention_heads", config.get("n_head")),
            "experts": next((config[key] for key in EXPERTS if key in config), 0),
            "megatron_model": megatron_model(config, blocks, seq),
        }


def megatron_model(config: dict[str, Any], blocks: int, seq: int) -> list[str]:
    """The flags of Megatron-LM for a model of the zoo, for what its parser checks: sizes, heads, experts."""

    def get(*names: str) -> Any:
        return next((config[name] for name in names if name in config), None)

    heads, groups = get("num_attention_heads", "n_head"), get("num_key_value_heads")
    values = {
        "num-layers": blocks,
        "hidden-size": get("hidden_size", "n_embd"),
        "num-attention-heads": heads,
        "ffn-hidden-size": get("intermediate_size"),
        "kv-channels": get("head_dim"),
        "max-position-embeddings": seq,
        "num-experts": get(*EXPERTS),
        "moe-router-topk": get("num_experts_per_tok"),
        "moe-ffn-hidden-size": get("moe_intermediate_size"),
        "tokenizer-type": "NullTokenizer",
        "vocab-size": config["vocab_size"],
        "lr": 1e-4,
        "train-iters": 10,
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    words += [
        "--mock-data",
        "--untie-embeddings-and-output-weights",
        "--no-rope-fusion",
    ]  # fusion is Transformer Engine's
    if "n_embd" not in config:
        words += [
            "--swiglu",
            "--disable-bias-linear",
            "--normalization",
            "RMSNorm",
            "--position-embedding-type",
            "rope",
        ]
    if "kv_lora_rank" in config:
        words += ["--multi-latent-attention"]
    elif groups and groups != heads:
        words += ["--group-query-attention", "--num-query-groups", str(groups)]
    return words
