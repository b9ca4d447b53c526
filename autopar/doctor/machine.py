"""Checks this machine: cores, memory, ports, folders, GPUs, and the calibration."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.devices import calibration, hardware
from autopar.doctor.findings import ABSENT, BROKEN, OK, WARNING, Finding
from autopar.errors import DeviceError
from autopar.memory import available_memory_bytes, machine_memory_bytes
from autopar.units import size

PART, GPUS = "machine", "GPUs"
_LOW_MEMORY_BYTES = 4 * 10**9
_SHARED_BYTES = 10**9  # shared memory for NCCL and for data loader workers; a container's default is 64 MiB
PORTS = {29500: "torchrun", 29400: "`autopar run --elastic`"}
"""Default ports, and the programs that use them."""


def machine() -> Iterator[Finding]:
    cores = calibration.this_machine()["cores"]
    yield Finding(PART, "cores", OK, f"{cores} available to this process", figures={"cores": cores})
    yield _memory()
    yield _temporary_folder()
    yield _local_ports()
    for port, user in PORTS.items():
        free = _is_free(port)
        value = "free" if free else f"in use (the default port of {user})"
        option = "--meet HOST:PORT" if port == 29400 else "torchrun --master-port PORT"
        yield Finding(
            PART,
            f"port {port}",
            OK if free else WARNING,
            value,
            "" if free else f"choose another port: {option}",
            {"port": port, "free": free},
        )
    yield _calibration()


def _memory() -> Finding:
    total, free = machine_memory_bytes(), available_memory_bytes()
    is_low = free < _LOW_MEMORY_BYTES
    hint = (
        "planning a large model takes up to several GB: end other programs, or use a larger machine" if is_low else ""
    )
    figures = {"total_bytes": total, "available_bytes": free}
    return Finding(PART, "memory", WARNING if is_low else OK, f"{size(free)} free of {size(total)}", hint, figures)


def _temporary_folder() -> Finding:
    try:
        with tempfile.NamedTemporaryFile(prefix="autopar-") as file:
            file.write(b"autopar")
            file.flush()
        free = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        value = f"cannot be written: {error.strerror or error}"
        return Finding(PART, "folder for programs", BROKEN, value, "set TMPDIR to a writable folder with free space")
    return Finding(
        PART,
        "folder for programs",
        OK,
        f"{tempfile.gettempdir()}, {size(free)} free",
        figures={"free_bytes": free},
    )


def _local_ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
    except OSError as error:
        value = f"cannot listen on 127.0.0.1: {error.strerror or error}"
        return Finding(
            PART, "local ports", BROKEN, value, "processes connect over 127.0.0.1: allow that (sandbox, loopback)"
        )
    return Finding(PART, "local ports", OK, "127.0.0.1 has free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _calibration() -> Finding:
    path, hint = calibration.default_path(), "`autopar profile` measures this machine (under two minutes)"
    name, unmeasured = "calibration", "plans for this machine's devices are priced with default figures"
    if path is None or not path.is_file():
        where = f"{calibration.VARIABLE} is empty" if path is None and calibration.VARIABLE in os.environ else "none"
        return Finding(PART, name, ABSENT, f"{where}: {unmeasured}", hint)
    try:
        found = calibration.read(path)
    except DeviceError as error:
        return Finding(PART, name, WARNING, error.message, error.hint or hint)
    if other := calibration.machine_mismatch(found):
        return Finding(PART, name, WARNING, f"{path} {other}", hint)
    counts = {device: found.processes(device) for device in ("cpu", "cuda")}
    value = ", ".join(f"{'/'.join(map(str, n))} x {device}" for device, n in counts.items() if n)
    return Finding(PART, name, OK, f"{value}, {found.measured_at}", figures={"path": str(path), "processes": counts})


def gpus(torch: Any) -> Iterator[Finding]:
    """Check each CUDA device (memory, capability, kind), NCCL, and the shared memory that NCCL needs. ``torch`` is the module."""
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        value = "no CUDA device: you can plan for remote GPUs; programs run on the CPU"
        if driver is None:
            yield Finding(GPUS, "CUDA", ABSENT, value)
            return
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        hint = "install the torch build for this driver (https://pytorch.org/get-started/locally); `nvidia-smi` shows the driver"
        yield Finding(
            GPUS, "CUDA", WARNING, f"found {driver}, but torch {torch.__version__} {build} and sees no GPU", hint
        )
        return
    built = set(torch.cuda.get_arch_list())
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index, built)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    yield Finding(
        GPUS,
        "NCCL",
        OK if nccl else WARNING,
        nccl or "not in this build of torch; programs on several GPUs need it",
        "" if nccl else "install a torch build with NCCL",
    )
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else _SHARED_BYTES
    if shared < _SHARED_BYTES:
        hint = "give the container more: `docker run --ipc=host` or `--shm-size=8g`"
        yield Finding(GPUS, "shared memory", WARNING, f"/dev/shm has {size(shared)} free; NCCL needs more", hint)


def _gpu(torch: Any, index: int, built: set[str]) -> Finding:
    seen = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    value = f"{seen.name}, {size(total)} ({size(free)} free), capability {seen.major}.{seen.minor}"
    figures = {"name": seen.name, "memory_bytes": total, "free_bytes": free, "capability": [seen.major, seen.minor]}
    name = f"cuda:{index}"
    if built and not any(re.fullmatch(rf"(sm|compute)_{seen.major}\d+[af]?", one) for one in built):
        hint = "install a torch build that has kernels for this GPU (https://pytorch.org/get-started/locally)"
        return Finding(GPUS, name, WARNING, f"{value}: torch has kernels for {', '.join(sorted(built))}", hint, figures)
    try:
        kind = hardware.match_device(seen.name, total)
    except DeviceError as error:
        return Finding(GPUS, name, WARNING, f"{value}: not a known kind", error.hint or "", figures | {"kind": None})
    return Finding(GPUS, name, OK, f"{value}: planned as {kind}", figures=figures | {"kind": kind})
