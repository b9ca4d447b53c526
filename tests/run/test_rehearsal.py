"""One rank of a plan alone: its memory is that of the rank among the others, its errors have names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import measured_memory
import pytest
import torch
from click.testing import CliRunner
from measured_plans import SMALL
from tiers import slow
from workers import WorkerPool

from autopar.capture import capture
from autopar.cli.app import cli
from autopar.cli.pricing import price_plan
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import LaunchError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.run.rehearsal import random_batch, rank_of_each_position, rehearse, with_free_communication
from autopar.search.manual import manual_plan
from autopar.shard import annotate

SUBJECT = SMALL["decoder"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return annotate(capture(SUBJECT.build(), SUBJECT.batch(0), SUBJECT.loss_fn, name="decoder"))


def emitted(graph: Graph, folder: Path, **pins: Any) -> Plan:
    """Emit a program; its plan with the prediction of a rehearsal."""
    plan = manual_plan(graph, precision="float32", **pins)
    emit(graph, plan, folder)
    cluster = with_free_communication(parse(plan.device_count))
    return price_plan(graph, cluster, plan, Pricer(graph, cluster, "float32"))


@pytest.mark.parametrize(
    "pins",
    [
        {"data": 2, "zero": 3},
        slow({"tensor": 2}),
        slow({"ring": 2}),
        {"pipeline": 2, "microbatches": 4, "schedule": "1f1b"},
        slow({"tensor": 2, "sequence": True, "recompute": "selective"}),
    ],
    ids=lambda pins: "-".join(pins),
)
def test_a_rank_alone_needs_the_memory_that_it_needs_among_others(
    graph: Graph, pins: dict[str, Any], workers2: WorkerPool, tmp_path: Path
):
    alone = emitted(graph, tmp_path, **pins)
    batch = dict(zip([value.name for value in graph.inputs], SUBJECT.batch(0), strict=True))
    together = workers2.run("measured_memory:peak", str(tmp_path), batch, timeout_s=120)
    ranks = range(2)
    found = list(rehearse(tmp_path, alone, batch, ranks, "cpu", steps=1))
    assert [one.stages for one in found] == ([(0,), (1,)] if "pipeline" in pins else [(0,), (0,)])
    for rank, one in zip(ranks, found, strict=True):
        assert one.at_rest_bytes == pytest.approx(together[rank]["at_rest"], rel=0.03)
        # gloo copies what it sends and reduces; a collective that returns at once copies nothing
        assert 0.85 * together[rank]["peak"] < one.peak_bytes < 1.03 * together[rank]["peak"]
        assert one.step_s > 0 and one.predicted_s > 0


def test_a_drawn_batch_is_valid(graph: Graph, tmp_path: Path):
    batch = random_batch(graph)
    ids = SUBJECT.batch(0)[0]
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        value.name: (torch.Size(value.shape), value.dtype) for value in graph.inputs
    }
    tables = [p.shape[0] for name, p in SUBJECT.build().named_parameters() if "embedding" in name]
    assert max(int(x.max()) for x in batch.values()) < min(tables) and int(ids.max()) < min(tables)


def test_the_first_rank_of_every_stage(graph: Graph, tmp_path: Path):
    plan = manual_plan(graph, pipeline=2, tensor=2, data=2, microbatches=2)
    assert rank_of_each_position(plan) == (0, 4)
    with pytest.raises(UsageError, match="no rank 8: it is for 8 devices"):
        next(rehearse(tmp_path, plan, {}, [8], "cpu"))


def test_a_rank_that_fails_is_named(graph: Graph, tmp_path: Path):
    alone = emitted(graph, tmp_path, data=2)
    with pytest.raises(LaunchError, match="rank 1 fails in rehearsal"):
        next(rehearse(tmp_path, alone, {}, [1], "cpu"))


UNWRITTEN = """
import torch
import torch.distributed as dist

from autopar.run import rehearsal
from autopar.torch_private import fake_store, functional_collectives

dist.init_process_group("fake", store=fake_store(), rank=1, world_size=2)
functional = functional_collectives()
blank = lambda output, *_, **__: output.fill_(float("nan"))
for name in ("reduce_scatter_tensor", "all_to_all_single"):
    setattr(dist, name, blank)
dist.all_to_all = lambda outputs, *_, **__: [blank(output) for output in outputs]
functional.reduce_scatter_tensor = lambda x, op, dim, group, tag="": torch.full_like(x.chunk(2, dim)[1], float("nan"))
rehearsal._patch_fake_collectives()

x = torch.arange(24.0).view(4, 6)
mine = torch.empty(2, 6)
dist.reduce_scatter_tensor(mine, x)
assert mine.equal(x[2:]), mine
slice_ = functional.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD)
assert slice_.equal(x[:, 3:]), slice_
rows = torch.empty(4, 6)
dist.all_to_all_single(rows, x)
assert rows.equal(x), rows
parts = [torch.empty(2, 6), torch.empty(2, 6)]
dist.all_to_all(parts, [x[:2], x[2:]])
assert torch.cat(parts).equal(x), parts
"""


def test_outputs_that_the_fake_process_group_leaves_unwritten_become_the_ranks_own_data():
    """torch 2.11's group leaves them; what was in that memory would grow from step to step to NaN."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", UNWRITTEN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_command(tmp_path: Path):
    factory = tmp_path / "narrow.py"
    factory.write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n"
        "    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))\n"
        "    return model, (torch.zeros(8, 32), torch.zeros(8, 32)), nn.functional.mse_loss\n"
    )
    request = [f"{factory}:build", "--devices", "1x8xH100-80GB", "--data", "8", "--compile", "none", "--device", "cpu"]

    def invoke(*options: str) -> Any:
        return CliRunner().invoke(cli, ["dev", "rehearse", *request, "--steps", "1", *options], catch_exceptions=False)

    (line,) = invoke("--json").stdout.splitlines()
    assert json.loads(line)["rank"] == 0 and json.loads(line)["peak_bytes"] > 0
    assert "single ranks of 8 on cpu" in invoke("--rank", "5").stdout
    with pytest.raises(UsageError, match="the plan has no rank 9"):
        invoke("--rank", "9")


assert measured_memory  # the workers import it by name
