"""Converts exceptions of user and library code during capture to ``CaptureError`` with the user's source line.

``torch.export`` runs the model's code, which may call any library; deep copies and comparisons of the model's attributes run methods of
the user's classes; and graph passes run torch's ops. autopar's exceptions and ``MemoryError`` are not converted.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from torch import fx, nn

import passes
from autopar.capture.backward import TORCH
from autopar.errors import OPAQUE_HINT, AutoparError, CaptureError
from autopar.ops.source import source_line

_NOT_USER_CODE = (TORCH, str(Path(__file__).parents[1]), *passes.__path__, "<")
_STANDARD = sysconfig.get_path("stdlib")
HINT = f"check that the model runs on this batch without autopar; if it does, {OPAQUE_HINT}"


@contextmanager
def errors_as_capture_errors(model: nn.Module) -> Iterator[None]:
    """Convert exceptions other than autopar's to ``CaptureError``."""
    try:
        yield
    except (AutoparError, MemoryError):
        raise
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        what = f"{type(error).__name__}{': ' if text else ''}{text}"
        where = user_line(error) or _line_of_node(error.__traceback__) or f"the model {type(model).__name__}"
        raise CaptureError(f"capture failed on {where}: {what}", hint=HINT) from error


def user_line(error: Exception) -> str:
    """Return the innermost line of the traceback outside of torch, autopar and the standard library, or an empty string."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    if not frames:
        return ""
    return f"{frames[-1].filename}:{frames[-1].lineno}" + (f" `{frames[-1].line}`" if frames[-1].line else "")


def _is_user_file(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "-packages" not in file.removeprefix(_STANDARD)
    return not standard and not file.startswith(_NOT_USER_CODE)


def _line_of_node(trace: TracebackType | None) -> str:
    """Return the user's source line of the node that a graph pass was processing, or an empty string."""
    line_of_node = ""
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        if isinstance(node, fx.Node) and (line := source_line(node).strip()):
            line_of_node = " ".join(line.split())
        trace = trace.tb_next
    return line_of_node
