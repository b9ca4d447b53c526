"""``autopar doctor`` finds what works, and what does not, with what to do about it."""

from __future__ import annotations

import dataclasses
import json
import socket
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner

from autopar.cli.app import cli
from autopar.devices import calibration
from autopar.doctor import installed, machine, remote, working
from autopar.errors import LaunchError


def quick() -> tuple[int, dict[str, dict]]:
    done = CliRunner().invoke(cli, ["doctor", "--quick", "--json"])
    found = json.loads(done.stdout)
    assert found["works"] == (done.exit_code == 0)
    return done.exit_code, {one["name"]: one for one in found["findings"]}


def test_this_machine_works_and_figures_are_its_own():
    status, found = quick()
    assert status == 0 and found["torch"]["figures"]["version"] == metadata.version("torch")
    assert found["cores"]["figures"]["cores"] == calibration.this_machine()["cores"]
    assert 0 < found["memory"]["figures"]["available_bytes"] <= found["memory"]["figures"]["total_bytes"]
    required = {
        "click",
        "networkx",
        "numpy",
        "ortools",
        "pyyaml",
        "rich",
        "safetensors",
        "spmd-types",
        "torch",
        "transformers",
    }
    assert required <= set(found) and "matplotlib" not in found
    assert found["calibration"]["status"] == "absent" and "autopar profile" in found["calibration"]["hint"]


def test_what_every_run_needs_is_broken_when_it_is_old_or_gone(monkeypatch):
    versions = {"ortools": "9.10.4067", "transformers": "4.57.1"}
    real = metadata.version

    def version(name: str) -> str:
        if name == "networkx":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    status, found = quick()
    assert status == 1
    assert {name for name, one in found.items() if one["status"] == "broken"} == {"ortools", "networkx"}
    assert found["ortools"]["hint"] == "pip install --upgrade 'ortools>=9.12'"
    assert found["transformers"]["status"] == "warning" and found["networkx"]["value"] == "not installed"
    assert all(one["hint"] for one in found.values() if one["status"] in ("broken", "warning"))
    table = CliRunner().invoke(cli, ["doctor", "--quick"]).stdout
    assert "broken, and needed by every run: networkx, ortools" in table


def test_a_package_whose_import_fails_and_a_folder_that_cannot_be_written(monkeypatch):
    def fail(*args, **options) -> None:
        raise OSError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found")

    monkeypatch.setattr(installed.importlib, "import_module", fail)
    broken = installed._package("ortools", "9.12", "")
    assert broken.status == "broken" and "GLIBCXX_3.4.32" in broken.value
    assert installed._numbers("2.11.0+cu126") < installed._numbers("2.13.0a0") == (2, 13, 0)
    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", fail)
    assert machine._temporary_folder().status == "broken"


def test_a_taken_port_and_a_calibration_of_another_machine_are_warnings(monkeypatch, tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setattr(machine, "PORTS", {port: "torchrun"})
        file = tmp_path / "calibration.json"
        figure = calibration.Figure("launch", "cpu", 2, "", False, {}, "s", 1e-6, 1e-6, 1e-6, 3)
        update = dataclasses.replace(figure, name="update", size={"bytes": 1e6})
        move = dataclasses.replace(figure, name="move", variant=calibration.POINTWISE, size={"bytes": 1e6})
        product = dataclasses.replace(figure, name="product", variant="float32", size={"flops": 1e9, "bytes": 1e6})
        attention = dataclasses.replace(product, name="attention")
        forward = (figure, update, move, product, attention)
        figures = (*forward, *(dataclasses.replace(one, backward=True) for one in forward if one is not update))
        here = calibration.Calibration(calibration.this_machine(), "2026-01-01", figures)
        file.write_text(dataclasses.replace(here, machine={"processor": "abacus", "cores": 3}).dumps())
        monkeypatch.setenv("AUTOPAR_CALIBRATION", str(file))
        found = {one.name: one for one in machine.machine()}
        assert found[f"port {port}"].status == "warning" and "--master-port" in found[f"port {port}"].hint
        assert found["calibration"].status == "warning" and "abacus" in found["calibration"].value
        file.write_text(here.dumps())
        assert machine._calibration().status == "ok" and machine._calibration().figures["processes"]["cpu"] == (2,)


def gpu(name: str, capability: tuple[int, int], kernels: list[str]) -> list:
    cuda = SimpleNamespace(
        is_available=lambda: True, get_arch_list=lambda: kernels, device_count=lambda: 1,
        nccl=SimpleNamespace(version=lambda: (2, 29, 7)), mem_get_info=lambda index: (60 * 10**9, 85_000_000_000),
        get_device_properties=lambda index: SimpleNamespace(name=name, major=capability[0], minor=capability[1]),
    )  # fmt: skip
    distributed = SimpleNamespace(is_nccl_available=lambda: True)
    return list(machine.gpus(SimpleNamespace(cuda=cuda, distributed=distributed)))


def test_gpus_have_a_kind_or_a_hint():
    known, nccl, *_ = gpu("NVIDIA H100 80GB HBM3", (9, 0), ["sm_80", "sm_90"])
    assert known.status == "ok" and known.figures["kind"] == "H100-80GB-SXM" and nccl.value == "2.29.7"
    assert gpu("NVIDIA A100-SXM4-80GB", (8, 6), ["sm_80"])[0].status == "ok"
    unknown = gpu("NVIDIA T4", (7, 5), ["sm_75"])[0]
    assert unknown.status == "warning" and "local = true" in unknown.hint
    old = gpu("NVIDIA H100 80GB HBM3", (9, 0), ["sm_70", "sm_80"])[0]
    assert old.status == "warning" and "sm_70, sm_80" in old.value


def test_two_processes_sum_and_those_that_cannot_are_broken(monkeypatch, workers2):
    answers = [workers2.run("autopar.doctor.remote:sum_of_ranks", "cpu"), [2.0, 2.0], LaunchError("rank 1: refused")]

    def run(*args, **kwargs):
        answer = answers.pop(0)
        if isinstance(answer, LaunchError):
            raise answer
        return answer

    monkeypatch.setattr(working.WorkerPool, "run", run)
    works, wrong, refused = working.gloo(), working.gloo(), working.gloo()
    assert works.status == "ok" and wrong.status == "broken" and "[2.0, 2.0]" in wrong.value
    assert refused.status == "broken" and "refused" in refused.value and refused.hint


def test_a_function_is_compiled_as_it_runs(monkeypatch):
    monkeypatch.setattr(remote.torch, "compile", lambda function, **options: function)
    assert remote.compiled("cpu") == 0
    monkeypatch.setattr(working.Processes, "call", lambda *args, **kwargs: [0.5])
    assert working.compiler().status == "warning"
