"""Shrinks a model's configuration so that it trains on a laptop, and a plan so that a few processes can run it, with equal structure."""

from __future__ import annotations

import math
from typing import Any

from autopar.graph import Graph
from autopar.plan import Axis, Plan, Role, Strategy, deviations
from autopar.schedules import default_schedule
from autopar.search.manual import make_mesh, manual_plan
from autopar.techniques import Options
from autopar.verify.kinds import microbatches

LAYERS = 4  # a pipeline of four stages, and a first, two inner and a last block
WIDTH = 8  # of one attention head
HEADS = 8
VOCABULARY = 96

# Sizes that are set directly, by their names in transformers configurations and in the zoo's.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("n_layer", "num_hidden_layers", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_heads"), HEADS),
    **dict.fromkeys(("n_embd", "hidden_size", "d_model"), HEADS * WIDTH),
    **dict.fromkeys(("head_dim", "d_kv"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner"), 2 * HEADS * WIDTH),
    **dict.fromkeys(("moe_intermediate_size",), HEADS * WIDTH),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 3 * WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 2 * WIDTH),
    **dict.fromkeys(("qk_rope_head_dim",), WIDTH),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8),
    "vocab_size": VOCABULARY,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
    "embedding_size": 8,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [2, 1, 1, 1],
    "channels": 8,
    "depth": 2,
    "num_embeddings": VOCABULARY,
    "layer_sizes": [32, 16],
}
_DEFAULTS: dict[str, tuple[str, ...]] = {
    # entries that a configuration may omit, whose defaults are large
    "gpt2": ("n_layer", "n_head", "n_embd"),
    "resnet": ("embedding_size", "hidden_sizes", "depths", "num_labels"),
}
_IMAGES = ("vit", "resnet")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def shrink_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of the same structure that trains on a laptop in float64: four layers, eight heads.

    The numbers of query heads per key head and of experts per token stay the same.
    """
    small: dict[str, Any] = {key: None if value is None else _SMALL.get(key, value) for key, value in config.items()}
    kind = config.get("model_type", "")
    for key in (*_DEFAULTS.get(kind, ()), *(("vocab_size",) if kind and kind not in _IMAGES else ())):
        small[key] = _SMALL[key]
    heads = config.get("num_attention_heads") or config.get("n_head") or HEADS
    if config.get("num_key_value_heads"):
        small["num_key_value_heads"] = max(1, HEADS * config["num_key_value_heads"] // heads)
    for key in _TOKENS:
        if isinstance(small.get(key), int) and small[key] >= VOCABULARY:
            small[key] = VOCABULARY - 1
    return small


def shrink_plan(plan: Plan, graph: Graph, devices: int) -> Plan:
    """Return a plan of ``graph`` for at most ``devices`` with the given plan's structure.

    A plan that fits (devices, layers and batch) is returned unchanged. Otherwise pipeline and axes shrink to size two, and then to one,
    data axes first, the pipeline last. A layer gets the strategy at the same relative position. The batch limits the microbatches.
    """
    count = len(graph.layers)
    if plan.device_count <= devices and len(plan.layers) == count and plan.global_batch == graph.batch_size:
        return plan
    sizes = [plan.pipeline, *(axis.size for axis in plan.mesh)]
    if plan.device_count > devices:
        sizes = _fit([min(2, size) for size in sizes], plan, devices)
    pipeline, axes = min(sizes[0], count), sizes[1:]
    mesh = make_mesh(*((axis.name, size) for axis, size in zip(plan.mesh, axes, strict=True)))
    kept = [i for i, axis in enumerate(plan.mesh) if axis.name in {a.name for a in mesh}] or [0]
    strategies = {i: _strategy(plan, _relative_index(i, count, len(plan.layers)), mesh, kept) for i in range(count)}
    if len(mesh) == 1 and mesh[0].size == 1:
        strategies = {i: Strategy((Role.DATA,), options=_without_zero(s.options)) for i, s in strategies.items()}
    batch_shards = max(
        math.prod(a.size for a, r in zip(mesh, s.roles, strict=True) if r.shards_batch) for s in strategies.values()
    )
    parts = microbatches(graph, min(plan.microbatches, 2 * pipeline), batch_shards)
    chunks = min(plan.chunks, count // pipeline) if pipeline > 1 else 1
    stages = pipeline * chunks
    cuts = [
        _relative_index(plan.stages[i * len(plan.stages) // stages].start, len(plan.layers), count)
        for i in range(1, stages)
    ]
    kept_schedule = pipeline > 1 and parts >= pipeline and chunks == plan.chunks
    schedule = plan.schedule if kept_schedule else default_schedule(pipeline, parts, chunks)
    return manual_plan(
        graph,
        mesh=mesh,
        pipeline=pipeline,
        chunks=chunks,
        cuts=_distinct_cuts(cuts, count),
        strategies=strategies,
        microbatches=parts,
        schedule=schedule,
        sync=plan.sync,
        allow=deviations(plan.sync, (layer.strategy for layer in plan.layers)),
    )


def _fit(sizes: list[int], plan: Plan, devices: int) -> list[int]:
    """Set sizes to 1, data axes first and the pipeline (``sizes[0]``) last, until their product is at most ``devices``."""
    data = [1 + i for i in range(len(plan.mesh)) if all(s.strategy.roles[i] is Role.DATA for s in plan.layers)]
    order = [*data, *(i for i in range(1, len(sizes)) if i not in data), 0]
    for index in order:
        if math.prod(sizes) <= devices:
            break
        sizes[index] = 1
    return sizes


def _strategy(plan: Plan, layer: int, mesh: tuple[Axis, ...], kept: list[int]) -> Strategy:
    """Return a layer's strategy on the kept axes. HSDP keeps its replicas if there is still an axis to shard over."""
    given = plan.layers[layer].strategy
    roles = tuple(given.roles[i] for i in kept)
    copying = {axis.name for axis in given.data_axes(plan.mesh)[0]}
    equal = [axis for axis, role in zip(mesh, roles, strict=False) if role.replicates_parameters]
    copies = [axis.size for axis in equal if axis.name in copying]
    if not equal:
        return Strategy(roles, options=_without_zero(given.options))
    return Strategy(roles, given.zero, math.prod(copies) if len(copies) < len(equal) else 1, given.options)


def _without_zero(options: Options) -> Options:
    """Reset techniques whose values need ZeRO to their defaults."""
    return options.replace(**{t.name: t.default for t, value in options.chosen if t.mode(value).min_zero})


def _relative_index(index: int, count: int, other: int) -> int:
    """Scale an index of ``count`` items to ``other`` items: the first stays the first, the last stays the last."""
    return round(index * (other - 1) / max(1, count - 1))


def _distinct_cuts(cuts: list[int], count: int) -> tuple[int, ...]:
    """Move cuts so that every stage has at least one layer."""
    fixed: list[int] = []
    for number, cut in enumerate(cuts):
        low, high = (fixed[-1] if fixed else 0) + 1, count - (len(cuts) - number)
        fixed.append(min(max(cut, low), high))
    return tuple(fixed)
