"""A node goes, and the training goes on with those that are left, under a plan for them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_model import STEPS, asked, straight
from fault_runs import Run, Server

from autopar.cli.elastic import become_node, devices_of, write_program
from autopar.cli.options import PlanRequest
from autopar.errors import LaunchError, UsageError
from autopar.program.metrics import device_count
from autopar.program.state import initial
from autopar.run.elastic import BATCH, Elastic, Nodes


@pytest.mark.slow
def test_a_node_goes_and_two_of_the_three_others_train_on(tmp_path: Path) -> None:
    """Three nodes have no plan here, so one of them waits until the end."""
    elastic = asked(tmp_path)
    elastic.write()
    for nodes in (4, 2):
        write_program(elastic, nodes)
    elastic.refusal(3).write_text("3 devices do not divide the batch\n")
    server = Server()
    try:
        run = Run(Path(elastic.programs), 1, (), [server] * 4, tmp_path / "run", least=2).start()
        assert run.wait(lambda: len(run.losses()) >= 25, 90), run.talk()
        for pid in (*run.workers()[-1:], run.agents[-1]):
            os.kill(pid, signal.SIGKILL)
        assert run.wait(lambda: len(run.losses()) == STEPS, 90), run.talk()
        run.wait(lambda: False, 30)
    finally:
        server.close()
    talk = run.talk()
    assert "training on 4 devices" in talk and "training on 2 devices" in talk and "continues after step " in talk
    assert [run.losses()[step] for step in range(1, STEPS + 1)] == pytest.approx(straight(), rel=1e-9)


def test_what_cannot_be_elastic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4:2 is not a range of nodes"):
        Nodes.read("4:2", "localhost:1", 0)
    with pytest.raises(UsageError, match="1:² is not a range of nodes"):
        Nodes.read("1:²", "localhost:1", 0)
    with pytest.raises(UsageError, match="localhost:² is not an address"):
        Nodes.read("1:2", "localhost:²", 0)
    elastic = asked(tmp_path)
    elastic.write()
    elastic.write()
    with pytest.raises(UsageError, match="has the programs of another request"):
        asked(tmp_path, devices="2").write()
    assert devices_of(asked(tmp_path, 2, "2"), 3) == "6"
    for devices in ("8xH100", "1x8xH100"):
        assert devices_of(asked(tmp_path, 8, devices), 3) == "3x8xH100-80GB-SXM"
    elastic.refusal(1).write_text("it does not fit\n")
    with pytest.raises(LaunchError, match="no number of nodes up to 1 has a plan: it does not fit"):
        elastic.program(1, first=True)


def test_stages_of_an_interleaved_pipeline_share_their_devices() -> None:
    stages = [{"devices": devices} for devices in ([0, 2], [2, 2], [0, 2], [2, 2])]
    assert device_count({"stages": stages}) == 4


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ("cluster.toml", "describes one cluster"),
        ("2x8xH100-80GB", "2x8xH100-80GB are 2 nodes"),
        ("16xH100-80GB", "16xH100-80GB are 2 nodes"),
    ],
)
def test_elastic_takes_the_devices_of_one_node(
    devices: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.cli.elastic.become_agent", lambda elastic, nodes: pytest.fail("training starts"))
    request = PlanRequest(**asked(tmp_path, devices=devices).request)
    with pytest.raises(UsageError, match=reason):
        become_node(Nodes(1, 4, "localhost:1", 0), request, None, {"checkpoint": str(tmp_path), "seed": 0})


def of_node(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> Elastic:
    """What a node of a training of a small GPT-2 asks of its ranks; ``options`` are those of its plan."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 2,
              "n_positions": 8, "vocab_size": 32}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    found: list[Elastic] = []
    monkeypatch.setattr("autopar.cli.elastic.become_agent", lambda elastic, nodes: found.append(elastic))
    sizes = {"seq": 8, "global_batch": 2, "time_limit": 1.0, "type_check": False}
    request = PlanRequest(model=str(folder / "config.json"), devices="1", **sizes, **options)
    become_node(Nodes(1, 2, "localhost:1", 0), request, None, {"checkpoint": str(folder / "saved"), "seed": 5})
    return found[0]


@pytest.mark.parametrize("init", ["weights", "own"])
def test_an_elastic_training_starts_from_the_weights_that_are_given(
    init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = of_node(monkeypatch, tmp_path, init=init)
    words = " ".join(elastic.options)
    write_program(elastic, 1)
    assert ("--init weights" in words) == (init == "weights")
    assert (initial(elastic.folder(1)) is not None) == (init == "own")
    batch = torch.load(elastic.folder(1) / BATCH)
    assert batch and not any(tensor.is_meta for tensor in batch.values())
