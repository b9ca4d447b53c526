"""Exported configurations are read back as the settings that they were written from. ``make report NAME=exports`` has the trainers' own
parsers read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx

from autopar.devices import parse
from autopar.errors import UsageError
from autopar.techniques import Options
from autopar.trainers import TRAINERS, Exported, Setting
from autopar.trainers.megatron import layout_bounds, layout_text, overlaps_experts
from autopar.trainers.options import read_options
from autopar.trainers.reading import read, setting_of

DEVICES, BLOCKS, SEQ = 64, 32, 4096
CLUSTER = parse("8x8xH100-80GB")
FILES = {
    "megatron": ["megatron_args.sh"],
    "torchtitan": ["torchtitan_args.sh", "torchtitan_plan.py"],
    "deepspeed": ["ds_config.json"],
    "accelerate": ["accelerate.yaml"],
}
EVEN = (0, *range(5, 33, 4), 34)
UNEVEN = (0, 4, 8, 12, 16, 21, 26, 31, 34)


def setting(trainer: str, activations: str = "keep", **fields: Any) -> Setting:
    """A setting on 64 devices: what ``fields`` leaves open is data-parallel."""
    degrees = {name: fields.pop(name, 1) for name in ("tensor", "pipeline", "context")}
    data = DEVICES // degrees["tensor"] // degrees["pipeline"] // degrees["context"]
    known: dict[str, Any] = {
        "expert": 1, "chunks": 1, "sequence": degrees["tensor"] > 1 and trainer != "accelerate", "precision": "bfloat16",
        "global_batch": 512, "microbatch": 2, "facts": TRAINERS[trainer].facts_of(degrees["tensor"], fields.get("expert", 1)),
    }  # fmt: skip
    return Setting(data=data, **degrees, options=Options(activations=activations), **(known | fields))


def exported(trainer: str, s: Setting) -> Exported:
    mixture = SimpleNamespace(mixtures=((8, 2),), activations=(), graph=SimpleNamespace(graph=fx.Graph()))
    graph: Any = SimpleNamespace(
        tokens=s.global_batch * SEQ,
        batch_size=s.global_batch,
        layers=[None] * (BLOCKS + 2),
        classes={"mixture": mixture} if s.expert > 1 else {},
    )
    return TRAINERS[trainer].export(s, graph, CLUSTER)


def read_back(trainer: str, s: Setting, folder: Path, file: str, old: str = "", new: str = "") -> Setting:
    """The setting that an exported file says, after ``old`` in it was replaced by ``new``."""
    text = exported(trainer, s).files[file]
    assert old in text
    (folder / file).write_text(text.replace(old, new) if old else text)
    found = read(TRAINERS[trainer], read_options(folder / file), BLOCKS, DEVICES, file)
    assert found.values.get("seq", SEQ) == SEQ
    assert not any("()" in note for note in found.notes)  # calls of other functions than configurations
    # DeepSpeed's file and Accelerate's leave sizes to the script
    batch = found.values.get("global_batch", s.global_batch)
    back = setting_of(TRAINERS[trainer], found, DEVICES, batch, found.values.get("precision", s.precision))
    return back if trainer != "accelerate" else dataclasses.replace(back, microbatch=s.microbatch)


CASES = {
    "megatron": [
        {"zero": 1},
        {"zero": 1, "tensor": 4, "pipeline": 2, "chunks": 4, "cuts": EVEN[1:-1], "activations": "full"},
        {
            "zero": 1,
            "tensor": 2,
            "pipeline": 4,
            "chunks": 2,
            "cuts": UNEVEN[1:-1],
            "activations": "full",
            "recomputed": 2,
        },
        {"zero": 1, "tensor": 2, "expert": 8, "folds": frozenset({"tensor"})},
        {"zero": 1, "expert": 8, "pipeline": 2, "cuts": (20,), "activations": "selective"},
        {"zero": 1, "tensor": 2, "context": 2, "expert": 8, "folds": frozenset({"context"}), "activations": "full:2"},
        {"zero": 1, "replicate": 2, "precision": "float8"},
        {"zero": 0, "sequence": False, "tensor": 8, "precision": "float32"},
    ],
    "torchtitan": [
        {"zero": 3},
        {"zero": 2, "pipeline": 4, "chunks": 2, "cuts": UNEVEN[1:-1]},
        {"zero": 3, "pipeline": 8, "cuts": UNEVEN[1:-1], "activations": "selective"},
        {"zero": 3, "tensor": 4, "replicate": 4, "activations": "full"},
        {"zero": 3, "tensor": 4, "sequence": False},
        {"zero": 2, "tensor": 2, "context": 2, "expert": 8, "folds": frozenset({"tensor", "context"})},
        {"zero": 0, "precision": "float32"},
    ],
    "deepspeed": [{"zero": zero, "precision": "bfloat16" if zero else "float16"} for zero in range(4)],
    "accelerate": [
        {"zero": 3, "activations": "full"},
        {"zero": 2, "tensor": 2, "context": 2},
        {"zero": 3, "replicate": 4, "precision": "float32"},
    ],
}


@pytest.mark.parametrize(
    ("trainer", "file", "fields"),
    [(name, file, fields) for name, files in FILES.items() for file in files for fields in CASES[name]],
)
def test_an_exported_configuration_is_read_back(tmp_path: Path, trainer: str, file: str, fields: dict[str, Any]):
    s = setting(trainer, **fields)
    back = read_back(trainer, s, tmp_path, file)
    if file == "torchtitan_args.sh":  # flags cannot set the loss
        back = dataclasses.replace(back, facts=back.facts | {"fused loss"})
        assert any("ChunkedLossWrapper" in note for note in exported(trainer, s).notes)
    if trainer == "megatron" and not overlaps_experts(s):  # the flag is written where Megatron accepts it
        s = dataclasses.replace(s, facts=s.facts - {"overlapped experts"})
    if trainer == "megatron":
        words = exported(trainer, s).files[file]
        assert ("--moe-grouped-gemm" in words) == (s.expert > 1)
        assert ("moe_act" in words) == (s.expert > 1 and "--recompute-modules" in words)
    if back.cuts is None:  # as the trainer cuts by itself
        back = dataclasses.replace(back, cuts=s.cuts)
        assert s.cuts in (None, EVEN[1:-1])
    assert back == s


FAULTS = [
    ("megatron", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4", "tensor"),
    ("megatron", "--recompute-num-layers 2", "--recompute-num-layers 3", "recomputed"),
    ("megatron", "|ttttL", "t|tttL", "cuts"),
    ("megatron", "    --use-distributed-optimizer\n", "", "zero"),
    ("torchtitan", "reshard_after_forward always", "reshard_after_forward never", "zero"),
    ("torchtitan", "--parallelism.enable_sequence_parallel", "--parallelism.no_enable_sequence_parallel", "sequence"),
    ("torchtitan", "checkpoint:full", "checkpoint:none", "options"),
    ("deepspeed", '"stage": 3', '"stage": 2', "zero"),
]


@pytest.mark.parametrize(("trainer", "old", "new", "field"), FAULTS)
def test_a_changed_word_is_another_setting(tmp_path: Path, trainer: str, old: str, new: str, field: str):
    which = {"megatron": 2, "torchtitan": 3, "deepspeed": 3, "accelerate": 2}[trainer]
    fields: dict[str, Any] = CASES[trainer][which]
    if "|" in new:
        fields = fields | {"cuts": (*UNEVEN[1:-2], 29)}
    s, file = setting(trainer, **fields), FILES[trainer][0]
    same, back = read_back(trainer, s, tmp_path, file), read_back(trainer, s, tmp_path, file, old, new)
    changed = {each.name for each in dataclasses.fields(s) if getattr(back, each.name) != getattr(same, each.name)}
    assert changed == {field} | ({"data"} if field == "tensor" else set())


@pytest.mark.parametrize("bounds", [EVEN, UNEVEN, (0, 1, 33, 34), (0, 34)])
def test_layouts_are_read_as_written(bounds: tuple[int, ...]):
    text = layout_text(bounds)
    assert layout_bounds(text, BLOCKS) == bounds and text.count("t") == BLOCKS
    assert layout_bounds(f"E{'t' * 3}|(t|)*28,tL", BLOCKS) == (0, *range(4, 33), 34)


@pytest.mark.parametrize(
    ("trainer", "old", "new", "message"),
    [
        ("megatron", "ttttL", "tttL", "is not an embedding"),
        ("megatron", "--micro-batch-size 2", "--micro-batch-size two", "'two' is not a positive integer"),
        ("torchtitan", "norm,lm_head", "lm_head", "does not have the modules of 32 blocks"),
        ("torchtitan", " norm,lm_head", ",norm,lm_head", "has 7 stages, which 4 pipeline ranks do not divide"),
        ("torchtitan", "checkpoint:none", "checkpoint:most", "activation checkpointing is 'most'"),
        ("deepspeed", '"stage": 3', '"stage": 4', "is not a ZeRO stage"),
        ("accelerate", "replicate_size: 4", "replicate_size: 0", "'0' is not a positive integer"),
        ("accelerate", "replicate_size: 4", "replicate_size: 8", "8 replicas of .* are not the"),
        ("torchtitan", "replicate_degree 4", "replicate_degree 2", "2 replicas of .* are not the"),
        ("deepspeed", '"train_micro_batch_size_per_gpu": 2', '"train_micro_batch_size_per_gpu": 1', "is not 1 x "),
    ],
)
def test_invalid_values_get_a_sentence(tmp_path: Path, trainer: str, old: str, new: str, message: str):
    which = {"megatron": 2, "torchtitan": 3 if "replicate" in old else 1, "deepspeed": 3, "accelerate": 2}[trainer]
    fields = CASES[trainer][which] | ({"cuts": (*UNEVEN[1:-2], 29)} if "ttttL" in old else {})
    if "norm" in old:
        fields = fields | {"cuts": (*UNEVEN[1:-2], 33)}
    with pytest.raises(UsageError, match=message) as error:
        read_back(trainer, setting(trainer, **fields), tmp_path, FILES[trainer][0], old, new)
    assert error.value.hint and "\n" not in error.value.message


def test_what_trainers_refuse_is_not_exported():
    for fields in ({"pipeline": 2, "cuts": (17,)}, {"expert": 8}):
        words = exported("torchtitan", setting("torchtitan", zero=2, **fields)).files["torchtitan_args.sh"]
        assert "--training.disable_cuda_graphs\n" in words and " True" not in words and " False" not in words
    degrees = {"tensor": 2, "expert": 8, "folds": frozenset({"tensor"})}
    words = exported("megatron", setting("megatron", zero=1, **degrees)).files["megatron_args.sh"]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in words and "--moe-token-dispatcher-type flex" in words
    assert "--overlap-moe-expert-parallel-comm" in words
    degrees |= {"facts": frozenset({"Megatron"})}
    words = exported("megatron", setting("megatron", zero=1, **degrees)).files["megatron_args.sh"]
    assert "--moe-token-dispatcher-type alltoall" in words and "--overlap-moe" not in words
    chunked = {"zero": 1, "pipeline": 4, "chunks": 2, "cuts": EVEN[1:-1]}
    for batch, group in ((512, ()), (14 * 32, ("--microbatch-group-size-per-virtual-pipeline-stage 7",))):
        words = exported("megatron", setting("megatron", global_batch=batch, **chunked)).files["megatron_args.sh"]
        assert all(word in words for word in group) and ("--microbatch-group" in words) == bool(group)
    alone = dataclasses.replace(setting("accelerate", zero=0, tensor=8), data=1)
    assert "fsdp" not in exported("accelerate", alone).files["accelerate.yaml"].lower()
