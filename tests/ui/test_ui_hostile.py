"""The server of ``autopar ui`` against requests that no page sends: other types, other spellings, too many."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import ui
from autopar.cli.options import PlanRequest
from autopar.cli.planner import _without_folder
from autopar.ui import Server
from autopar.ui.jobs import DONE, MAX_WAITING, RUNNING
from autopar.ui.server import MAX_CONNECTIONS, Choices

SILENT = (sys.executable, "-c", "import sys; sys.stdin.read()")
MODELS = [{"name": "gpt2"}]


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(Choices(MODELS, [], [], [], "0"), SILENT)
    found.start()
    yield found
    found.close()


def send(server: Server, method: str, path: str, content: bytes | None = None, length: str | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.putrequest(method, path)
        if content is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(content)) if length is None else length)
        connection.endheaders(content)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def plan(server: Server, request: Any) -> tuple[int, dict[str, Any]]:
    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    status, _, read = send(server, "POST", f"/{server.token}/api/plans", content)
    return status, json.loads(read)


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "request_",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model": ' + NESTED,
        b'{"model": "gpt2", "model": "gpt2", "devices": "8"}',
        b'{"model": "gpt2", "devices": 1e999}',
        b'{"model": "gpt2", "devices": NaN}',
        b'{"model": "gpt2", "devices": ' + b"9" * 5000 + b"}",
        b'{"model": "gpt2", "devices": "\\ud800"}',
        b'{"model": "gpt2", "devices": "\xff"}',
        {"model": ["gpt2"], "devices": "8"},
        {"model": {"gpt2": 1}, "devices": "8"},
        {"model": "gpt2", "devices": ["8"]},
        {"model": "gpt2", "devices": "8\n9"},
        {"model": "gpt2", "devices": "8" * 2000},
        {"model": "gpt2", "devices": "8", "pins": {"tensor": [2]}},
        {"model": "gpt2", "devices": "8", "pins": ["tensor"]},
        {"model": "gpt2", "devices": "8", "allow": "fp8"},
        {"model": "gpt2", "devices": "8", "options": {"seq": {"a": 1}}},
        {"model": "gpt2", "cluster": ["nodes = 1"]},
        {"model": "gpt2", "cluster": {"nodes": 1}},
        {"config": {"model_type": ["gpt2"]}, "devices": "8"},
        {"config": {}, "name": {"a": 1}, "devices": "8"},
        {"config": "[" * 100_000, "devices": "8"},
        {"config": '{"a": "\\ud800"}', "devices": "8"},
        [["gpt2"]],
        "gpt2",
        None,
    ],
    ids=range(26),
)
def test_values_of_other_types_are_refused_with_a_sentence(server: Server, capfd, request_: Any):
    before = set(server.jobs.folder.iterdir())
    status, found = plan(server, request_)
    assert status == 400 and found["error"] and found["hint"], found
    assert "Traceback" not in capfd.readouterr().err
    assert set(server.jobs.folder.iterdir()) == before  # a refused request leaves no files


@pytest.mark.parametrize("length", ["\u00b2", "-1", "1e3", "9" * 5000, ""])
def test_a_length_that_is_no_number_is_refused(server: Server, capfd, length: str):
    status, _, read = send(server, "POST", f"/{server.token}/api/plans", b"", length)
    assert status == 400 and "Content-Length" in json.loads(read)["error"]
    assert "Traceback" not in capfd.readouterr().err


def test_each_thing_has_one_spelling_and_a_report_its_sandbox(server: Server):
    job = server.jobs.submit("plan", ["gpt2"], server.jobs.new_folder())
    (job.folder / "report.html").write_text("<p>report</p>")
    while job.state != RUNNING:  # the worker never answers
        time.sleep(0.01)
    job.state = DONE
    report = f"api/plans/{job.number}/report"
    status, headers, _ = send(server, "GET", f"/{server.token}/{report}")
    assert status == 200 and "sandbox" in headers["Content-Security-Policy"]
    assert "sandbox" not in send(server, "GET", f"/{server.token}/")[1]["Content-Security-Policy"]
    for other in (
        report.replace("t", "%74"),
        report.replace("/", "%2f"),
        f"{report}?a=1",
        f"{report}?",
        f"{report}.",
        f"{report}/",
        f"{report}/.",
        f"{report}%2e",
        f"x/../{report}",
        f"./{report}",
        f"/{report}",
        report.upper(),
        "?",
        "page.html",
        "%75i.js",
    ):
        status, headers, read = send(server, "GET", f"/{server.token}/{other}")
        assert status in (404, 405) and b"<p>" not in read, other
    assert send(server, "GET", f"//{server.token}/api/choices")[0] in (200, 403)  # http.server reads // as /
    assert send(server, "GET", f"/./{server.token}/api/choices")[0] == 403


def test_jobs_that_wait_are_limited(server: Server):
    found = [plan(server, {"model": "gpt2", "devices": "8xH100-80GB"})[0] for _ in range(MAX_WAITING + 2)]
    assert found[:MAX_WAITING] == [202] * MAX_WAITING and found[-1] == 400  # one of them runs
    status, refused = plan(server, {"model": "gpt2", "devices": "8xH100-80GB"})
    assert status == 400 and f"{MAX_WAITING} plans wait already" in refused["error"]


def choices_status(server: Server) -> int:
    try:
        return int(send(server, "GET", f"/{server.token}/api/choices")[0])
    except ConnectionError:  # closed before the request was read
        return 503


def test_connections_are_limited_and_their_places_are_free_again(server: Server):
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS)]
    try:
        deadline = time.monotonic() + 10
        while (status := choices_status(server)) != 503:
            assert time.monotonic() < deadline, status
    finally:
        for one in held:
            one.close()
    while (status := choices_status(server)) != 200:
        assert time.monotonic() < deadline + 10, status


def test_the_token_is_in_no_arguments_of_a_process(monkeypatch, capsys):
    opened: list[str] = []
    monkeypatch.setattr(ui.webbrowser, "open", opened.append)
    monkeypatch.setattr(ui, "WORKER", SILENT)
    seen: list[tuple[str, int, str]] = []

    def serve(server: Server) -> None:
        file = Path(opened[0].removeprefix("file://"))
        seen.append((server.address, file.stat().st_mode & 0o777, file.read_text()))
        for folder in (server.jobs.folder, file.parent):
            assert folder.stat().st_mode & 0o077 == 0
        commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(server.token.encode() in command for command in commands)

    monkeypatch.setattr(Server, "serve", serve)
    ui.ui_command((), 0, True)
    ((address, mode, text),) = seen
    assert address not in opened[0] and opened[0].startswith("file://")
    assert mode == 0o600 and f"url={address}" in text
    assert address in capsys.readouterr().out


def test_a_command_to_copy_and_the_plan_name_no_folder_of_the_server(tmp_path: Path):
    model, devices = f"{tmp_path}/config.json", f"{tmp_path}/cluster.toml"
    assert _without_folder(PlanRequest(model, devices), tmp_path) == PlanRequest("config.json", "cluster.toml")
    own = PlanRequest("my models/m.py:make", "8xT4")
    assert _without_folder(own, tmp_path) == own
