"""Files of results: one JSON line per case, each with a fingerprint of the code that it is of; the last line of a case counts.

A report does the cases that its file lacks for today's code, appends every result at once, so that it can be interrupted, and in the end
leaves one line for each case in the order of the cases.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import functools
import hashlib
import json
import re
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from places import ROOT, TESTS

Line = dict[str, Any]

ELSEWHERE = ("bench", "explain", "profile", "report", "sweep", "timing", "trainers", "tune", "validate", "zoo")
"""Packages of autopar that neither make nor run a program of a given plan."""


@functools.cache
def fingerprint() -> str:
    """Of the code that makes and runs the program of a given plan. Comments, docstrings and layout don't count."""
    digest = hashlib.sha256()
    for folder in ("autopar", "passes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).parts[1] in ELSEWHERE:
                continue
            digest.update(f"{path.relative_to(ROOT)}\n{without_docstrings(path.read_text())}\n".encode())
    digest.update(without_docstrings((TESTS / "models" / "exactness.py").read_text()).encode())
    return digest.hexdigest()[:12]


def without_docstrings(code: str) -> str:
    """A Python file's syntax tree as text, without comments and docstrings: those of attributes, too."""
    return ast.dump(_WithoutDocstrings().visit(ast.parse(code)))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else node


@dataclass(frozen=True)
class Results:
    """A file of results. ``key`` are the fields of a line that name its case; ``passed`` says whether a line is as it should be."""

    path: Path
    key: tuple[str, ...]
    passed: Callable[[Line], bool]

    def case_of(self, line: Line) -> tuple[str, ...]:
        return tuple(line[field] for field in self.key)

    def read(self) -> dict[tuple[str, ...], Line]:
        """The last line of every case."""
        lines = [json.loads(text) for text in self.path.read_text().splitlines()] if self.path.exists() else []
        return {self.case_of(line): line for line in lines}

    def kept(self, args: argparse.Namespace) -> set[tuple[str, ...]]:
        """The cases that need not be done again, by the ``options``."""
        if args.fresh:
            return set()
        return {
            case
            for case, line in self.read().items()
            if self.passed(line) and (args.keep or line.get("code") == fingerprint())
        }

    def append(self, line: Line) -> None:
        with self._locked(), self.path.open("a") as file:
            file.write(json.dumps({"code": fingerprint()} | line) + "\n")

    def tidy(self, order: Iterable[tuple[str, ...]]) -> list[Line]:
        """Keep the last line of each case of ``order``, in its order; the lines."""
        with self._locked():
            found = self.read()
            lines = [found[case] for case in order if case in found]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return lines

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Parts of a report that run at a time take turns at the file."""
        name = f"autopar-results-{hashlib.sha256(str(self.path).encode()).hexdigest()[:12]}"
        with Path(tempfile.gettempdir(), name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def options(about: str | None, results: Path | None) -> argparse.ArgumentParser:
    """A report's parser with the options that all of these reports have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--fresh", action="store_true", help="do every case anew")
    parser.add_argument("--keep", action="store_true", help="keep what passed, whatever code it was of")
    return parser


def available_bytes() -> int:
    """The memory that this machine could give to new processes."""
    return int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024


def quiet() -> None:
    """What libraries say at every capture is not about the cases."""
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises ``TimeoutError`` in what takes longer."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
