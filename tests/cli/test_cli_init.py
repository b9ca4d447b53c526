"""``autopar dev init`` writes a cluster file and a script; what is written runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from autopar.cli.app import cli
from autopar.devices import parse
from autopar.errors import DeviceError, UsageError

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(cli, ["dev", "init", *arguments], catch_exceptions=False).output


def test_the_script_of_a_configuration_trains_on_processes_of_this_machine(tmp_path: Path, capsys):
    config, home = tmp_path / "config.json", tmp_path / "new" / "training"
    config.write_text(json.dumps(TINY))
    said = invoke(str(config), "-o", str(home), "--devices", "2", "--global-batch", "4", "--seq", "16")
    assert f"python {home / 'train.py'}" in said
    script = (home / "train.py").read_text()
    assert 20 <= script.count("\n") <= 40 and "torch.randint(0, 128, (4, 16))" in script
    assert parse(str(home / "cluster.toml")).count == 2 and parse(str(home / "cluster.toml")).kind == "cpu"
    runpy.run_path(str(home / "train.py"), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert (home / "checkpoints").is_dir()


def test_devices_are_read_as_people_write_them(tmp_path: Path):
    with pytest.raises(DeviceError, match="the GPU 'T4' is not known") as error:
        invoke("gpt2", "--devices", "9 T4", "-o", str(tmp_path))
    assert error.value.hint
    said = invoke("gpt2", "--devices", "64 H100", "--global-batch", "16", "--seq", "128", "-o", str(tmp_path))
    cluster = parse(str(tmp_path / "cluster.toml"))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (8, 8, "H100-80GB-SXM")
    assert 'zoo.build("gpt2", seq=128, global_batch=16, precision="bfloat16")' in (tmp_path / "train.py").read_text()
    assert "torchrun --nnodes 8" in said
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")


def test_commands_can_be_copied(tmp_path: Path):
    home = tmp_path / "my training"
    said = invoke("gpt2", "--devices", "8xH100", "--global-batch", "8", "--seq", "128", "-o", str(home))
    assert f"--nproc-per-node 8 '{home}/train.py'" in said and f"--devices '{home}/cluster.toml'" in said


def test_a_factory_is_imported_and_nothing_is_replaced(tmp_path: Path):
    factory = f"{ROOT}/examples/mlp.py:model"
    invoke(factory, "-o", str(tmp_path), "--devices", "2", "--global-batch", "32")
    script = (tmp_path / "train.py").read_text()
    assert "from mlp import model as make" in script and "model, batch, loss_fn = make(global_batch=32)" in script
    with pytest.raises(UsageError, match="train.py exists|cluster.toml exists"):
        invoke("gpt2", "-o", str(tmp_path))
    assert (tmp_path / "train.py").read_text() == script


def test_a_cluster_file_of_processors_takes_no_keys_of_gpus(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text('gpu = "cpu"\nnodes = 2\n')
    with pytest.raises(DeviceError, match="nodes describes GPUs"):
        parse(str(file))
    file.write_text('gpu = "cpu"\ngpus_per_node = 3\nmemory_limit_gb = 1\n')
    cluster = parse(str(file))
    assert (cluster.count, cluster.local, cluster.memory_override_bytes) == (3, True, 10**9)
