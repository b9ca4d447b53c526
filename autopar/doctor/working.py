"""Trial runs on this machine: an all-reduce between processes (gloo, NCCL), and ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from autopar.doctor.findings import BROKEN, OK, WARNING, Finding
from autopar.errors import LaunchError
from autopar.run.pool import START_S, WorkerPool
from autopar.run.processes import Processes

PART = "works"
_TIMEOUT_S = 120.0
_TOLERANCE = 1e-3


def gloo() -> Finding:
    """Check an all-reduce between two processes over 127.0.0.1."""
    try:
        with WorkerPool(2) as pool:
            sums = pool.run("autopar.doctor.remote:sum_of_ranks", "cpu")
    except LaunchError as error:
        hint = error.hint or "two processes of this machine must be able to connect over 127.0.0.1"
        return Finding(PART, "gloo", BROKEN, f"all-reduce over 2 processes failed: {error.message}", hint)
    if sums != [3.0, 3.0]:
        return Finding(
            PART, "gloo", BROKEN, f"all-reduce over 2 processes returned {sums}, not [3.0, 3.0]", "reinstall torch"
        )
    return Finding(PART, "gloo", OK, "all-reduce over loopback works", figures={"processes": 2})


def nccl() -> Finding:
    """Check an all-reduce over all GPUs, with one process per GPU."""
    count = torch.cuda.device_count()
    workers = Processes(count)
    try:
        workers.call("autopar.run.remote:join", "cuda", _TIMEOUT_S, timeout_s=START_S)
        sums = workers.call("autopar.doctor.remote:sum_of_ranks", "cuda", timeout_s=_TIMEOUT_S)
    except LaunchError as error:
        hint = (
            "NCCL_P2P_DISABLE=1 tells whether direct access between GPUs is at fault; a container needs shared memory"
        )
        return Finding(PART, "nccl", WARNING, f"all-reduce over {count} GPUs failed: {error.message}", hint)
    finally:
        workers.close()
    expected = [count * (count + 1) / 2] * count
    right = sums == expected
    works = f"all-reduce works on {count} GPU{'s' if count > 1 else ''}"
    value = works if right else f"all-reduce over {count} GPUs returned {sums}, not {expected}"
    hint = "" if right else "NCCL_P2P_DISABLE=1 tells whether direct access between GPUs is at fault (ACS in the BIOS)"
    return Finding(PART, "nccl", OK if right else WARNING, value, hint, {"processes": count})


def compiler() -> Finding:
    """Check ``torch.compile`` on a small function, in a separate process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hint = "install a C++ compiler (`apt-get install g++`) and Python's headers, or run with --pin compile=none"
    workers = Processes(1)
    try:
        (error,) = workers.call("autopar.doctor.remote:compiled", device, timeout_s=_TIMEOUT_S + START_S)
    except LaunchError as failure:
        return Finding(PART, "torch.compile", WARNING, " ".join(failure.message.split("\n")[:2]), hint)
    finally:
        workers.close()
    good = error < _TOLERANCE
    value = f"compiled a function for {device}" if good else f"a compiled function is off by {error:.2g}"
    return Finding(PART, "torch.compile", OK if good else WARNING, value, "" if good else hint)


def working(tell: Callable[[str], None]) -> Iterator[Finding]:
    """Yield the finding of every trial; ``tell`` is called with each trial's name before it runs."""
    tell("gloo: an all-reduce of 2 processes")
    yield gloo()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        tell("nccl: an all-reduce of all GPUs")
        yield nccl()
    tell("torch.compile")
    yield compiler()
