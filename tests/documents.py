"""Commands and snippets of the documents, as programs: ``test_documents.py`` runs them.

A fenced block of ``console``, ``bash`` or ``python`` is run by the slow tests, unless a comment on the line above it says otherwise::

    <!-- fast -->              it is run by the default suite, too
    <!-- not run: REASON -->   it cannot be run here
    <!-- ends with 1 -->       its commands end with status 1, as those do that print an error
    <!-- file: NAME -->        it is the content of a file that later blocks use

A page's blocks run in one folder, in their order. What follows a command in its block is its output: the same lines in the same order,
with lines left out where the page leaves them out; ``...`` is any text. Numbers may differ in their last digits, times of the run itself by
any amount.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from places import ROOT

LANGUAGES = ("console", "bash", "python")
TOLERANCE = 2e-3  # of a printed number: a unit of its last digits
_NUMBER = re.compile(r"\d[\d,]*\.?\d*")
_OWN_TIMES = ("planned in ", "float64 (compared in")


@dataclass(frozen=True)
class Block:
    """``mark`` is the comment above it."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("not run: ")

    @property
    def fast(self) -> bool:
        return self.mark == "fast" or self.mark.startswith("file: ")


def blocks(path: Path) -> Iterator[Block]:
    """The blocks of a document that are commands or Python."""
    lines = path.read_text().splitlines()
    page, start = str(path.relative_to(ROOT)), None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```") and line != "```":
            start = number
        elif start is not None and line == "```":
            mark = re.fullmatch(r"<!-- (.*) -->", lines[start - 1]) if start else None
            language, body = lines[start][3:], "\n".join(lines[start + 1 : number])
            if language in LANGUAGES:
                yield Block(page, start + 1, language, mark[1] if mark else "", body + "\n")
            start = None
    assert start is None, f"{page}: the block of line {start} does not end"


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block with the lines that it prints."""
    command, output = "", []
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        if line.startswith("$ "):
            if command:
                yield command, output
            command, output = line[2:], []
        else:
            assert command, f"{block.name} begins with no command"
            output.append(line)
    yield command, output


def run(block: Block, namespace: dict[str, Any], own_process: bool) -> None:
    """Runs a block in the working directory; ``own_process`` runs autopar as it is used, otherwise in this process, which is faster."""
    if block.mark.startswith("file: "):
        Path(block.mark[len("file: ") :]).write_text(block.text)
    elif block.language == "python":
        exec(compile(block.text, block.name, "exec"), namespace)
    else:
        for command, expected in commands(block):
            status, found = _command(block, command, own_process)
            refused = block.mark == "ends with 1" or any(line.startswith("error: ") for line in expected)
            assert (status != 0) == refused, f"{block.name}: {command} ends with {status}:\n{found}"
            compare(block, expected, found)


_WIDE = {"COLUMNS": "160"}  # pages show tables that are not in parts


def _command(block: Block, command: str, own_process: bool) -> tuple[int, str]:
    words = shlex.split(command, comments=True)
    words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "autopar" and not own_process:
        return _here(arguments)
    module = {"autopar": "autopar", "torchrun": "torch.distributed.run"}.get(program)
    assert module is not None, f"{block.name}: {program} is not a program that a page may call; say why it is not run"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **_WIDE, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.getcwd()])},
    )
    if target is not None:
        Path(target).write_text(found.stdout)
    return found.returncode, found.stdout + found.stderr


def _here(arguments: list[str]) -> tuple[int, str]:
    """``autopar`` in this process."""
    from autopar.cli.app import cli

    text = io.StringIO()
    with mock.patch.dict(os.environ, _WIDE), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = cli.main(arguments, prog_name="autopar", standalone_mode=False)
    return (status if isinstance(status, int) else 0), text.getvalue()


def compare(block: Block, expected: list[str], found: str) -> None:
    """Raises ``AssertionError`` unless the printed lines contain the expected ones in their order."""
    printed = iter(found.splitlines())
    for line in filter(None, map(str.strip, expected)):
        if not any(alike(line, other.strip()) for other in printed):
            raise AssertionError(
                f"{block.name} shows a line that is not printed, or not in this place:\n{line}\nof\n{found}"
            )


def alike(expected: str, found: str) -> bool:
    """Whether a line of a page is the printed one."""
    for times in _OWN_TIMES:
        if expected.startswith(times):
            return found.startswith(times)
    shown, _, open_end = expected.partition("...") if expected.endswith("...") else (expected, "", "")
    if expected.endswith("..."):
        found = found[: len(shown)]
    words, others = _NUMBER.split(shown), _NUMBER.split(found)
    numbers, seen = ([float(n.replace(",", "")) for n in _NUMBER.findall(text)] for text in (shown, found))
    return [" ".join(w.split()) for w in words] == [" ".join(w.split()) for w in others] and seen == pytest.approx(
        numbers, rel=TOLERANCE
    )
