"""The HTTP server of ``autopar ui`` on 127.0.0.1, protected by a token in its address.

Every request must have the token in its path, this server's name in ``Host``, and no foreign ``Origin``: cross-site requests get 403, also
with DNS rebinding. The server looks up files by names that it lists itself, and never opens a path from a request; a path has one accepted
encoding. A report that is opened as a page of its own runs in a sandbox without an origin. Connections and waiting jobs are limited.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from autopar.data_files import MalformedFileError, parse_json
from autopar.errors import AutoparError, UsageError
from autopar.ui.jobs import DONE, Job, Jobs
from autopar.ui.requests import arguments

MAX_BYTES = 2_000_000  # maximum size of a request
_FILE_BYTES = 2_000_000  # a longer file is shown up to this size
MAX_CONNECTIONS = 32
_SAFE = "/!'()*~"  # characters that the page's script doesn't escape in paths
_IDLE_S = 15  # before an idle connection is closed
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
_CSS, _SCRIPT = "text/css; charset=utf-8", "text/javascript; charset=utf-8"
_STATIC = {  # path -> package, file, type
    "": ("autopar.ui", "page.html", _HTML),
    "ui.css": ("autopar.ui", "ui.css", _CSS),
    "ui.js": ("autopar.ui", "ui.min.js", _SCRIPT),
    "report.css": ("autopar.report", "page.css", _CSS),
    "report.js": ("autopar.report", "page.min.js", _SCRIPT),
}
_RESULTS = {  # part of a plan -> file, type
    "report": ("report.html", _HTML),
    "figures": ("figures.json", _JSON),
    "plan.json": ("plan.json", _JSON),
}


@dataclass(frozen=True)
class Choices:
    """The page's choices: ``models``, ``devices`` and ``trainers`` as JSON objects with a ``name``, the table of pins, and autopar's
    version."""

    models: Sequence[dict[str, Any]]
    devices: Sequence[dict[str, Any]]
    trainers: Sequence[dict[str, Any]]
    pins: Sequence[dict[str, Any]]
    version: str


class Server:
    """A server that listens as soon as it is created. ``serve`` handles requests until another thread calls ``close``, or until an
    interrupt."""

    def __init__(self, choices: Choices, worker: Sequence[str], port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"ui": self})
        try:
            self._http = _Http(("127.0.0.1", port), handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the server cannot listen on port {port} of 127.0.0.1: {error}", "choose another --port"
            ) from error
        self.port = self._http.server_address[1]
        self.token = secrets.token_urlsafe(24)
        self.choices = choices
        self.jobs = Jobs(worker)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def write_redirect_page(self) -> Path:
        """Write a file that redirects this user's browser to the address, and return its path. If the address were an argument of the
        browser, the process list would show the token."""
        file = self.jobs.folder / "autopar.html"  # the folder is this user's
        refresh = (
            f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={self.address}"><title>autopar</title>'
        )
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
            opened.write(f"<!doctype html>{refresh}\n")
        return file

    def serve(self) -> None:
        self._http.serve_forever(poll_interval=0.1)

    def start(self) -> None:
        """Run ``serve`` in a thread."""
        threading.Thread(target=self.serve, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self.stop()

    def stop(self) -> None:
        """Close the socket, end the worker and remove all files; for use after ``serve`` has returned."""
        self._http.server_close()
        self.jobs.close()

    # -- routes: (method, path) -> (status, type, content) --

    def answer(self, method: str, path: str, body: Any) -> tuple[int, str, bytes]:
        if method == "GET" and path in _STATIC:
            package, name, kind = _STATIC[path]
            return 200, kind, resources.files(package).joinpath(name).read_bytes()
        if (method, path) == ("GET", "api/choices"):
            return _json(asdict(self.choices))
        if (method, path) == ("POST", "api/plans"):
            return self._plan(body)
        found = re.fullmatch(r"api/plans/([0-9a-f]{16})(?:/(report|figures|plan\.json|program)(?:/(.+))?)?", path)
        if found is None:
            return _json({"error": f"there is nothing at {path!r}", "hint": ""}, 404)
        job, part, name = self.jobs.find(found[1]), found[2], found[3]
        if part is None and method == "GET":
            return _json(job.to_json() | self._result(job))
        if part is None and method == "DELETE":
            return _json(self.jobs.cancel(job.number).to_json())
        if part == "program" and method == "POST" and name is None:
            return self._program(job)
        if method == "GET" and name is None and part in _RESULTS:
            file, kind = _RESULTS[part]
            return 200, kind, self._file(job, file).read_bytes()
        if method == "GET" and part == "program" and name is not None:
            return self._program_file(job, name)
        return _json({"error": f"{method} is not for {path!r}", "hint": ""}, 405)

    def _plan(self, body: Any) -> tuple[int, str, bytes]:
        folder = self.jobs.new_folder()
        try:
            words = arguments(body, {model["name"] for model in self.choices.models}, folder)
            return _json(self.jobs.submit("plan", words, folder).to_json(), 202)
        except AutoparError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _program(self, job: Job) -> tuple[int, str, bytes]:
        self._file(job, "plan.json")  # raises if there is no plan
        return _json(self.jobs.submit("program", job.arguments, job.folder).to_json(), 202)

    def _result(self, job: Job) -> dict[str, Any]:
        if job.state != DONE:
            return {}
        if job.kind == "program":
            files = [{"name": name, "bytes": file.stat().st_size} for name, file in _program_files(job).items()]
            return {"files": files}
        return {"plan": json.loads(self._file(job, "plan.json").read_text("utf-8"))}

    @staticmethod
    def _file(job: Job, name: str) -> Path:
        if job.kind != "plan" or job.state != DONE:
            raise UsageError("there is no plan yet", f"the job is {job.state}")
        return job.folder / name

    @staticmethod
    def _program_file(job: Job, name: str) -> tuple[int, str, bytes]:
        files = _program_files(job) if job.kind == "program" and job.state == DONE else {}
        if name not in files:
            return _json({"error": f"the program has no file {name!r}", "hint": ""}, 404)
        return 200, _TEXT, files[name].read_bytes()[:_FILE_BYTES]


def _program_files(job: Job) -> dict[str, Path]:
    """Return the program's text files by name, the most important first."""
    folder = job.folder / "program"
    found = [file for file in folder.rglob("*") if file.is_file() and file.suffix in (".py", ".json", ".md", ".txt")]
    first = ("train.py", "model.py", "plan.json")
    key = {name: i for i, name in enumerate(first)}
    names = {file.relative_to(folder).as_posix(): file for file in found}
    return dict(sorted(names.items(), key=lambda item: (key.get(item[0], len(first)), item[0])))


def _json(data: Any, status: int = 200) -> tuple[int, str, bytes]:
    return status, _JSON, json.dumps(data).encode()


class _Http(ThreadingHTTPServer):
    """An HTTP server with a thread for each of at most ``MAX_CONNECTIONS`` connections."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients; print a traceback of other errors."""
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    """Authenticates and answers requests."""

    ui: ClassVar[Server]
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server_version, sys_version = "autopar", ""

    def _refused(self) -> str:
        """Return why the request is refused, or an empty string."""
        names = {f"{name}:{self.ui.port}" for name in ("127.0.0.1", "localhost")}
        if self.headers.get("Host") not in names:
            return "the request is for another host"
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{name}" for name in names}:
            return "the request comes from another site"
        token = self.path.removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(token.encode(), self.ui.token.encode()):
            return "the address has no token, or another one: open the address that `autopar ui` printed"
        return ""

    def _handle(self) -> None:
        if refused := self._refused():
            self._send(*_json({"error": refused, "hint": ""}, 403))
            self.close_connection = True
            return
        try:
            body = self._body()
            written = self.path.removeprefix("/").partition("/")[2]
            path = unquote(written)
            if quote(path, safe=_SAFE) != written:  # the path has another spelling, or a query
                status, kind, content = _json({"error": f"there is nothing at {self.path[-100:]!r}", "hint": ""}, 404)
            else:
                status, kind, content = self.ui.answer(self.command, path, body)
        except AutoparError as error:
            status, kind, content = _json({"error": error.message, "hint": error.hint or ""}, 400)
        except Exception as error:
            traceback.print_exc()
            hint = "this is a bug in autopar; the terminal of `autopar ui` has the traceback"
            status, kind, content = _json({"error": f"{type(error).__name__}: {error}", "hint": hint}, 500)
        self._send(status, kind, content)

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815  names of http.server

    def _body(self) -> Any:
        if self.command != "POST":
            return None
        size = self.headers.get("Content-Length", "")
        is_size = re.fullmatch(r"[0-9]{1,12}", size) is not None
        if not is_size or int(size) > MAX_BYTES:
            self.close_connection = True
            self._discard(int(size) if is_size else 0)
            raise UsageError(f"a request must have a Content-Length of at most {MAX_BYTES:,} bytes", "send less")
        content = self.rfile.read(int(size))
        if self.headers.get_content_type() != _JSON:
            raise UsageError("the request is not JSON", f"send it with Content-Type: {_JSON}")
        try:
            return parse_json(content or b"null")
        except MalformedFileError as error:
            raise UsageError(f"the request is not JSON: {error}", "send a JSON object") from error

    def _discard(self, size: int) -> None:
        """Read and drop a body that is too large, up to ten times the limit: most clients send all of it before they read the response."""
        left = min(size, 10 * MAX_BYTES)
        while left > 0 and (part := self.rfile.read(min(left, 1 << 16))):
            left -= len(part)

    def _send(self, status: int, kind: str, content: bytes) -> None:
        report = kind == _HTML and self.path != f"/{self.ui.token}/"  # a report is the only other page
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": _SANDBOX if report else _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        self.send_response(HTTPStatus(status))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the address has the token."""
