"""Finds the source lines that issue an operation."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType

_SKIPPED = (
    "/torch/",
    "/spmd_types/",
    "/checks/nccl/",
    "/torch_private.py",
    "<frozen",
    "/contextlib.py",
    "/functools.py",
    "<string>",
    "/threading.py",
)


@functools.lru_cache(maxsize=4096)
def _is_skipped(file: str) -> bool:
    return any(part in file for part in _SKIPPED)


@functools.lru_cache(maxsize=4096)
def _file_name(file: str) -> str:
    return Path(file).name


def place(depth: int = 3) -> str:
    """Return the innermost ``depth`` frames outside of torch and the recorder, each as ``file:line in function``."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if not _is_skipped(code.co_filename):
            found.append(f"{_file_name(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", ".join(found)
