"""Configurations of other trainers, read as settings: scripts, YAML, TOML, JSON, Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import AutoparError, UsageError
from autopar.trainers import DEEPSPEED as DEEPSPEED_TRAINER
from autopar.trainers import MEGATRON, TORCHTITAN, Setting
from autopar.trainers.options import Option, of_words, read_options, shell_words
from autopar.trainers.reading import read, recognised, setting_of

BLOCKS, DEVICES, BATCH = 32, 64, 512

SCRIPT = """#!/bin/bash
# a comment with --tensor-model-parallel-size 7
TP=4
PP=${PP:-2}
MODEL="--num-layers 32 \\
       --seq-length 4096"
PARALLEL=(
    --tensor-model-parallel-size $TP   # the node
    --pipeline-model-parallel-size ${PP}
    --sequence-parallel --use-distributed-optimizer
    --num-layers-per-virtual-pipeline-stage 4
)
torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL ${PARALLEL[@]} --bf16 --micro-batch-size 2 --global-batch-size=512 --lr $LR \\
    --recompute-granularity full --recompute-method block --recompute-num-layers 3
"""
YAML = """
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  sequence_parallel: true
  use_distributed_optimizer: true
  recompute_granularity: full
  recompute_method: block
  recompute_num_layers: 3
  seq_length: 4096
  bf16: true
  micro_batch_size: 2
  global_batch_size: 512
"""
TITAN = """
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 4
[training]
local_batch_size = 2
global_batch_size = 512
seq_len = 4096
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""
TITAN_FUNCTION = """
def mine():
    return Trainer.Config(
        parallelism=ParallelismConfig(data_parallel_replicate_degree=2, tensor_parallel_degree=4),
        training=TrainingConfig(local_batch_size=2, global_batch_size=512, seq_len=4096),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=True),
    )
"""
DEEPSPEED = """
{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 64
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_tp_size: 4
"""


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def setting(file: Path, batch: int = BATCH) -> Setting:
    options = read_options(file)
    trainer = recognised(options, DEVICES, str(file))
    return setting_of(trainer, read(trainer, options, BLOCKS, DEVICES, str(file)), DEVICES, batch, "bfloat16")


def test_a_script_and_yaml_of_megatron_say_the_same(tmp_path: Path):
    found = [setting(written(tmp_path, *file)) for file in (("run.sh", SCRIPT), ("run.yaml", YAML))]
    assert found[0] == found[1]
    s = found[0]
    assert (s.tensor, s.pipeline, s.data, s.chunks, s.zero, s.sequence) == (4, 2, 8, 4, 1, True)
    assert (s.activations, s.recomputed, s.microbatch, s.microbatches) == ("full", 3, 2, 32)


def test_toml_flags_and_a_function_of_torchtitan_say_the_same(tmp_path: Path):
    flags = (
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.tensor_parallel_degree=4 --training.local_batch_size 2 "
        "--training.global_batch_size 512 --training.seq_len 4096 --compile.enable activation_checkpoint:selective"
    )
    files = ("job.toml", TITAN), ("config.py", TITAN_FUNCTION), ("run.sh", f"torchrun -m torchtitan.train {flags}")
    found = [setting(written(tmp_path, *file)) for file in files]
    assert found[0] == found[1] == found[2]
    s = found[0]
    assert (s.tensor, s.data, s.zero, s.replicate, s.activations, s.microbatch) == (4, 16, 3, 2, "selective", 2)
    assert "compiled" in s.facts and s.sequence


def test_deepspeed_and_accelerate(tmp_path: Path):
    s = setting(written(tmp_path, "ds.json", DEEPSPEED))
    assert (s.zero, s.data, s.microbatch, s.microbatches, s.precision) == (3, 64, 2, 4, "bfloat16")
    options = read_options(tmp_path / "ds.json")
    reading = read(recognised(options, DEVICES, "ds"), options, BLOCKS, DEVICES, "ds")
    assert any("offloaded to cpu" in note for note in reading.notes)
    s = setting(written(tmp_path, "acc.yaml", ACCELERATE))
    assert (s.zero, s.replicate, s.tensor, s.data, s.activations) == (2, 2, 4, 16, "full")


def test_torchtitan_keeps_parameters_gathered_in_a_pipeline_by_default():
    words = ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "32"]
    for policy, stage in (([], 2), (["--parallelism.fsdp_reshard_after_forward", "always"], 3)):
        options = of_words([*words, *policy])
        reading = read(TORCHTITAN, options, BLOCKS, DEVICES, "flags")
        assert reading.values["zero"] == stage
        # the pipeline splits the local batch into microbatches of one
        assert reading.values["microbatch"] == 1 and reading.values["global_batch"] == 32 * 32


def test_an_uneven_layout_of_megatron():
    options = of_words(["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et*7|(t|)*2,t*23L"])
    assert read(MEGATRON, options, 32, 2, "flags").values["cuts"] == (8, 9, 10)
    with pytest.raises(UsageError, match="is not an embedding .* 31 blocks"):
        read(MEGATRON, options, 31, 2, "flags")


def test_experts_of_megatron_are_folded_over_context_and_tensor_ranks():
    def folds(*words: str) -> frozenset[str]:
        degrees = [
            "--tensor-model-parallel-size",
            "2",
            "--context-parallel-size",
            "2",
            "--expert-model-parallel-size",
            "8",
        ]
        return read(MEGATRON, of_words([*degrees, *words]), BLOCKS, 64, "flags").values["folds"]

    assert folds() == {"context"} and folds("--expert-tensor-parallel-size", "1") == {"context", "tensor"}
    with pytest.raises(UsageError, match="expert_tensor_parallel_size is 4"):
        folds("--expert-tensor-parallel-size", "4")


def test_what_is_not_read_is_a_note_and_a_later_value_counts():
    options = of_words(["--overlap-cat", "--micro-batch-size", "2", "--micro-batch-size", "4", "--seq-length", "$SEQ"])
    reading = read(MEGATRON, options, BLOCKS, DEVICES, "flags")
    assert reading.values == {"microbatch": 4}
    assert [any(words in note for note in reading.notes) for words in ("--overlap-cat", "4 counts, not 2", "$SEQ")] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.sh", "echo hello", "no option that autopar reads"),
        ("x.sh", "--micro-batch-size one", "'one' is not a whole number"),
        ("x.sh", "--micro-batch-size \u00b2", "is not a whole number"),
        ("x.sh", "--micro-batch-size", "--micro-batch-size has no value"),
        ("x.sh", "--tensor-model-parallel-size 5", "64 devices do not divide by tensor 5"),
        ("x.sh", "--micro-batch-size 3", "does not divide into microbatches of 3"),
        ("x.sh", 'ARGS="--bf16', "is not readable"),
        ("x.yaml", "a: [", "is not readable"),
        ("x.yaml", "!!python/object/apply:os.system ['true']", "is not readable"),
        ("x.json", '{"zero_optimization": {"stage": 7}}', "'7' is not a ZeRO stage"),
        ("x.py", "def (", "is not readable"),
        ("x.toml", "[parallelism", "is not readable"),
        ("x.toml", "[activation_checkpoint]\nmode = 'some'", "activation checkpointing is 'some'"),
        ("x.sh", "--recompute-granularity half", "recompute_granularity is 'half'"),
    ],
)
def test_bad_configurations_get_a_sentence(tmp_path: Path, name: str, text: str, message: str):
    with pytest.raises(AutoparError, match=message.replace("(", r"\(")) as error:
        file = written(tmp_path, name, text)
        options = read_options(file)
        try:
            trainer = recognised(options, DEVICES, str(file))
        except UsageError:  # the trainer refused what it reads; name it, as with --trainer
            if "no option" in message:
                raise
            trainer = {"json": DEEPSPEED_TRAINER, "toml": TORCHTITAN}.get(file.suffix[1:], MEGATRON)
        setting_of(trainer, read(trainer, options, BLOCKS, DEVICES, str(file)), DEVICES, BATCH, "bfloat16")
    assert error.value.hint and "\n" not in error.value.message


def test_a_script_is_split_and_not_run(tmp_path: Path):
    marker = tmp_path / "ran"
    words = shell_words(f"X=$(touch {marker}) `touch {marker}` --bf16; touch {marker}")
    assert "--bf16;" in words or "--bf16" in words
    assert not marker.exists()
    assert of_words(["--a=1", "--b", "2", "--c", "part:x"]) == [
        Option("--a", "1"),
        Option("--b", "2"),
        Option("--c", "part:x"),
        Option("part", "x"),
    ]
