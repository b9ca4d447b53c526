"""Folders of the checkout that tests and reports read and write."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
EVIDENCE = DOCS / "evidence"
GROUNDTRUTH = EVIDENCE / "groundtruth"


def file_of(program: Path, name: str) -> Path:
    """A file of an emitted program: ``model.py``, ``train.py`` and data are in its folder, other modules in its runtime."""
    return (
        program / name if name in ("model.py", "train.py") or not name.endswith(".py") else program / "runtime" / name
    )
