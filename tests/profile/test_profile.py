"""Calibration: curves, the file, what it does to prices, what is wrong with bad files, and a real measurement of two processes."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from price_models import time_s
from tiers import slow
from workers import WorkerPool

from autopar.capture import capture
from autopar.devices import Cluster, parse
from autopar.devices.calibration import (
    VARIABLE,
    VERSION,
    Calibration,
    Figure,
    apply_calibration,
    default_path,
    read,
    this_machine,
)
from autopar.devices.measured import ATTENTION, PRODUCT, Curve
from autopar.errors import DeviceError
from autopar.explain.limits import faster_clusters
from autopar.price import Pricer
from autopar.price.collectives import p2p_s
from autopar.price.state import precision
from autopar.price.table import build
from autopar.profile import remote
from autopar.profile.sweep import COLLECTIVES, MOVES, tasks
from autopar.search import SearchOptions, search
from autopar.shard import annotate
from autopar.types import Collective


def figure(
    name: str, median: float, size: dict[str, float] | None = None, variant: str = "", backward: bool = False
) -> Figure:
    return Figure(name, "cpu", 2, variant, backward, size or {}, "s", median, median, median, 1)


def calibration(wire_s: float = 1e-3) -> Calibration:
    """A machine of 1e9 FLOP/s and 1e9 bytes/s whose ops start in a microsecond, and whose collectives take ``wire_s`` for each MB."""
    found = [figure("launch", 1e-6, backward=b) for b in (False, True)]
    for b in (False, True):
        size = {"flops": 1e9, "bytes": 1e6}
        found.append(figure("product", 1 + 1e-6, size, "float32", b))
        found.append(figure("attention", 2 + 1e-6, size, "float32", b))
        found.append(figure("move", 1 + 1e-6, {"bytes": 1e9}, "pointwise", b))
    found.append(figure("move", 4 + 1e-6, {"bytes": 1e9}, "gelu"))
    found.append(figure("update", 1.0, {"bytes": 1e9}))
    for name in (*COLLECTIVES, "p2p"):
        for size in (1e6, 1e7):
            found.append(figure("wire", wire_s * size / 1e6, {"members": 2, "bytes": size}, name))
    found.append(figure("overlap", 0.5, {"members": 2}))
    found.append(figure("wait", 0.02, {"members": 2, "seconds": 0.25}))
    found.append(
        figure("pair", 0.6, {"members": 2, "bytes": 1e6, "seconds": 1e-3})
    )  # of older files: nothing asks for it
    return Calibration(this_machine(), "2020-01-01 00:00 UTC", tuple(found))


def written(folder: Path, found: Calibration) -> Path:
    path = folder / "calibration.json"
    path.write_text(found.dumps())
    return path


def test_curves_interpolate_in_the_logarithms_and_go_on():
    curve = Curve.through([(100.0, 4.0), (1.0, 1.0), (100.0, 1.0)])
    assert curve.at(10.0) == pytest.approx(2**0.5) and curve.at(100.0) == pytest.approx(2.0)
    assert curve.at(0.1) == 1.0 and curve.at(1e6) == pytest.approx(2.0)
    assert curve.beyond(1000.0) == pytest.approx(20.0)
    assert Curve.through([(1.0, 3.0), (2.0, 1.0)], rising=True).y == pytest.approx((3.0, 3.0))


def test_meetings_wait_for_the_slowest_member(tmp_path):
    collective_times = parse(2, calibration=written(tmp_path, calibration())).collective_times
    assert collective_times is not None
    assert collective_times.wait_s((2,), 0.25) == pytest.approx(0.02) and collective_times.wait_s(
        (2,), 1.0
    ) == pytest.approx(0.04)
    assert collective_times.wait_s((2,) * 4, 1.0) == pytest.approx(4 * 0.02), (
        "four meetings after a quarter of a second each"
    )
    assert collective_times.wait_s((), 1.0) == collective_times.wait_s((4,), 1.0) == 0.0


def test_the_file_reads_back(tmp_path):
    found = calibration()
    assert read(written(tmp_path, found)) == found


def test_prices_are_what_was_measured(tmp_path):
    cluster = parse(2, calibration=written(tmp_path, calibration()))
    gpu = cluster.gpu
    assert gpu.kernel_s == 1e-6 and gpu.op_floor_s == 0.0 and cluster.overlap_slowdown == 0.5
    kinds = np.array([PRODUCT, "gelu", "tanh"])
    flops, moved = np.array([2e9, 0.0, 0.0]), np.array([1e6, 1e9, 1e9])
    assert gpu.seconds(kinds, flops, moved, "float32", False) == pytest.approx([2.0, 4.0, 1.0], rel=1e-4)
    assert gpu.update_s(2e9, 2) == pytest.approx(2.0)
    assert time_s(Collective.ALL_REDUCE, 4e6, 2, 1, cluster) == pytest.approx(4e-3)
    assert time_s(Collective.ALL_REDUCE, 1e8, 2, 1, cluster) == pytest.approx(0.1)
    assert p2p_s(1e6, cluster, False) == pytest.approx(1e-3)
    assert any("calibration.json" in note for note in cluster.notes)


def test_more_of_a_resource_is_more_than_was_measured(tmp_path):
    base = parse(2, calibration=written(tmp_path, calibration()))
    changed = {name: cluster for name, _, cluster in faster_clusters(base)}
    kinds = np.array([PRODUCT, ATTENTION, "gelu"])
    flops, moved = np.array([2e9, 2e9, 0.0]), np.array([1e6, 1e6, 1e9])

    def seconds(cluster: Cluster) -> list[float]:
        ops_s = cluster.gpu.seconds(kinds, flops, moved, "float32", False)
        sizes = (4e6, 1e8)
        wires_s = [time_s(Collective.ALL_REDUCE, size, 2, 1, cluster) - cluster.collective_s for size in sizes]
        return [*ops_s, cluster.gpu.update_s(4e9, 2), *wires_s, p2p_s(1e7, cluster, False)]

    gains = {
        "arithmetic": [1.1, 1.1, 1, 1, 1, 1, 1],
        "memory_bandwidth": [1, 1, 1.1, 1.1, 1, 1, 1],
        "node_links": [1, 1, 1, 1, 2, 2, 2],
    }
    assert set(changed) == set(gains)
    for name, gain in gains.items():
        assert np.array(seconds(base)) / seconds(changed[name]) == pytest.approx(gain), name


def test_the_search_is_asked_with_what_was_measured(tmp_path):
    """Where wires are a thousand times slower, the best plan takes longer, and it is another one."""
    with torch.device("meta"):
        blocks = (torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(4))
        model, batch = torch.nn.Sequential(*blocks), (torch.empty(64, 512), torch.empty(64, 512))
    graph = annotate(capture(model, batch, torch.nn.functional.mse_loss, precision="float32"))
    found = []
    for wire_s in (1e-6, 1e-3, 1.0):
        cluster = parse(2, calibration=written(tmp_path, calibration(wire_s)))
        found.append(search(graph, cluster, Pricer(graph, cluster, "float32"), SearchOptions(precision="float32")))
    times = [plan.prediction.step_time_s for plan in found]
    assert times == sorted(times) and times[0] < times[-1]
    assert (found[0].stages, found[0].layers) != (found[-1].stages, found[-1].layers)


def test_the_default_place(tmp_path, monkeypatch):
    path = written(tmp_path, calibration())
    monkeypatch.setenv(VARIABLE, str(path))
    assert parse(2).collective_times is not None
    assert parse(3).collective_times is None and "not with 3" in parse(3).notes[0]
    assert parse("8xH100-80GB").collective_times is None
    monkeypatch.setenv(VARIABLE, "")
    assert default_path() is None and parse(2).collective_times is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "autopar" / "calibration.json" and parse(2).collective_times is None


def without(*names: str, backward: bool | None = None) -> Calibration:
    """The calibration without some figures."""
    found = calibration()
    kept = [f for f in found.figures if f.name not in names or backward not in (None, f.backward)]
    return dataclasses.replace(found, figures=tuple(kept))


def test_there_is_no_default_place_without_a_home(monkeypatch):
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert default_path() is None and parse(2).collective_times is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_price_is_above_the_highest_rate(tmp_path, dtype):
    found = calibration()
    size = {"flops": 1e12, "bytes": 1e6}
    faster = [figure("product", 1.0, size, "bfloat16", b) for b in (False, True)]
    faster += [figure("product", 0.5, size, "float32", True), figure("attention", 0.25, size, "float32", True)]
    gpu = parse(2, calibration=written(tmp_path, dataclasses.replace(found, figures=(*found.figures, *faster)))).gpu
    flops, moved = np.array([1e12, 1e12]), np.array([1e6, 1e6])
    for backward in (False, True):
        seconds = gpu.seconds(np.array([PRODUCT, ATTENTION]), flops, moved, dtype, backward)
        assert (flops / seconds <= gpu.fastest_flops_per_s(dtype) * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        (without("move", backward=True).dumps(), "lack move"),
        (without("product").dumps(), "lack product"),
        (without("attention").dumps(), "lack attention"),
        ("not json", "is no calibration file"),
        ("[]", "is no calibration file"),
        (json.dumps({"version": VERSION + 1}), "version"),
        (json.dumps({"version": VERSION, "machine": {}, "measured_at": "", "figures": []}), "not positive numbers"),
        (dataclasses.replace(calibration(), machine={"processor": "Z80", "cores": 1}).dumps(), "another machine"),
        (calibration().dumps().replace('"median": 1e-06', '"median": -1.0'), "not positive numbers"),
    ],
)
def test_bad_files_are_explained(tmp_path, text, words):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DeviceError, match=words) as caught:
        parse(2, calibration=path)
    assert caught.value.hint and "autopar profile" in caught.value.hint and str(path) in caught.value.message


def test_a_calibration_is_not_for_other_devices(tmp_path):
    path = written(tmp_path, calibration())
    with pytest.raises(DeviceError, match="not with 4"):
        parse(4, calibration=path)
    with pytest.raises(DeviceError, match="other devices"):
        parse("8xH100-80GB", calibration=path)


def test_a_calibration_is_not_for_other_gpus_of_the_same_machine(tmp_path):
    cpu = calibration()
    machine = {**cpu.machine, "gpu": "NVIDIA A100-SXM4-80GB", "gpu_memory_bytes": 85_000_000_000}
    gpus = tuple(dataclasses.replace(f, device="cuda") for f in cpu.figures)
    path = written(tmp_path, dataclasses.replace(cpu, machine=machine, figures=gpus))
    a100, h100 = (dataclasses.replace(parse(f"2x{name}"), local=True) for name in ("A100-80GB-SXM", "H100-80GB"))
    assert "prices use measurements of this machine" in " ".join(apply_calibration(a100, path).notes)
    with pytest.raises(
        DeviceError, match=r"measured on NVIDIA A100-SXM4-80GB \(A100-80GB-SXM\), and this machine has H100-80GB"
    ):
        apply_calibration(h100, path)


def some(function: str, arguments: dict[str, object]) -> list[dict[str, object]]:
    """In a worker: one measurement."""
    remote._groups[2] = dist.group.WORLD
    return remote.measure(function, arguments)


SHORT = ("pointwise", "layer_norm", "cat", "reduce_scatter", "all_to_all", "p2p")  # one of each signature


def measurement(function: str, what: str, **arguments: object) -> Any:
    case = function, arguments
    return case if what in SHORT else slow(case)


@pytest.mark.parametrize(
    "case",
    [
        ("launch", {}),
        ("product", {"dtype": "float32", "shape": [8, 16, 32]}),
        ("attention", {"dtype": "float32", "shape": [1, 2, 16, 8]}),
        *(measurement("move", kind, kind=kind, elements=1 << 12) for kind in MOVES),
        ("update", {"elements": 64}),
        *(measurement("wire", name, name=name, members=2, size=4096) for name in (*COLLECTIVES, "p2p")),
        ("sharded", {"members": 2, "width": 16}),
        ("straggler_wait", {"members": 2}),
        ("call", {"members": 2}),
        ("overlap", {"members": 2}),
    ],
    ids=lambda case: f"{case[0]} {case[1].get('kind') or case[1].get('name') or ''}",
)
def test_everything_is_measured(workers2: WorkerPool, case):
    name, arguments = case
    for figures in workers2.run("test_profile:some", name, arguments):
        assert figures and all(sample > 0 for figure in figures for sample in figure["samples"])


def test_the_overlap_sends_tensors_of_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor of the CPU."""
    sent: set[str] = set()

    def all_reduce(tensor: torch.Tensor, **_: Any) -> Any:
        sent.add(tensor.device.type)
        return mock.Mock()

    def seconds(run: Any, *_: Any) -> list[float]:
        run()
        return [1.0]

    monkeypatch.setattr(remote, "_device", torch.device("meta"))
    monkeypatch.setattr(remote, "_groups", {2: None})
    monkeypatch.setattr(remote, "_seconds", seconds)
    monkeypatch.setattr(remote, "_all_reduced", lambda value: value)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert remote._overlap(2)
    assert sent == {"meta"}


def over_a_slow_link() -> float:
    """In a worker: the own cost of a typed collective whose messages take a tenth of a second longer than the plain one's."""
    all_reduce = remote.spmd.all_reduce

    def late(*given: Any, **how: Any) -> torch.Tensor:
        time.sleep(0.1)
        return all_reduce(*given, **how)

    with mock.patch.object(remote.spmd, "all_reduce", late):
        (figure,) = some("call", {"members": 2})
    return statistics.median(figure["samples"])


def test_a_collective_s_own_cost_has_no_waits_for_messages(workers2: WorkerPool):
    assert max(workers2.run("test_profile:over_a_slow_link")) < 0.025


def test_bytes_are_counted_as_the_price_counts_them():
    """``sweep.MOVES`` against the price's own table: every kind that is measured is some op's, with the same bytes."""
    n = 64 * 64 * 4

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linears = torch.nn.ModuleList(torch.nn.Linear(64, 64, device="meta") for _ in range(4))

        def forward(self, x, y):
            a, b, c, d = (
                linear(v) for linear, v in zip(self.linears, (x, y, x, y), strict=True)
            )  # each has one reader
            one = F.gelu(a * b).softmax(-1) + F.silu(F.layer_norm(c, (64,)))
            return torch.cat((one[:32], F.rms_norm(d, (64,))[32:]))

    batch = (tuple(torch.empty(2, 64, 64, device="meta")), torch.zeros(64, dtype=torch.long, device="meta"))
    graph = annotate(capture(Model(), batch, F.cross_entropy))
    seen = {}
    for table in (build(cls, precision("float32"))[0] for cls in graph.classes.values()):
        for i, kind in enumerate(table.kinds):
            here = table.slot_op == i
            name = {"mul": "pointwise"}.get(str(kind), str(kind))
            seen[name] = [table.slot_forward[here].sum() / n, table.slot_backward[here].sum() / n]
    for kind, wanted in MOVES.items():  # a loss reads its targets, too, which are 3 % of the logits here
        assert seen[kind] == pytest.approx(wanted, abs=0.04 if kind == "cross_entropy_loss" else 0), kind


def test_all_numbers_of_processes_have_tasks():
    names = [task.function for task in tasks(1, "cpu")]
    assert "wire" not in names and "product" in names
    members = {task.arguments["members"] for task in tasks(4, "cpu") if task.function == "wire"}
    assert members == {2, 4}
    of_three = [task.arguments for task in tasks(3, "cpu") if "members" in task.arguments]
    assert {arguments["members"] for arguments in of_three} == {3}, "three processes make no groups of two"


def test_a_sample_spans_the_turns_of_processes_that_share_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the runs move: on a busy machine the first run, which sets the number of runs, may take several times longer."""
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 1e-3

    monkeypatch.setattr(remote.time, "perf_counter", lambda: now)
    samples = remote._seconds(run, clock=lambda: now)
    assert samples == pytest.approx([1e-3] * len(samples))
    assert now / len(samples) > 1e-2
