"""Worker processes that start at once: forked from a process that has imported torch and what else the workers import.

``autopar.run.processes`` starts every rank as a Python of its own, and importing takes that rank four seconds of a processor. A run of the
tests starts some hundred ranks. Here a server imports once, and each rank is a fork of it with the environment, the folder, the search
path and the streams that it would have had. There are two servers, for even and for odd ranks: strings hash differently in two Pythons
that are started, so what depends on the order of a set differs between ranks, as it would in use.

Tests of how processes start take the fixture ``processes_of_their_own``.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from compiled_once import compile_once
from runtime_once import share_runtimes

from autopar.program import trainer
from autopar.run import folder

PRELOADED = (
    "autopar.run.pool",
    "autopar.run.worker",
    "autopar.verify.remote",
    "autopar.program.trainer",
    "autopar.program.split_pipeline",  # torch's pipelining
    "autopar.program.fsdp_split",  # ... and FSDP
    "exactness",  # what most modules of tests import whose functions ranks call
    "pytest",
)
PIPE = subprocess.PIPE
_WORKER = [sys.executable, "-m", "autopar.run.worker"]


class Popen:
    """What ``Processes`` uses of ``subprocess.Popen``, for a rank that is a fork of its server."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[str], text: bool, env: Mapping[str, str]
    ) -> None:
        assert list(command) == _WORKER and stdin == stdout == PIPE and text
        self.server = _server(int(env["RANK"]) % 2)
        self.returncode: int | None = None
        theirs_in, mine_in = os.pipe()
        mine_out, theirs_out = os.pipe()
        self.stdin, self.stdout = os.fdopen(mine_in, "w"), os.fdopen(mine_out)
        start = {"env": dict(env), "folder": os.getcwd()}
        self.pid = self.server.ask(start, (theirs_in, theirs_out, stderr.fileno()))
        os.close(theirs_in)
        os.close(theirs_out)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, flags: int) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"pid": self.pid, "flags": flags})
        return self.returncode


class _Server:
    """The process that has imported everything, seen from the tests."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # programs may start in several threads of a test
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forked", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            )
        self.answers = self.socket.makefile("r")
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        data = json.dumps(request).encode() + b"\n"
        with self.lock:
            if descriptors:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                self.socket.sendmsg([b"+"], [rights])
            else:
                self.socket.sendall(b"-")
            self.socket.sendall(data)
            answer = self.answers.readline()
        assert answer, f"the server that forks workers ended with status {self.process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        self.answers.close()
        self.socket.close()  # which ends it
        self.process.wait()


_servers: dict[int, _Server] = {}
_STARTING = threading.Lock()


def _server(number: int) -> _Server:
    with _STARTING:
        if number not in _servers:
            _servers[number] = _Server()
        return _servers[number]


# -- in the server ----------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    compile_once()
    share_runtimes()
    for module in PRELOADED:
        importlib.import_module(module)
    folder.compile_sources(Path(trainer.__file__).parent)
    assert threading.active_count() == 1, "a fork has one thread, and would wait for what the others hold"
    gc.collect()
    gc.freeze()
    requests = connection.makefile("r")
    while True:
        kind, descriptors, *_ = socket.recv_fds(connection, 1, 3)
        if not kind:
            return
        request = json.loads(requests.readline())
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], request["flags"])
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                requests.close()  # otherwise the socket stays open here, and the tests wait for a server that has ended
                connection.close()
                _work(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _work(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be the worker; never returns."""
    from autopar.run import worker

    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        sys.path[:] = [request["folder"], *request["env"]["PYTHONPATH"].split(os.pathsep)]
        worker.main()
    except BaseException:  # as a Python of its own would say it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
