"""Configurations of other trainers, read as settings: scripts, YAML, TOML, JSON, Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import AutoparError, UsageError
from autopar.trainers import ACCELERATE as ACCELERATE_TRAINER
from autopar.trainers import DEEPSPEED as DEEPSPEED_TRAINER
from autopar.trainers import MEGATRON, TORCHTITAN, Setting
from autopar.trainers.options import Option, of_words, read_options, shell_words
from autopar.trainers.reading import read, recognised, setting_of

BLOCKS, DEVICES, BATCH = 32, 64, 512
UNDISPATCHED = "--expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm"
OVERLAPPED = f"{UNDISPATCHED} --moe-token-dispatcher-type alltoall"

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
    trainer = recognised(options, str(file))
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
    reading = read(recognised(options, "ds"), options, BLOCKS, DEVICES, "ds")
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


def test_megatron_overlaps_exchanges_of_experts_with_virtual_stages_only():
    words = f"{OVERLAPPED} --delay-wgrad-compute --pipeline-model-parallel-size 2"
    for stages in ("--num-virtual-stages-per-pipeline-rank 4", "--num-layers-per-virtual-pipeline-stage 4"):
        for blocks in (BLOCKS, 0):
            reading = read(MEGATRON, of_words(f"{words} {stages}".split()), blocks, DEVICES, "flags")
            assert "overlapped experts" in reading.facts and reading.values["expert"] == 8, reading


def test_a_recipe_of_megatron_bridge_may_set_the_dispatcher_that_its_overrides_leave_out(tmp_path: Path):
    """Providers of Megatron-Bridge for mixtures set alltoall or flex; the default is that of ``pretrain_gpt.py``."""
    text = "model:\n  expert_model_parallel_size: 8\n  overlap_moe_expert_parallel_comm: true\n"
    options = read_options(written(tmp_path, "overrides.yaml", text))
    reading = read(MEGATRON, options, BLOCKS, DEVICES, "overrides.yaml")
    assert "overlapped experts" in reading.facts and not any("allgather" in note for note in reading.notes)
    reading = read(MEGATRON, of_words(["--expert-model-parallel-size", "8"]), BLOCKS, DEVICES, "flags")
    assert "moe_token_dispatcher_type allgather is priced as alltoall" in reading.notes


@pytest.mark.parametrize(
    ("name", "text", "noted"),
    [
        ("x.yaml", "model:\n  moe_grouped_gemm: false\n  tensor_model_parallel_size: 2\n", True),
        ("x.yaml", "model:\n  moe_grouped_gemm: true\n  tensor_model_parallel_size: 2\n", False),
        ("x.yaml", "model:\n  expert_model_parallel_size: 8\n", False),  # a recipe may set it
        ("x.sh", "--expert-model-parallel-size 8 --moe-grouped-gemm", False),
        ("x.sh", "--expert-model-parallel-size 8", True),  # off by default
        ("x.sh", "--tensor-model-parallel-size 8", False),  # there may be no experts
    ],
)
def test_experts_without_grouped_products_are_noted(tmp_path: Path, name: str, text: str, noted: bool):
    reading = read(MEGATRON, read_options(written(tmp_path, name, text)), BLOCKS, DEVICES, name)
    assert any(note.startswith("moe_grouped_gemm is off") for note in reading.notes) == noted


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


@pytest.mark.parametrize(
    ("words", "cuts"),
    [
        ("--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 7", (6, 16, 26)),
        ("--decoder-last-pipeline-num-layers 2", (11, 21, 31)),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", None),
        ("--account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 9", (10, 18, 26)),
    ],
)
def test_uneven_stages_of_megatron(words: str, cuts: tuple[int, ...] | None):
    options = of_words(["--pipeline-model-parallel-size", "4", *words.split()])
    if cuts is None:
        with pytest.raises(UsageError, match="32 blocks do not divide into 4 stages"):
            read(MEGATRON, options, BLOCKS, DEVICES, "flags")
        options = of_words(["--pipeline-model-parallel-size", "2", *words.split()])
        assert read(MEGATRON, options, BLOCKS, DEVICES, "flags").values["cuts"] == (17,)
        return
    assert read(MEGATRON, options, BLOCKS, DEVICES, "flags").values["cuts"] == cuts


def test_switches_that_are_off_and_defaults(tmp_path: Path):
    off = written(
        tmp_path, "off.yaml", "tensor_model_parallel_size: 2\nfp8: False\nbf16: true\nsequence_parallel: no\n"
    )
    values = read(MEGATRON, read_options(off), BLOCKS, DEVICES, "off").values
    assert values == {"tensor": 2, "precision": "bfloat16"}
    both = of_words(["--bf16", "--fp8-format", "hybrid"])
    assert read(MEGATRON, both, BLOCKS, DEVICES, "flags").values == {"precision": "float8"}
    notes = read(MEGATRON, of_words(["--micro-batch-size", "1"]), BLOCKS, DEVICES, "flags").notes
    assert any("Megatron trains in float32" in note for note in notes)
    plain = read(TORCHTITAN, of_words(["--training.local_batch_size", "1"]), BLOCKS, DEVICES, "flags")
    assert plain.values["activations"] == "selective" and any("torchtitan's default" in note for note in plain.notes)
    kinds = {"FullAC.Config()": "full", "None": "keep", "SelectiveAC.Config(debug=True)": "selective"}
    for number, (text, kind) in enumerate(kinds.items()):
        code = f"def f(config):\n    config.parallelism.tensor_parallel_degree = 2\n    config.activation_checkpoint = {text}\n"
        options = read_options(written(tmp_path, f"{number}.py", code))
        assert read(TORCHTITAN, options, BLOCKS, DEVICES, text).values["activations"] == kind


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"train_batch_size": 512}, (512, 8)),
        ({"train_micro_batch_size_per_gpu": 4}, (256, 4)),
        ({"train_batch_size": 512, "gradient_accumulation_steps": 4}, (512, 2)),
        ({"train_batch_size": 512, "train_micro_batch_size_per_gpu": 2}, (512, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (512, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, (None, 2)),
    ],
)  # fmt: skip
def test_deepspeed_completes_batches(sizes: dict[str, object], batch: tuple[int | None, int]):
    options = [Option(name, value) for name, value in sizes.items()]
    options += [Option("zero_optimization.stage", 2), Option("bf16.enabled", "auto"), Option("fp16.enabled", "auto")]
    found = read(DEEPSPEED_TRAINER, options, BLOCKS, DEVICES, "ds")
    assert (found.values.get("global_batch"), found.values["microbatch"]) == batch
    assert "precision" not in found.values and any("bf16.enabled" in note for note in found.notes)


def test_replicas_of_all_ranks_shard_nothing():
    for trainer, words in (
        (TORCHTITAN, "--parallelism.data_parallel_replicate_degree 64 --training.local_batch_size 1"),
        (MEGATRON, "--use-distributed-optimizer --num-distributed-optimizer-instances 64 --micro-batch-size 1"),
    ):
        reading = read(trainer, of_words(words.split()), BLOCKS, DEVICES, "flags")
        s = setting_of(trainer, reading, DEVICES, 64, "bfloat16")
        assert (s.zero, s.replicate, s.data) == (0, 1, 64)


def test_several_words_are_one_value():
    words = "--recompute-granularity selective --recompute-modules moe mlp --bf16"
    notes = read(MEGATRON, of_words(words.split()), BLOCKS, DEVICES, "flags").notes
    assert any("recompute_modules=moe mlp is priced as none" in note for note in notes)


def test_tokens_are_dispatched_by_kernels_to_experts_on_other_devices_only():
    def facts(expert: str) -> frozenset[str]:
        words = f"--bf16 --moe-token-dispatcher-type flex --expert-model-parallel-size {expert}"
        return read(MEGATRON, of_words(words.split()), BLOCKS, DEVICES, "flags").facts

    assert "token dispatch kernels" in facts("2") and "token dispatch kernels" not in facts("1")


def test_stages_without_a_pipeline_are_ignored():
    reading = read(
        MEGATRON, of_words(["--pipeline-model-parallel-layout", "Et*16|t*16L", "--bf16"]), BLOCKS, DEVICES, "flags"
    )
    s = setting_of(MEGATRON, reading, DEVICES, 64, "bfloat16")
    assert s.cuts is None and s.chunks == 1


def test_accelerate_with_fsdp_1(tmp_path: Path):
    text = "mixed_precision: no\nfsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    reading = read(ACCELERATE_TRAINER, read_options(written(tmp_path, "a.yaml", text)), BLOCKS, DEVICES, "a")
    assert reading.values["zero"] == 2 and reading.values["precision"] == "float32"
    assert "FSDP1 is priced as FSDP2" in reading.notes


def test_literals_in_a_dict_are_read_and_builtins_are_no_options(tmp_path: Path):
    text = "assert isinstance(1, int)\nOVERRIDES = dict(tensor_model_parallel_size=8, micro_batch_size=1)\n"
    reading = read(MEGATRON, read_options(written(tmp_path, "a.py", text)), BLOCKS, DEVICES, "a")
    assert reading.values == {"tensor": 8, "microbatch": 1}
    assert not any("isinstance" in note for note in reading.notes)


def test_a_word_that_is_no_flag_leaves_megatrons_defaults():
    words = f"docker run image:latest pretrain_gpt.py --bf16 {UNDISPATCHED}".split()
    with pytest.raises(UsageError, match="needs moe_token_dispatcher_type alltoall or flex"):
        read(MEGATRON, of_words(words), BLOCKS, DEVICES, "flags")


def test_microbatch_groups_of_another_size_than_priced_are_a_note():
    words = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --bf16 --global-batch-size 224"
    for size, noted in (("7", False), ("14", True)):
        flags = [*words.split(), "--microbatch-group-size-per-virtual-pipeline-stage", size]
        notes = read(MEGATRON, of_words(flags), BLOCKS, DEVICES, "flags").notes
        assert (f"microbatch groups of {size} are priced as groups of 7" in notes) is noted


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
        ("x.sh", "echo hello", "there is no option in"),
        ("x.sh", "--micro-batch-size one", "'one' is not a positive integer"),
        ("x.sh", "--micro-batch-size \u00b2", "is not a positive integer"),
        ("x.sh", "--micro-batch-size", "--micro-batch-size has no value"),
        ("x.sh", "--tensor-model-parallel-size 5", "tensor 5 does not divide 64 devices"),
        ("x.sh", "--micro-batch-size 3", "does not divide into microbatches of 3"),
        ("x.sh", 'ARGS="--bf16', "is not readable"),
        ("x.yaml", "a: [", "is not readable"),
        ("x.yaml", "!!python/object/apply:os.system ['true']", "is not readable"),
        ("x.json", '{"zero_optimization": {"stage": 7}}', "'7' is not a ZeRO stage"),
        ("x.py", "def (", "is not readable"),
        ("x.toml", "[parallelism", "is not readable"),
        ("x.toml", "[activation_checkpoint]\nmode = 'some'", "activation checkpointing is 'some'"),
        ("x.sh", "--tensor-model-parallel-size 0", "'0' is not a positive integer"),
        ("x.sh", "--use-megatron-fsdp --bf16", "use_megatron_fsdp is not priced"),
        ("x.sh", "--tensor-model-parallel-size 2 --expert-model-parallel-size 64", "an expert degree of 64"),
        (
            "x.sh",
            "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble",
            "ZBVZeroBubble is not priced",
        ),
        (
            "x.sh",
            "--parallelism.tensor_parallel_degree 4 --parallelism.expert_parallel_degree 2",
            "an expert degree of 2",
        ),
        ("x.sh", "--recompute-granularity half", "recompute_granularity is 'half'"),
        ("x.sh", f"{OVERLAPPED} --pipeline-model-parallel-size 4", "needs virtual stages on 4 pipeline ranks"),
        ("x.sh", f"{OVERLAPPED} --recompute-granularity full", "excludes recompute_granularity full"),
        (
            "x.json",
            '{"mesh": [], "stages": [], "zero_optimization": {"stage": 1}}',
            "is a plan, not a trainer's configuration",
        ),
        ("x.sh", UNDISPATCHED, "needs moe_token_dispatcher_type alltoall or flex (Megatron's default is allgather"),
        (
            "x.sh",
            f"{UNDISPATCHED} --moe-token-dispatcher-type allgather",
            "needs moe_token_dispatcher_type alltoall or flex",
        ),
        ("x.sh", "--bf16 --overlap-moe-expert-parallel-comm", "needs expert_model_parallel_size of 2 or more"),
        ("x.sh", "--expert-model-parallel-size 8 --delay-wgrad-compute", "delay_wgrad_compute needs it"),
    ],
)
def test_bad_configurations_get_a_sentence(tmp_path: Path, name: str, text: str, message: str):
    with pytest.raises(AutoparError, match=message.replace("(", r"\(")) as error:
        file = written(tmp_path, name, text)
        options = read_options(file)
        trainer = recognised(options, str(file))
        setting_of(trainer, read(trainer, options, BLOCKS, DEVICES, str(file)), DEVICES, BATCH, "bfloat16")
    assert error.value.hint and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("A=(\n --micro-batch-size 1\n # --x 1 \\\n --tensor-model-parallel-size 4\n)", {"microbatch": 1, "tensor": 4}),
        ("--wandb-exp-name run#3 --micro-batch-size 2", {"microbatch": 2}),
        ("if [ $# -lt 1 ]; then exit 1; fi\nTP=4; PP=2;\nrun --tensor-model-parallel-size $TP|tee log", {"tensor": 4}),
        ("run --title 'run #3' --micro-batch-size 2 # --micro-batch-size 8", {"microbatch": 2}),
        ("cat << EOF\nit's --micro-batch-size 8\nEOF\nrun --micro-batch-size 2 && echo done", {"microbatch": 2}),
        ("run --micro-batch-size 2\r\n", {"microbatch": 2}),
    ],
)
def test_scripts_as_people_write_them(tmp_path: Path, script: str, values: dict[str, int]):
    options = read_options(written(tmp_path, "run.sh", script))
    assert read(MEGATRON, options, BLOCKS, DEVICES, "run.sh").values == values


def test_files_that_grow_are_refused(tmp_path: Path):
    texts = {
        "a.yaml": "a0: &a0 {x: 1}\n"
        + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}, z: *a{i - 1}}}\n" for i in range(1, 30)),
        "b.sh": "A=--x\n" + 'A="y$A$A"\n' * 60,
        "c.py": "-" * 200_000,
        "d.toml": '[parallelism]\nmodule_fqns_per_model_part = "[1,"',
    }
    for name, text in texts.items():
        with pytest.raises(UsageError):
            read(TORCHTITAN, read_options(written(tmp_path, name, text)), BLOCKS, DEVICES, name)


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


REGISTRY = """
def llama() -> Trainer.Config:
    return Trainer.Config(
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )


def llama_wide() -> Trainer.Config:
    config = llama()
    config.parallelism.tensor_parallel_degree = 4
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    return config


def _helper() -> None:
    TrainingConfig(seq_len=1)
"""


def test_a_function_of_a_python_file_is_read_after_those_that_it_calls(tmp_path: Path) -> None:
    (tmp_path / "registry.py").write_text(REGISTRY)
    source = f"{tmp_path / 'registry.py'}:llama_wide"
    reading = read(TORCHTITAN, read_options(source), BLOCKS, DEVICES, source)
    assert reading.values["tensor"] == 4 and reading.values["microbatch"] == 2 and reading.values["seq"] == 4096
    assert reading.values["global_batch"] == 2 * DEVICES // 4 and reading.values["activations"] == "full"
    assert reading.values["precision"] == "float8"
    with pytest.raises(UsageError, match="several functions that make a configuration: llama, llama_wide"):
        read_options(tmp_path / "registry.py")
    with pytest.raises(UsageError, match="has no function 'other': llama, llama_wide"):
        read_options(f"{tmp_path / 'registry.py'}:other")


def test_a_file_of_accelerate_that_names_deepspeeds_says_which_to_give(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("deepspeed_config:\n  deepspeed_config_file: zero3.json\n")
    with pytest.raises(UsageError, match="starts DeepSpeed with the configuration zero3.json") as refused:
        read(ACCELERATE_TRAINER, read_options(tmp_path / "a.yaml"), BLOCKS, DEVICES, "a.yaml")
    assert refused.value.hint == "give that file: --from zero3.json"


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        ("config.parallelism.tensor_parallel_degree = 8\n\n\ndef loaded() -> str:\n    return open('f').read()\n", 8),
        (
            "p = ParallelismConfig(tensor_parallel_degree=4)\n\n\ndef main() -> None:\n    TrainingConfig(seq_len=8)\n",
            4,
        ),
        (
            "def loader() -> None:\n    DataLoader(a=1)\n\n\ndef main() -> None:\n    ParallelismConfig(tensor_parallel_degree=2)\n",
            2,
        ),
    ],
)
def test_statements_of_a_python_file_count_and_functions_without_a_configuration_do_not(
    text: str, tensor: int, tmp_path: Path
) -> None:
    (tmp_path / "config.py").write_text(text)
    assert Option("parallelism.tensor_parallel_degree", tensor) in read_options(tmp_path / "config.py")


def test_a_private_function_can_be_named(tmp_path: Path) -> None:
    functions = (
        f"def {name}() -> None:\n    ParallelismConfig(tensor_parallel_degree={n})\n"
        for name, n in (("_base", 2), ("wide", 4))
    )
    (tmp_path / "config.py").write_text("\n\n".join(functions))
    options = read_options(f"{tmp_path / 'config.py'}:_base")
    assert [o.value for o in options if o.name == "parallelism.tensor_parallel_degree"] == [2]


def test_tokens_of_a_microbatch_without_a_length_are_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192)\n")
    reading = read(TORCHTITAN, read_options(tmp_path / "config.py"), BLOCKS, DEVICES, "config.py")
    assert any("max_context_length is not in the file" in note for note in reading.notes)


def test_a_misspelt_flag_is_named_with_the_one_that_is_meant() -> None:
    words = ["--tensor-model-parallel-sise", "4", "--micro-batch-size", "1", "--num-layers", "32"]
    notes = read(MEGATRON, of_words(words), BLOCKS, DEVICES, "flags").notes
    assert "--tensor-model-parallel-sise is not known: is tensor_model_parallel_size meant?" in notes
    assert [note for note in notes if note.endswith("meant?")] == list(notes[:1])
