"""Folders of the checkout that tests and reports read and write."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
EVIDENCE = DOCS / "evidence"
GROUNDTRUTH = EVIDENCE / "groundtruth"
