"""Runs a folder's ``train.py`` on this machine under ``torchrun``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.errors import LaunchError
from autopar.program.watch import is_consequence
from autopar.run.processes import check_count


def torchrun(folder: Path, processes: int, options: Sequence[str], *, port: int, env: Mapping[str, str]) -> None:
    """Run ``train.py`` with ``options`` in ``processes`` processes; ``port`` is that of their rendezvous (0: any free one).

    Raises ``LaunchError`` with the first failing rank's error, or if the port is taken; ``UsageError`` if there are too many processes.
    """
    check_count(processes)
    rendezvous = ["--standalone"]
    if port:
        _check_port(port)
        rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *rendezvous]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # a folder with custom ops or opaque modules imports the modules that define them, which are on this process's path
    imports = bool(json.loads((folder / "plan.json").read_text()).get("imports"))
    path = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)} if imports else {}
    status, error = _stream([*command, str(folder / "train.py"), *options], {**os.environ, **threads, **path, **env})
    if status != 0:
        raise LaunchError(f"train.py ended with status {status}: {error}", "see the output above")


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on 127.0.0.1 is already taken", "choose another port, or 0 for any that is free"
            ) from error


def _stream(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run a command, forwarding its standard error; return its exit status and the line that names the first cause.

    At Ctrl-C torchrun is asked to end, and awaited: it passes the signal on to its ranks, which may write a checkpoint. A second Ctrl-C
    kills it.
    """
    errors: list[str] = []
    with subprocess.Popen(command, env=dict(env), stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            try:
                status = _forward(process, errors)
            except KeyboardInterrupt:
                process.terminate()
                _forward(process, errors)
                raise
        finally:
            process.kill()
    causes = [line for line in errors if not is_consequence(line)] or errors
    return status, causes[0] if causes else "no error was printed"


def _forward(process: subprocess.Popen[str], errors: list[str]) -> int:
    """Forward a process's standard error until it ends, and return its exit status; add the lines that name errors to ``errors``."""
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)
        match = re.match(
            r"(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*|(?:train.py: )?error: .*)", line
        )
        if match:
            errors.append(match[1].strip())
    return process.wait()
