"""Checks of where results go, made before the work begins rather than after an hour of measurements."""

from __future__ import annotations

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
            f"{option} {path} has no ending that pictures have", f"end it in one of {', '.join(_PICTURES)}"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written: there is no folder {path.parent}", "make the folder first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: no permission", "choose another place")
    return path


def output_folder(name: str) -> Path:
    """The folder to emit into: new, empty, or one that an earlier emission filled.

    Raises:
        UsageError: the folder is a file, contains other files, or cannot be written into.
    """
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{name} is a file, and the program is a folder", "give -o a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "plan.json").is_file():
        raise UsageError(f"{name} holds other files than a program", "give -o a new or an empty folder")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        reason = "no permission" if there.is_dir() else f"{there} is a file"
        raise UsageError(f"{name} cannot be made: {reason}", "give -o a folder that can be made and written to")
    return folder
