"""Checks of where results go, made before the work begins rather than after an hour of measurements."""

from __future__ import annotations

import json
import os
from pathlib import Path

from autopar.errors import UsageError

_PICTURES = (".png", ".svg", ".pdf")


def output_file(name: str | Path, option: str, picture: bool = False) -> Path:
    """The file ``name`` that ``option`` gave.

    Raises:
        UsageError: the file cannot be written, or with ``picture`` its ending names no format of pictures.
    """
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder, and the result is a file", f"give {option} the name of a file")
    if picture and path.suffix.lower() not in _PICTURES:
        raise UsageError(
            f"{option} {path} is not the name of a picture", f"give a name that ends in one of {', '.join(_PICTURES)}"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written: there is no folder {path.parent}", "make the folder first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: no permission", "choose another place")
    return path


def print_file(path: Path, as_json: bool) -> None:
    """Print the path of a result, or an object with it."""
    print(json.dumps({"file": str(path)}) if as_json else path)
