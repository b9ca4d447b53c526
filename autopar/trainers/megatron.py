"""Megatron-Core: flags of ``pretrain_gpt.py``, and the same names in YAML files of Megatron-Bridge and NeMo."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import NARROW_GRADIENTS
from autopar.precision import FLOAT8, FP8
from autopar.schedules.orders import round_size
from autopar.techniques.activations import FULL, GRANULARITIES, KEEP
from autopar.trainers import figures
from autopar.trainers.flags import read_flags
from autopar.trainers.layout import is_even, stage_bounds
from autopar.trainers.options import Option
from autopar.trainers.selective import up_projections
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import FACT, Exported, Flag, Reading, Space, Trainer, switch, whole_number

_GRANULARITY, _METHOD, _BLOCKS = (
    Flag("granularity", str),
    Flag("recompute_method", str),
    Flag("recomputed", whole_number),
)
_, _PART, _WHOLE = GRANULARITIES
_MODULES = frozenset({"layernorm", "mla_up_proj", "moe_act"})  # see ``selective.select_modules``
_DISPATCH, _OVERLAP = "token dispatch kernels", "overlapped experts"
_OVERLAP_FLAG = "overlap_moe_expert_parallel_comm"
_DEFAULT_DISPATCHER = "allgather"  # moe_token_dispatcher_type in megatron/core/transformer/transformer_config.py
_SHARES = 16


def _precision(text: str) -> str:
    """Return the precision that YAML names, such as ``bf16-mixed``."""
    words = {"bf16": "bfloat16", "fp16": "float16", "16": "float16", "32": "float32"}
    found = next((name for word, name in words.items() if word in text.lower()), None)
    if found is None:
        raise UsageError(f"{text!r} is not a precision", "these are read: bf16, fp16, 32")
    return found


FLAGS = {
    "tensor_model_parallel_size": Flag("tensor", whole_number),
    "pipeline_model_parallel_size": Flag("pipeline", whole_number),
    "context_parallel_size": Flag("context", whole_number),
    "cp_comm_type": Flag("context_kind", str),
    "expert_model_parallel_size": Flag("expert", whole_number),
    "expert_tensor_parallel_size": Flag("expert_tensor", whole_number),
    "moe_token_dispatcher_type": Flag("dispatcher", str),
    "moe_flex_dispatcher_backend": Flag("backend", str),
    "moe_enable_deepep": Flag("dispatcher", "flex"),
    "moe_grouped_gemm": Flag("grouped", switch),  # priced of every mixture
    "overlap_moe_expert_parallel_comm": Flag(FACT, _OVERLAP),
    "delay_wgrad_compute": Flag("delays_weights", True),  # assumed beside overlapped exchanges
    "micro_batch_size": Flag("microbatch", whole_number),
    "global_batch_size": Flag("global_batch", whole_number),
    "seq_length": Flag("seq", whole_number),
    "encoder_seq_length": Flag("seq", whole_number),
    "sequence_parallel": Flag("sequence", True),
    "use_distributed_optimizer": Flag("zero", 1),
    "num_distributed_optimizer_instances": Flag("replicate", whole_number),
    "num_virtual_stages_per_pipeline_rank": Flag("chunks", whole_number),
    "virtual_pipeline_model_parallel_size": Flag("chunks", whole_number),
    "num_layers_per_virtual_pipeline_stage": Flag("chunk_layers", whole_number),
    "microbatch_group_size_per_virtual_pipeline_stage": Flag("round", whole_number),
    "microbatch_group_size_per_vp_stage": Flag("round", whole_number),
    "pipeline_model_parallel_layout": Flag("layout", str),
    "decoder_first_pipeline_num_layers": Flag("first", whole_number),
    "decoder_last_pipeline_num_layers": Flag("last", whole_number),
    "account_for_embedding_in_pipeline_split": Flag("embedding_counts", True),
    "account_for_loss_in_pipeline_split": Flag("loss_counts", True),
    "recompute_granularity": _GRANULARITY,
    "activations_checkpoint_granularity": _GRANULARITY,
    "recompute_method": _METHOD,
    "activations_checkpoint_method": _METHOD,
    "recompute_num_layers": _BLOCKS,
    "activations_checkpoint_num_layers": _BLOCKS,
    "recompute_activations": Flag("granularity", _PART),
    "recompute_modules": Flag("modules", str),
    "bf16": Flag("precision", "bfloat16"),
    "fp16": Flag("precision", "float16"),
    "fp8_format": Flag("fp8", FLOAT8),
    "fp8": Flag("fp8", FLOAT8),
    "precision": Flag("precision", _precision),
    "use_megatron_fsdp": Flag("unpriced", "use_megatron_fsdp"),
    "use_custom_fsdp": Flag("unpriced", "use_custom_fsdp"),
    "use_torch_fsdp2": Flag("unpriced", "use_torch_fsdp2"),
    "overlap_grad_reduce": Flag(FACT, "overlapped gradients"),
    "overlap_grad_sync": Flag(FACT, "overlapped gradients"),
    "tp_comm_overlap": Flag(FACT, "overlapped tensor"),
    "ub_tp_comm_overlap": Flag(FACT, "overlapped tensor"),
    "use_flash_attn": Flag(FACT, "flash attention"),
    "attention_backend": Flag("attention", str),
    "cross_entropy_loss_fusion": Flag(FACT, "fused loss"),
    "overlap_param_gather": Flag("overlap_gather", True),  # assumed beside overlapped gradients
    "grad_reduce_in_bf16": Flag(FACT, "16-bit gradients"),
}
"""What decides the plan and its price, by the flags' names with underscores."""

_RESOLVED = (
    "context_kind",
    "expert_tensor",
    "dispatcher",
    "backend",
    "grouped",
    "chunk_layers",
    "round",
    "layout",
    "first",
    "last",
    "embedding_counts",
    "loss_counts",
    "modules",
    "granularity",
    "recompute_method",
    "attention",
    "overlap_gather",
    "delays_weights",
    "fp8",
)


class Megatron(Trainer):
    evidence = "megatron"
    name = "megatron"
    title = "Megatron-Core"
    flags = FLAGS
    space = Space(
        zero=(0, 1),
        activations=(KEEP, GRANULARITIES[_PART], FULL),
        some_blocks=True,
        tensor=True,
        pipeline=True,
        context=True,
        expert=True,
        folds=(frozenset({"context"}), frozenset({"context", "tensor"})),
        chunks=True,
        any_rounds=True,
        uneven=True,
        deviations=(FP8.name, NARROW_GRADIENTS),
    )
    facts = frozenset({"Megatron", "flash attention", "overlapped gradients", "fused loss"})

    def facts_of(self, tensor: int, expert: int) -> frozenset[str]:
        of_experts = {_DISPATCH, _OVERLAP} if expert > 1 else set()
        return self.facts | of_experts | ({"overlapped tensor"} if tensor > 1 else set())

    def devices(self, cluster: Cluster) -> Cluster:
        return cluster.with_vendor_attention()  # Transformer Engine calls cuDNN

    def fuses(self, s: Setting) -> bool:
        return "eager" not in s.facts

    def overlap_tensor(self, s: Setting) -> float:
        # alone, context parallelism exchanges keys and values while attention computes (cp_comm_type p2p)
        return 1.0 if s.tensor == 1 and s.context > 1 and s.precision != "float16" else super().overlap_tensor(s)

    def overlap_experts(self, s: Setting) -> float:
        return paired_passes(s)

    def fuses_experts(self, s: Setting, cluster: Cluster) -> bool:
        # Transformer Engine's grouped MLP in MXFP8 (NVTE_CUTEDSL_FUSED_GROUPED_MLP), which Megatron-Bridge's recipes use on Blackwell alone
        blackwell = cluster.gpu.name.startswith(("B200", "B300", "GB200", "GB300"))
        return blackwell and s.precision == "float8" and _DISPATCH in s.facts

    def terms(self, s: Setting) -> dict[str, Any]:
        terms: dict[str, Any] = {"regather": True, "accumulation_fusion": True, "recomputes_modules": True}
        scaled = figures.MEGATRON_SCALED_BYTES.value if s.data * s.context > 1 else 0
        terms["prepared_bytes"] = int(figures.MEGATRON_PREPARED_BYTES.value + scaled)
        terms["update_bytes"] = int(figures.MEGATRON_UPDATE_BYTES.value)
        # input gradients are reduced during the products of weight gradients (megatron/core/tensor_parallel/layers.py)
        terms["starts_early"] = s.precision != "float16" and not s.facts & {"overlap off", "overlapped tensor"}
        return terms | {"saves_float8": s.precision == FLOAT8, "fp8_passes": figures.DELAYED_FP8_PASSES.value}

    def key(self, name: str) -> str:
        return name.rpartition(".")[2].lstrip("-").replace("-", "_")

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        words = _parallelism(s) + _batch(s, graph) + _pipeline(s, graph)
        words = [(spelled(name), *(f"'{word}'" if "|" in word else word for word in rest)) for name, *rest in words]
        lines = ["# source this file, and start: torchrun ... pretrain_gpt.py ${PLAN_ARGS[@]} ..."]
        lines += ["PLAN_ARGS=(", *(f"    {' '.join(each)}" for each in words), ")"]
        notes = ["flags of the model, the data, the optimizer and the learning rate are yours to add"]
        if s.tensor * s.context > 1:
            lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
            notes.append(
                "on GPUs before Blackwell Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1, which the file exports"
            )
        if s.expert > 1 and _DISPATCH in s.facts:
            notes.append("the flex dispatcher needs DeepEP (branch hybrid-ep)")
        if s.expert > 1 and s.tensor > 1 and not s.sequence:
            notes.append("Megatron requires --sequence-parallel for experts with tensor parallelism")
        return Exported({"megatron_args.sh": "\n".join(lines) + "\n"}, tuple(notes))

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        found = read_flags(options, self.flags, self.key)
        if found is None:
            return None
        values, facts, notes = dict(found.values), {"Megatron", *found.facts}, [*found.notes]
        if "unpriced" in values:
            raise UsageError(f"{values['unpriced']} is not priced", "without it, ZeRO 1 (use_distributed_optimizer) is")
        if "precision" not in values and "fp8" not in values:
            notes.append(
                "neither bf16 nor fp16: priced in the model's precision; without them Megatron trains in float32"
            )
        if "global_batch" not in values:
            notes.append("no global_batch_size: the model's is priced; Megatron's default is a single microbatch")
        values |= _fold(values)
        if any(option.name.startswith("--") for option in options):  # of pretrain_gpt.py; elsewhere a recipe may set it
            values.setdefault("dispatcher", _DEFAULT_DISPATCHER)
            values.setdefault("grouped", False)
        if values.get("expert", 1) > 1 and values.get("dispatcher") == _DEFAULT_DISPATCHER:
            notes.append(f"moe_token_dispatcher_type {_DEFAULT_DISPATCHER} is priced as alltoall")
        if not values.get("grouped", True) and (values.get("expert", 1) > 1 or "grouped" in found.values):
            notes.append("moe_grouped_gemm is off: mixtures are priced with it, and take longer than shown")
        if values.get("dispatcher") == "flex" and values.get("expert", 1) > 1:
            facts.add(_DISPATCH)
        if values.get("context_kind") == "a2a":
            facts.add("all-to-all context")
        facts.add("unfused attention" if values.get("attention") in ("unfused", "local") else "flash attention")
        values |= _stages(values, blocks)
        notes += _group_notes(values, devices)
        if "fp8" in values:  # beside --bf16
            values["precision"] = values["fp8"]
        if kind := values.get("granularity"):
            values |= _recomputed(kind, values, notes)
        else:
            values.pop("recomputed", None)
        if (_OVERLAP in facts or "delays_weights" in values) and (reason := _not_overlapped(values, facts, blocks)):
            raise UsageError(f"{_OVERLAP_FLAG} {reason}", "Megatron refuses it, too: change the flags, or leave it out")
        read = {name: value for name, value in values.items() if name not in _RESOLVED}
        return Reading(read, frozenset(facts), tuple(notes))


def _not_overlapped(values: Mapping[str, Any], facts: Collection[str], blocks: int) -> str:
    """Return why Megatron refuses to overlap the exchanges of experts (``TransformerConfig.__post_init__``), or an empty string."""
    virtual = values.get("chunks", 1) > 1 or (not blocks and ("chunk_layers" in values or "layout" in values))
    dispatched = values.get("dispatcher", "flex") in ("alltoall", "flex")
    refused = {
        "is off, but delay_wgrad_compute needs it": _OVERLAP not in facts,
        "needs expert_model_parallel_size of 2 or more": values.get("expert", 1) == 1,
        f"needs moe_token_dispatcher_type alltoall or flex (Megatron's default is {_DEFAULT_DISPATCHER})": not dispatched,
        f"excludes recompute_granularity {_WHOLE}": values.get("granularity") == _WHOLE,
        f"needs virtual stages on {values.get('pipeline', 1)} pipeline ranks": values.get("pipeline", 1) > 1
        and not virtual,
    }
    return next((reason for reason, holds in refused.items() if holds), "")


def _fold(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return over which ranks experts lie: Megatron's expert degree covers context-parallel ranks first, and tensor-parallel ranks if
    ``expert_tensor`` is 1."""
    expert, tensor, context = (values.get(name, 1) for name in ("expert", "tensor", "context"))
    sliced = values.get("expert_tensor", tensor)
    if expert == 1:
        return {}
    if sliced not in (1, tensor):
        raise UsageError(
            f"expert_tensor_parallel_size is {sliced}, but autopar prices only a degree of 1 or {tensor} (as for other layers)",
            "give one of the two",
        )
    inner = context * (tensor if sliced == 1 else 1)
    if expert % inner:
        raise UsageError(
            f"expert_model_parallel_size = {expert} covers a part of {inner} context- and tensor-parallel ranks, which autopar does not "
            "price",
            f"use a multiple of {inner}",
        )
    axes = {"tensor": sliced == 1 and tensor > 1, "context": context > 1}
    return {"folds": frozenset(name for name, is_folded in axes.items() if is_folded)}


def _stages(values: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Return the chunks and the cuts of the pipeline."""
    pipeline = values.get("pipeline", 1)
    if (text := values.get("layout")) and blocks:
        bounds = layout_bounds(text, blocks)
        if (len(bounds) - 1) % pipeline:
            raise UsageError(
                f"the layout has {len(bounds) - 1} stages, which {pipeline} pipeline ranks do not divide",
                "separate stages by |",
            )
        return {"chunks": (len(bounds) - 1) // pipeline, "cuts": bounds[1:-1]}
    if (each := values.get("chunk_layers")) and pipeline > 1 and blocks:
        if blocks % (pipeline * each):
            raise UsageError(
                f"{blocks} blocks do not divide into virtual stages of {each} on {pipeline} pipeline ranks",
                "change num-layers-per-virtual-pipeline-stage",
            )
        return {"chunks": blocks // (pipeline * each)}
    if pipeline > 1 and blocks and any(name in values for name in ("first", "last", "embedding_counts", "loss_counts")):
        return {"cuts": _uneven_cuts(values, blocks, pipeline)}
    return {}


def _group_notes(values: Mapping[str, Any], devices: int) -> list[str]:
    """Return a note if an interleaved pipeline runs its microbatches in groups of another size than priced."""
    tensor, pipeline, context = (values.get(name, 1) for name in ("tensor", "pipeline", "context"))
    ranks = devices // (tensor * pipeline * context) * values.get("microbatch", 1)
    microbatches = values.get("global_batch", 0) // ranks if ranks else 0
    if "round" not in values or values.get("chunks", 1) == 1 or pipeline == 1 or not microbatches:
        return []
    priced, size = round_size(pipeline, microbatches), values["round"]
    return [f"microbatch groups of {size} are priced as groups of {priced}"] if size != priced else []


def _uneven_cuts(values: Mapping[str, Any], blocks: int, pipeline: int) -> tuple[int, ...]:
    """Return the cuts of a pipeline whose first and last stage have other numbers of blocks: given ones, or one less because the embedding
    or the loss counts as a block."""
    if values.get("chunks", 1) > 1:
        raise UsageError("uneven stages with virtual stages are not read", "give pipeline_model_parallel_layout")
    known: dict[int, int] = {
        stage: values[name] for stage, name in ((0, "first"), (pipeline - 1, "last")) if name in values
    }
    counted = {stage: 1 for stage, name in ((0, "embedding_counts"), (pipeline - 1, "loss_counts")) if name in values}
    less = {stage: n for stage, n in counted.items() if stage not in known}
    each, odd = divmod(blocks - sum(known.values()) + sum(less.values()), max(1, pipeline - len(known)))
    sizes = [known.get(stage, each - less.get(stage, 0)) for stage in range(pipeline)]
    if odd or min(sizes) < 0 or sum(sizes) != blocks:
        raise UsageError(
            f"{blocks} blocks do not divide into {pipeline} stages with {sorted(known.values()) or 'the embedding and the loss as blocks'}",
            "change the pipeline's flags",
        )
    return tuple(accumulate([1 + sizes[0], *sizes[1:-1]]))


def _recomputed(kind: str, values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the technique that a granularity stands for, and to how many blocks of each stage it applies."""
    if kind == _WHOLE:
        blocks = values.get("recomputed", 1)
        if values.get("recompute_method") == "block":
            return {"activations": FULL, "recomputed": blocks}
        return {"activations": FULL if blocks == 1 else f"{FULL}:{blocks}", "recomputed": None}
    if kind not in GRANULARITIES:
        raise UsageError(f"recompute_granularity is {kind!r}", f"Megatron's are {_WHOLE} and {_PART}")
    modules = set(re.findall(r"\w+", str(values.get("modules", "core_attn")))) - {
        "core_attn"
    }  # a YAML list has brackets
    if kind == _PART and modules and modules <= _MODULES:
        if missing := sorted(_MODULES - modules):
            notes.append(f"recompute_modules is priced with {' and '.join(missing)}, too, where the model has them")
        return {"activations": GRANULARITIES[_PART], "recomputed": None}
    if kind == _PART and modules:
        notes.append(
            f"recompute_modules={values['modules']} is priced as none: the plan needs less memory and more time than shown"
        )
    elif kind == _PART:
        notes.append(f"recompute_granularity={_PART} is priced as none: flash attention saves no scores")
    return {"activations": KEEP, "recomputed": None}


def _parallelism(s: Setting) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = [
        ("tensor_model_parallel_size", str(s.tensor)),
        ("pipeline_model_parallel_size", str(s.pipeline)),
        ("context_parallel_size", str(s.context)),
    ]
    words += [("cp_comm_type", "a2a" if "all-to-all context" in s.facts else "p2p")] if s.context > 1 else []
    if s.expert > 1:
        words.append(("expert_model_parallel_size", str(s.expert)))
        words.append(("expert_tensor_parallel_size", str(1 if "tensor" in s.folds else s.tensor)))
        words += _exchange(s)
    words += [("sequence_parallel",)] if s.sequence else []
    words += [("tp_comm_overlap",)] if "overlapped tensor" in s.facts else []
    if s.zero:
        words.append(("use_distributed_optimizer",))
        words += [("num_distributed_optimizer_instances", str(s.replicate))] if s.replicate > 1 else []
    if "overlapped gradients" in s.facts:
        words.append(("overlap_grad_reduce",))
        words += [("overlap_param_gather",)] if s.zero else []
    return words


def _exchange(s: Setting) -> list[tuple[str, ...]]:
    """Return how tokens are sent to their experts; by default every rank gathers all of them."""
    if _DISPATCH not in s.facts:
        return [("moe_token_dispatcher_type", "alltoall")]
    words: list[tuple[str, ...]] = [
        ("moe_token_dispatcher_type", "flex"),
        ("moe_flex_dispatcher_backend", "hybridep"),
        ("moe_permute_fusion",),
    ]
    return words + ([(_OVERLAP_FLAG,)] if overlaps_experts(s) else [])


def overlaps_experts(s: Setting) -> bool:
    """Return whether Megatron can run exchanges of one microbatch under the computation of another, and does."""
    others = s.microbatches > 1 and (s.pipeline == 1 or s.chunks > 1)
    return _OVERLAP in s.facts and s.expert > 1 and others and s.activations.split(":")[0] != FULL


def paired_passes(s: Setting) -> float:
    """Return the fraction of forward passes that run with a backward pass, rounded to few values, for which prices are computed: not those
    of the first rank's warm-up (``get_pp_rank_microbatches``), or without a pipeline the first one."""
    if not overlaps_experts(s):
        return 0.0
    warmup = 2 * (s.pipeline - 1) + (s.chunks - 1) * round_size(s.pipeline, s.microbatches) + 1 if s.pipeline > 1 else 1
    every = s.microbatches * (s.chunks if s.pipeline > 1 else 1)
    return round(_SHARES * max(0.0, 1 - warmup / every)) / _SHARES


def _batch(s: Setting, graph: Graph) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = [
        ("micro_batch_size", str(s.microbatch)),
        ("global_batch_size", str(s.global_batch)),
        ("seq_length", str(graph.tokens // graph.batch_size)),
    ]
    precisions: dict[str, list[tuple[str, ...]]] = {
        "bfloat16": [("bf16",)],
        "float16": [("fp16",)],
        "float8": [("bf16",), ("fp8_format", "hybrid")],
    }
    words += precisions.get(s.precision, [])
    words += [("grad_reduce_in_bf16",)] if "16-bit gradients" in s.facts else []
    # "flash" is the package flash-attn alone: without cuDNN, and refused for the heads of latent attention
    words += [("attention_backend", "auto")] if "flash attention" in s.facts else []
    words += [("cross_entropy_loss_fusion",)] if "fused loss" in s.facts else []
    # Megatron recomputes experts' activations of grouped products alone (moe_act in recompute_modules)
    words += [("moe_grouped_gemm",)] if any(cls.mixtures for cls in graph.classes.values()) else []
    return words


def _pipeline(s: Setting, graph: Graph) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = []
    if s.pipeline > 1:
        bounds = stage_bounds(graph, s)
        if not is_even(bounds):
            words.append(("pipeline_model_parallel_layout", layout_text(bounds)))
        elif s.chunks > 1:
            words.append(("num_virtual_stages_per_pipeline_rank", str(s.chunks)))
        if s.chunks > 1 and (size := round_size(s.pipeline, s.microbatches)) != s.pipeline:
            words.append(("microbatch_group_size_per_virtual_pipeline_stage", str(size)))
    technique, _, segment = s.activations.partition(":")
    if technique == GRANULARITIES[_PART]:
        words.append(("recompute_granularity", _PART))
        words.append(("recompute_modules", *_modules(graph)))
    if technique == FULL:
        every = s.recomputed is None
        words.append(("recompute_granularity", "full"))
        words.append(("recompute_method", "uniform" if every else "block"))
        words.append(("recompute_num_layers", (segment or "1") if every else str(s.recomputed)))
    return words


def _modules(graph: Graph) -> list[str]:
    """Return the modules to recompute that the model has."""
    latent = any(
        up_projections(tuple(cls.graph.graph.nodes), max((v.shape[-1] for v in cls.activations if v.shape), default=0))
        for cls in graph.classes.values()
    )
    experts = any(cls.mixtures for cls in graph.classes.values())
    return ["layernorm", *(["mla_up_proj"] if latent else []), *(["moe_act"] if experts else [])]


def spelled(name: str) -> str:
    """Return a flag as it is written: ``--micro-batch-size``."""
    return f"--{name.replace('_', '-')}"


def layout_text(bounds: Sequence[int]) -> str:
    """Return ``--pipeline-model-parallel-layout`` of stages with these bounds: ``E`` is the embedding, ``t`` a block, ``L`` the head, and
    ``|`` separates stages."""
    last = bounds[-1] - 1
    letters = ["E" if i == 0 else "L" if i == last else "t" for i in range(bounds[-1])]
    return "|".join("".join(letters[a:b]) for a, b in pairwise(bounds))


def layout_bounds(text: str, blocks: int) -> tuple[int, ...]:
    """Return the stage bounds of a layout such as ``Ettt|(tt|)*29,tttL``. Raises ``UsageError`` if it does not have ``blocks`` blocks
    between one embedding and one head."""
    letters = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        letters = re.sub(pattern, lambda match: match[1] * int(match[2]), letters)
    stages = letters.split("|")
    if "".join(stages) != f"E{'t' * blocks}L":
        raise UsageError(
            f"the pipeline layout {text!r} is not an embedding (E), {blocks} blocks (t) and a head (L)",
            "multi-token heads (m) are not read",
        )
    return (0, *accumulate(map(len, stages)))
