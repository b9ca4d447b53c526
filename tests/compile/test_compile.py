"""The whole way: compile, emit and run from the command line, plans given by hand, and plans that do not fit."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from places import ROOT
from tiers import slow
from torch import nn
from workers import WorkerPool

import autopar
from autopar.cli import main
from autopar.cli.run import Checkpoints
from autopar.devices import parse
from autopar.errors import BatchError, ModelError, UsageError
from autopar.plan_files import read_plan
from autopar.planning import plan_model
from autopar.progress import STAGES
from autopar.run import ranks
from autopar.search import SearchOptions
from autopar.workload import Workload

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

def model(global_batch=8):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return module, (torch.randn(global_batch, 8), torch.arange(global_batch) % 4), F.cross_entropy
"""


def small(hidden: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    between = [layer for _ in range(hidden - 1) for layer in (nn.Linear(16, 16), nn.ReLU())]
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *between, nn.Linear(16, 4))
    return module, (torch.randn(8, 8), torch.arange(8) % 4)


def make_plan(devices="8xH100-80GB", rows=8, hidden=1, **pins):
    module, batch = small(hidden)
    batch = (batch[0][:1].expand(rows, 8).clone(), torch.zeros(rows, dtype=torch.long))
    return plan_model(Workload(module, batch, nn.functional.cross_entropy), parse(devices), SearchOptions(**pins))


def test_compile_goes_through_the_stages_in_order_and_trains(tmp_path):
    module, batch = small()
    seen = []
    with autopar.compile(
        module,
        1,
        batch,
        nn.functional.cross_entropy,
        folder=tmp_path / "p",
        lr=0.1,
        progress=lambda stage, _: seen.append(stage),
    ) as program:
        losses = program.train([batch], steps=3)
    assert tuple(dict.fromkeys(seen)) == STAGES
    assert losses[0] == pytest.approx(nn.functional.cross_entropy(module(batch[0]), batch[1]).item(), rel=1e-5)
    assert losses[2] < losses[0]
    assert (tmp_path / "p" / "train.py").is_file() and autopar.Plan.from_json(
        json.loads((tmp_path / "p" / "plan.json").read_text())
    )


def test_a_pinned_schedule_in_both_directions_trains(tmp_path):
    module, batch = small(hidden=3)
    pins = {"schedule": "chimera", "pipeline": 2, "microbatches": 4}
    with autopar.compile(module, 2, batch, nn.functional.cross_entropy, lr=0.01, **pins) as program:
        assert program.plan.schedule == "chimera" and program.plan.pipeline == 2
        losses = program.train([batch], steps=3)
        trained = program.state_dict()
        program.emit(tmp_path / "p")
    optimizer, eager = torch.optim.AdamW(module.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        eager.append(loss.item())
    assert losses == pytest.approx(eager, rel=1e-4)
    torch.testing.assert_close(trained, dict(module.state_dict()), rtol=1e-3, atol=1e-4)
    assert (tmp_path / "p" / "runtime" / "schedule.csv").read_text().splitlines() == [
        "0F0,1F2,1B2,0F1,0B0,1F3,1B3,0B1",
        "0F2,1F0,1B0,0F3,0B2,1F1,1B1,0B3",
    ]


def test_without_a_folder_the_program_takes_its_own_along_when_it_goes():
    module, batch = small()
    program = autopar.compile(module, 1, batch, nn.functional.cross_entropy)
    folder = program.folder
    assert (folder / "model.py").is_file()
    del program
    assert not folder.exists()


@pytest.mark.parametrize("failing", ["emit_program", "Program"])
def test_without_a_folder_nothing_is_left_of_a_program_that_fails(failing, tmp_path, monkeypatch):
    module, batch = small()

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys.modules["autopar.compile"], failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        autopar.compile(module, 1, batch, nn.functional.cross_entropy, type_check=False)
    assert not list(tmp_path.glob("autopar-program-*"))


def test_the_planner_says_what_it_took():
    _, plan = make_plan()
    assert 0 < plan.wall_time_s < 60 and plan.planning_memory_bytes > 50e6


def test_pins_hold():
    _, plan = make_plan(pipeline=2, microbatches=4, schedule="gpipe", hidden=3)
    assert (plan.pipeline, plan.microbatches, plan.schedule) == (2, 4, "gpipe")


def test_a_plan_that_is_given_is_used(tmp_path):
    module, batch = small()
    _, plan = make_plan("2", data=2)
    path = tmp_path / "plan.json"
    path.write_text(plan.dumps())
    graph, same = plan_model(
        Workload(module, batch, nn.functional.cross_entropy), parse("2"), SearchOptions(), plan=path
    )
    assert same == plan
    with pytest.raises(UsageError, match="^tensor=2 conflicts with the decisions of plan: a plan has only one source"):
        plan_model(Workload(module, batch, nn.functional.cross_entropy), parse("2"), SearchOptions(tensor=2), plan=path)


@pytest.mark.parametrize(
    ("devices", "keywords", "words"),
    [
        ((torch.zeros(4),), {}, "has an object of type Tensor, which is not a device\nhint: "),
        (2, {"plan": {"stages": []}}, "plan is an object of type dict, not a Plan or the path of its file\nhint: "),
        (
            2,
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "optimizer is an object of type SGD, not a function\nhint: ",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(devices: Any, keywords: dict[str, Any], words: str):
    module, batch = small()
    with pytest.raises(UsageError) as refused:
        autopar.compile(module, devices, batch, loss_fn=nn.functional.cross_entropy, **keywords)
    assert words in str(refused.value)
    with pytest.raises(TypeError, match="did you mean tensor"):
        autopar.compile(module, 2, batch, tp=2)


def test_a_plan_for_something_else_is_refused():
    module, batch = small()
    loss = nn.functional.cross_entropy
    _, plan = make_plan("2", rows=16)
    with pytest.raises(UsageError, match="global batch of 16, this one has 8"):
        plan_model(Workload(module, batch, loss), parse("2"), SearchOptions(), plan=plan)
    _, plan = make_plan("2", data=2)
    with pytest.raises(UsageError, match="for 2 devices, and the cluster has 1"):
        plan_model(Workload(module, batch, loss), parse("1"), SearchOptions(), plan=plan)
    with pytest.raises(UsageError, match="for training in float32, and the model is in bfloat16") as refused:
        narrow = Workload(module, batch, loss, precision="bfloat16")
        plan_model(narrow, parse("2"), SearchOptions(), plan=plan)
    assert "--precision float32" in refused.value.hint
    deeper = nn.Sequential(module, nn.Linear(4, 4))
    with pytest.raises(UsageError, match="the plan is for a model of"):
        plan_model(Workload(deeper, batch, loss), parse("2"), SearchOptions(), plan=plan)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"feasible": false}', "7"])
def test_files_that_hold_no_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no plan"):
        read_plan(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_plan(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("microbatches", -2, "microbatches is -2, not a whole number from 1"),
        ("global_batch", "8", "global_batch is '8', not a whole number"),
        ("schedule", "nope", "schedule is 'nope', not one of none, gpipe"),
        ("precision", "floaty", "precision is 'floaty', not one of"),
        ("mesh", [{"name": "data", "size": 0, "stride": 1}], "mesh\\[0\\].size is 0, not a whole number"),
    ],
)
def test_a_plan_with_a_value_that_no_plan_has_is_refused(tmp_path, name, value, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(make_plan("1")[1].to_json() | {name: value}))
    with pytest.raises(UsageError, match=words):
        read_plan(path)


def test_a_plan_with_the_former_fields_of_recomputation_is_refused(tmp_path):
    data = make_plan("1")[1].to_json()
    for layer in data["layers"]:
        del layer["activations"]
        layer |= {"recompute": True, "selective": False, "segment": 2}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(
        UsageError, match=r"holds no plan \(layers\[0\] has '(recompute|selective|segment)', which is not a field"
    ):
        read_plan(path)


def test_a_batch_that_is_not_one():
    module, _ = small()
    with pytest.raises(BatchError):
        autopar.compile(module, 1, (torch.zeros(8, 8), torch.zeros(7)), nn.functional.cross_entropy)


def test_the_command_line_plans_emits_and_runs(tmp_path, capsys):
    def invoke(*argv: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as caught:
            main(argv)
        captured = capsys.readouterr()
        assert caught.value.code == 0, captured.err
        return captured.out, captured.err

    (tmp_path / "small_model.py").write_text(MODEL)
    model = f"{tmp_path}/small_model.py:model"
    planned, _ = invoke("plan", model, "--devices", "2", "--data", "2", "--json")
    assert json.loads(planned)["layers"][0]["data"] == 2
    (tmp_path / "plan.json").write_text(planned)
    use = ("--devices", "2", "--plan", f"{tmp_path}/plan.json", "-o", f"{tmp_path}/program")
    out, err = invoke("emit", model, *use)
    assert out.strip() == f"{tmp_path}/program" and "torchrun" in err
    out, _ = invoke("run", model, *use, "--steps", "2", "--lr", "0.1")
    steps = [line.split() for line in out.splitlines()]
    assert [words[1] for words in steps] == ["1", "2"]
    assert float(steps[1][3]) < float(steps[0][3])


@pytest.fixture
def default_hangup():
    """SIGHUP is ignored where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, slow(signal.SIGHUP)])
def test_a_signal_to_autopar_run_saves_and_ends_it(number, tmp_path, capsys, monkeypatch):
    (tmp_path / "small_model.py").write_text(MODEL)

    class Signalled(Checkpoints):
        def save(self, program, step, last):
            if step == 3 < last:  # to the whole group, as from a terminal and from a scheduler
                for pid in (os.getpid(), *(worker.pid for worker in program._processes._workers)):
                    os.kill(pid, number)
            super().save(program, step, last)

    def ran(*argv: str) -> list[str]:
        given = ("--devices", "2", "--data", "2", "--every", "2", "--checkpoint", str(tmp_path / "saved"), *argv)
        with pytest.raises(SystemExit) as caught:
            main(["run", f"{tmp_path}/small_model.py:model", *given])
        captured = capsys.readouterr()
        assert caught.value.code == 0, captured.err
        stops = "training stops after 3 of 1000000 steps; --resume continues from there"
        assert (f"{signal.Signals(number).name}: {stops}" in captured.err) == ("--resume" not in argv)
        return [line.split(" loss ")[0] for line in captured.out.splitlines()]

    monkeypatch.setattr("autopar.cli.run.Checkpoints", Signalled)
    before = signal.getsignal(number)
    assert ran("--steps", "1000000") == ["step 1", "step 2", "step 3"]
    assert signal.getsignal(number) is before
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == ["step-2", "step-3"]
    assert ran("--steps", "4", "--resume") == ["step 4"]


SCRIPT = (
    MODEL + "import os, autopar\n"
    "module, batch, loss_fn = model()\n"
    "program = autopar.compile(module, 2, batch, loss_fn, lr=0.1)\n"
    "losses = program.train([batch], steps=2)\n"
    "text = f\"learned {losses[1] < losses[0]}\\n\" + program.plan.dumps().replace('\\n', '') + '\\n'\n"
)


def as_under_torchrun() -> str:
    """In a worker: the script, where the launcher's store is at hand as it is under torchrun."""
    names: dict[str, Any] = {}
    with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"):
        exec(compile(SCRIPT, "script.py", "exec"), names)
    return str(names["text"])


def test_every_rank_has_rank_0s_plan(workers2: WorkerPool) -> None:
    first, second = workers2.run("test_compile:as_under_torchrun")
    assert first == second and first.startswith("learned True")


def test_ranks_wait_for_a_search_longer_than_the_stores_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = make_plan("2", data=2)
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.1))
    monkeypatch.setattr(ranks, "_new_store", lambda: store)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = threading.Timer(
        0.4, store.set, (f"autopar/answer/{len(ranks._stores)}", json.dumps({"answer": plan.to_json()}))
    )
    found.start()
    assert ranks.plan_of_rank_0(lambda: pytest.fail("rank 1 searches")) == plan


@pytest.mark.slow
def test_under_torchrun_every_rank_has_rank_0s_plan(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "os.write(1, text.encode())  # one write, so that the ranks' lines do not mix\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    plans = {line for line in done.stdout.splitlines() if line.startswith("{")}
    assert len(plans) == 1 and done.stdout.count("learned True") == 2


class Extras(nn.Module):
    """A parameter that nothing reads, a buffer that is read, and running statistics, which are written."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.unused = nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.linear(self.norm(x * self.scale)), y)


def test_the_state_dict_loads_into_the_model_with_what_does_not_train():
    torch.manual_seed(0)
    module, batch = Extras(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))
    with autopar.compile(module, 1, batch) as program:
        program.step(batch)
        state = program.state_dict()
        assert torch.allclose(state["norm.running_mean"], 0.1 * 2.0 * batch[0].mean(0), atol=1e-6)
        program.load_state_dict({name: value + 1 for name, value in state.items()})
        assert torch.equal(program.state_dict()["unused.weight"], state["unused.weight"] + 1)
    before = module.unused.weight.detach().clone()
    module.load_state_dict(state, strict=True)
    assert torch.equal(module.unused.weight, before)


def test_a_batch_on_meta_plans_and_does_not_train():
    module, batch = Extras(), (torch.randn(8, 8, device="meta"), torch.zeros(8, dtype=torch.long, device="meta"))
    with autopar.compile(module, 1, batch) as program, pytest.raises(BatchError, match="on meta"):
        program.step(batch)


def test_what_is_no_module_and_where_nothing_can_be_written(tmp_path):
    module, batch = small()
    with pytest.raises(ModelError, match="not a torch.nn.Module"):
        autopar.compile(lambda x: x, 1, batch)
    with pytest.raises(ModelError, match="the class Linear, not a torch.nn.Module") as caught:
        autopar.compile(nn.Linear, 1, batch)
    assert caught.value.hint == "give an instance: Linear(...)"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made: .*file is a file"):
        autopar.compile(module, 1, batch, nn.functional.cross_entropy, folder=tmp_path / "file" / "program")
