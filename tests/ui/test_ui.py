"""The server of ``autopar ui`` over HTTP: who is answered, what a plan is, what a pin costs, and what goes wrong."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from places import ROOT

from autopar.cli.app import cli
from autopar.cli.planner import Cancelled, Planner
from autopar.cli.ui import WORKER, choices
from autopar.errors import UsageError
from autopar.ui import Server
from autopar.ui.jobs import Job, Jobs

MLP = f"{ROOT}/examples/mlp.py:model"
ASKED = {"model": MLP, "devices": "8xH100-80GB"}
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(choices((MLP,)), WORKER)
    found.start()
    yield found
    found.close()


def send(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and content; ``path`` is what follows the token, or the whole path if it begins with a slash."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    path = path if path.startswith("/") else f"/{server.token}/{path}"
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    fields = ({"Content-Type": "application/json"} if content is not None else {}) | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    try:
        connection.putrequest(method, path, skip_host="Host" in fields)
        for name, value in fields.items():
            connection.putheader(name, value)
        if content is not None:
            connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content)
        answer = connection.getresponse()
        read = answer.read()
        kind = answer.headers.get_content_type()
        return answer.status, answer.headers, json.loads(read) if kind == "application/json" else read.decode()
    finally:
        connection.close()


def done(server: Server, path: str, body: Any) -> dict[str, Any]:
    """The job that a request starts, when it has ended."""
    status, _, job = send(server, "POST", path, body)
    assert status == 202, job
    while job["state"] in ("waiting", "running"):
        time.sleep(0.05)
        job = send(server, "GET", f"api/plans/{job['id']}")[2]
    return job


def test_only_who_knows_the_token_is_answered_and_no_other_site_is(server: Server):
    for path in (
        "/",
        "/ui.js",
        "/api/choices",
        f"/{server.token[:-1]}/api/choices",
        "/api/plans",
        f"//{server.token}x/",
    ):
        status, headers, found = send(server, "GET", path)
        assert status == 403 and "token" in found["error"]
    assert send(server, "POST", "/api/plans", ASKED)[0] == 403
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1:{server.port + 1}"):
        assert send(server, "GET", "api/choices", Host=host)[0] == 403
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}", "http://127.0.0.1"):
        assert send(server, "POST", "api/plans", ASKED, Origin=origin)[0] == 403
    status, headers, _ = send(server, "GET", "", Origin=f"http://localhost:{server.port}")
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert send(server, "OPTIONS", "api/plans")[0] == 501
    assert server.address.startswith("http://127.0.0.1:") and len(server.token) >= 32


def test_no_path_leads_to_a_file(server: Server):
    for path in (
        "../../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "ui.css/../server.py",
        "server.py",
        "page.html",
        "ui.min.js",
    ):
        assert send(server, "GET", path)[0] == 404
    for path in ("api/plans/../choices", "api/plans/0000000000000000/../../choices"):
        assert send(server, "GET", path)[0] in (400, 404)


def unmeasured(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan without what differs from run to run: seconds and bytes of the planning."""
    notes = [re.sub(r"compared in [\d.]+ s", "", note) for note in plan["notes"]]
    return {k: v for k, v in plan.items() if k not in ("wall_time_s", "planning_memory_bytes")} | {"notes": notes}


def test_a_plan_is_the_one_of_the_command_line_and_a_pin_has_a_price(server: Server):
    free = done(server, "api/plans", ASKED)
    assert free["state"] == "done" and [stage["stage"] for stage in free["stages"]] == [
        "load",
        "capture",
        "search",
        "report",
    ]
    printed = json.loads(CliRunner().invoke(cli, ["plan", MLP, "--devices", "8xH100-80GB", "--json"]).stdout)
    assert unmeasured(free["plan"]) == unmeasured(printed)
    pinned = done(server, "api/plans", ASKED | {"pins": {"tensor": "8"}})
    assert "capture" not in [stage["stage"] for stage in pinned["stages"]]  # the graph is kept
    (price,) = pinned["plan"]["pins"]
    assert price["pin"] == "tensor" and price["step_time_without_s"] == pytest.approx(free["plan"]["step_time_s"])
    assert pinned["plan"]["step_time_s"] > free["plan"]["step_time_s"]
    status, headers, report = send(server, "GET", f"api/plans/{pinned['id']}/report")
    assert status == 200 and "sandbox allow-scripts" in headers["Content-Security-Policy"]
    (figures,) = json.loads(re.search(r'id="figures">(.*?)</script>', report, re.DOTALL)[1])["plans"]
    assert figures["prediction"]["step_time_s"] == pinned["plan"]["step_time_s"]
    assert figures["command"] == f"autopar plan {shlex.quote(MLP)} --devices 8xH100-80GB --pin tensor=8"
    assert send(server, "GET", f"api/plans/{pinned['id']}/figures")[2] == figures
    assert json.loads(json.dumps(send(server, "GET", f"api/plans/{pinned['id']}/plan.json")[2])) == pinned["plan"]

    program = done(server, f"api/plans/{pinned['id']}/program", {})
    names = [file["name"] for file in program["files"]]
    assert names[0] == "train.py" and "plan.json" in names
    path = f"api/plans/{program['id']}/program"
    assert "def main" in send(server, "GET", f"{path}/train.py")[2]
    for name in ("..%2freport.html", "../report.html", "%2e%2e%2fplan.json", "/etc/passwd", "train.pyc"):
        assert send(server, "GET", f"{path}/{name}")[0] == 404


def test_a_job_that_runs_is_cancelled_and_the_next_one_is_done(server: Server):
    long = send(server, "POST", "api/plans", {"model": "llama3-405b", "devices": "64x8xH100-80GB"})[2]
    waits = send(server, "POST", "api/plans", ASKED)[2]
    assert send(server, "DELETE", f"api/plans/{waits['id']}")[2]["state"] == "cancelled"
    while send(server, "GET", f"api/plans/{long['id']}")[2]["state"] == "waiting":
        time.sleep(0.02)
    assert send(server, "GET", f"api/plans/{long['id']}/report")[0] == 400
    assert send(server, "DELETE", f"api/plans/{long['id']}")[2]["state"] == "cancelled"
    after = done(server, "api/plans", ASKED | {"options": {"global-batch": 32}})
    assert after["state"] == "done" and after["plan"]["global_batch"] == 32
    assert send(server, "GET", f"api/plans/{long['id']}")[2]["state"] == "cancelled"


# it answers after a while: a job that is done before `cancel` gets the lock would be no cancelled one
ANSWERING = """import json, sys, time
for line in sys.stdin:
    time.sleep(0.5)
    print(json.dumps({"stage": "load", "text": ""}), json.dumps({"error": None}), sep="\\n", flush=True)
"""


@pytest.mark.parametrize("moment", ["_restart_if_ended", "_run"])
def test_a_job_that_is_cancelled_as_it_starts_holds_up_no_other(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs = Jobs([sys.executable, "-c", ANSWERING])
    real, threads = getattr(jobs, moment), list[threading.Thread]()

    def cancelling(*job: Job) -> None:
        if not threads:
            threads.append(threading.Thread(target=jobs.cancel, args=(first.number,)))
            threads[0].start()
            threads[0].join(0.3)
            if not threads[0].is_alive():  # or it waits for the lock
                jobs._worker.wait(5)
        real(*job)

    monkeypatch.setattr(jobs, moment, cancelling)
    with jobs._changed:
        first = jobs.submit("plan", [], tmp_path)
    second = jobs.submit("plan", [], tmp_path)
    limit_s = time.monotonic() + 5
    while second.state in ("waiting", "running") and time.monotonic() < limit_s:
        time.sleep(0.01)
    jobs.close()
    assert (first.state, second.state) == ("cancelled", "done")


# it searches until it is told to cancel, or forever
SEARCHING = """import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    if "cancel" in job:
        print(json.dumps({"error": {"message": "cancelled", "hint": ""}}), flush=True)
    else:
        print(json.dumps({"stage": "search", "text": str(os.getpid())}), flush=True)
        while "forever" in job["arguments"]:
            pass
"""


def test_a_cancelled_search_ends_in_its_worker_and_one_that_does_not_end_is_killed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("autopar.ui.jobs.PATIENCE_S", 0.3)
    jobs = Jobs([sys.executable, "-c", SEARCHING])
    processes = []
    for arguments in ([], [], ["forever"], []):
        job = jobs.submit("plan", arguments, tmp_path)
        limit_s = time.monotonic() + 20
        while not job.stages and time.monotonic() < limit_s:
            time.sleep(0.01)
        processes.append(job.stages[0]["text"])
        assert jobs.cancel(job.number).state == "cancelled"
    jobs.close()
    first, second, third, fourth = processes
    assert first == second == third != fourth
    assert job.state == "cancelled" and job.error is None


def test_cancelled_jobs_take_no_places_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.ui.jobs.MAX_JOBS", 2)
    jobs = Jobs([sys.executable, "-c", ANSWERING.replace("time.sleep(0.5)", "time.sleep(0.05)")])

    def ended() -> Job:
        job = jobs.submit("plan", [], jobs.new_folder())
        while job.state in ("waiting", "running"):
            time.sleep(0.01)
        return job

    kept = [ended(), ended()]
    for _ in range(4):
        with jobs._changed:  # the worker cannot start it
            jobs.cancel(jobs.submit("plan", [], jobs.new_folder()).number)
    assert [jobs.find(job.number) for job in kept] == kept and len(jobs._jobs) == 5  # the last one was cancelled later
    newest = [ended(), ended()][0]  # jobs are deleted when the next one comes
    assert not kept[0].folder.exists() and kept[1].folder.exists() and jobs.find(newest.number) is newest
    with pytest.raises(UsageError, match="no such plan"):
        jobs.find(kept[0].number)
    jobs.close()


def test_an_interrupted_search_leaves_the_graph_for_the_next_one(tmp_path: Path):
    stages, calls = list[str](), [0]

    def interrupt() -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise Cancelled

    planner, words = Planner(lambda stage, text: stages.append(stage), interrupt), [MLP, "--devices", "8xH100-80GB"]
    with pytest.raises(Cancelled):
        planner.plan(words, tmp_path)
    assert stages[-1] == "search" and not list(tmp_path.iterdir())
    stages.clear()
    planner.plan(words, tmp_path)
    assert {*stages} == {"search", "report"} and calls[0] > 10
    after = json.loads((tmp_path / "plan.json").read_text())
    Planner(lambda *_: None).plan(words, tmp_path)
    alone = json.loads((tmp_path / "plan.json").read_text())
    assert unmeasured(after) == unmeasured(alone)


def test_what_is_wrong_is_said_with_a_hint(server: Server):
    def refused(**request: Any) -> str:
        status, _, found = send(server, "POST", "api/plans", {"devices": "8xH100-80GB"} | request)
        assert status == 400 and found["hint"], found
        return found["error"]

    assert "no model 'nothing'" in refused(model="nothing")
    assert "no model 'evil.py:main'" in refused(model="evil.py:main")
    assert "does not read files" in refused(model="gpt2", devices="/etc/passwd.toml")
    assert "no option 'calibration'" in refused(model="gpt2", options={"calibration": "/etc/passwd"})
    assert "no pin 'plan'" in refused(model="gpt2", pins={"plan": "x"})
    assert "unknown fields" in refused(model="gpt2", plan_file="/etc/passwd")
    assert "not JSON" in refused(config="{")
    assert "not a JSON object" in refused(config="[1]")
    assert "not JSON" in send(server, "POST", "api/plans", b"{")[2]["error"]
    assert "not JSON" in send(server, "POST", "api/plans", b"{}", Content_Type="text/plain")[2]["error"]
    assert "at most" in send(server, "POST", "api/plans", b" " * 2_000_001)[2]["error"]
    for request, words in (
        (
            {"config": {"model_type": HOSTILE, "auto_map": {"AutoModel": "evil--evil.Model"}}},
            "cannot read the configuration",
        ),
        ({"model": "gpt2", "pins": {"zero": 7}}, "zero is 7, it must be"),
        ({"model": "gpt2", "devices": "8xT4"}, "GPU 'T4' is not known"),
        ({"model": "gpt2", "cluster": "gpus = 3"}, "unknown key 'gpus'"),
        ({"model": "gpt2", "devices": "--help"}, "not a description of devices"),
    ):
        job = done(server, "api/plans", {"devices": "8xH100-80GB"} | request)
        assert job["state"] == "failed" and words in job["error"]["message"] and job["error"]["hint"]
    with pytest.raises(UsageError, match="cannot listen on port"):
        Server(choices(), WORKER, server.port)


def test_pins_that_contradict_each_other_are_refused_before_the_model_is_captured(tmp_path: Path):
    told: list[str] = []
    planner = Planner(lambda stage, text: told.append(stage))
    with pytest.raises(UsageError, match="pipeline=1 has no pipeline"):
        planner.plan([MLP, "--devices", "8xH100-80GB", "--schedule", "1f1b", "--pipeline", "1"], tmp_path)
    assert told == []


def test_the_plan_of_a_trainer_has_the_files_and_the_prices_of_the_command_line(tmp_path: Path):
    words = ["gpt2", "--devices=8xH100-80GB", "--seq=64", "--global-batch=16", "--trainer=torchtitan"]
    folder, exported = tmp_path / "job", tmp_path / "exported"
    folder.mkdir()
    Planner(lambda stage, text: None).plan(words, folder)
    CliRunner().invoke(cli, ["plan", *words, f"--export={exported}"], catch_exceptions=False)
    found = json.loads((folder / "figures.json").read_text())
    files = found["configuration"]["files"]
    assert sorted(files) == ["torchtitan_args.sh", "torchtitan_plan.py"]
    assert files == {name: (exported / name).read_text() for name in files}
    assert found["configuration"]["notes"] and found["command"].endswith("--trainer torchtitan")
    printed = json.loads((exported / "plan.json").read_text())
    assert found["step"]["end_s"] == printed["step_time_s"]
    assert json.loads((folder / "plan.json").read_text())["request"] == printed["request"]

    def report(plan: dict[str, Any]) -> dict[str, Any]:
        """The figures of the page of ``autopar report``."""
        file, page = tmp_path / "edited.json", tmp_path / "page.html"
        file.write_text(json.dumps(plan))
        CliRunner().invoke(cli, ["report", str(file), "-o", str(page)], catch_exceptions=False)
        (data,) = re.findall(r'id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
        (drawn,) = json.loads(data)["plans"]
        return drawn

    drawn = report(printed)
    assert drawn["step"]["end_s"] == printed["step_time_s"] and drawn["missing"] == []
    assert drawn["configuration"] == found["configuration"]
    unnamed = report(printed | {"request": {"trainer": "torchtitan"}})
    assert unnamed["configuration"] is None and "the configuration of torchtitan" in unnamed["missing"][0]
    layers = [layer | {"activations": "full"} if i == 3 else layer for i, layer in enumerate(printed["layers"])]
    edited = report(printed | {"layers": layers})
    assert edited["configuration"] is None and "differs from the other layers" in edited["missing"][0]


def test_a_model_that_was_edited_is_captured_again(tmp_path: Path):
    file, told = tmp_path / "edited.py", []
    text = (
        "import torch\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(2)]\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(8, 8), torch.randn(8, 8)), torch.nn.functional.mse_loss\n"
    )
    planner = Planner(lambda stage, text: told.append(stage))
    words = [f"{file}:make", "--devices", "2xH100-80GB"]
    for content in (text, text, text.replace("range(2)", "range(2 + 2)")):
        file.write_text(content)
        graph = planner._captured(words)[-1]
    assert told.count("load") == 2 and "3.weight" in graph.layers[-1].parameters


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_its_worker_and_its_files(tmp_path: Path, number: int):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "autopar", "ui"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("http://127.0.0.1:")
        (folder,) = tmp_path.glob("autopar-ui-*")
        process.send_signal(number)
        _, said = process.communicate(timeout=30)  # its output ends when the worker has ended, too
    assert process.returncode == 130 and "Traceback" not in said and not folder.exists()


def test_the_script_is_built_from_the_sources():
    script = resources.files("autopar.ui").joinpath("ui.min.js").read_text("utf-8")
    report = resources.files("autopar.report").joinpath("page.min.js").read_text("utf-8")
    line = re.search(r"^sources sha256 \w+$", report, re.MULTILINE)[0]
    assert line in script, "make page"
    size = sum(file.stat().st_size for file in (ROOT / "autopar" / "ui").iterdir() if file.is_file())
    assert size + len(report) < 200_000
    assert not re.search(r"\beval\(|innerHTML|new Function|import\(", script)
    assert "pickle" not in Path(ROOT, "autopar/ui/server.py").read_text()
