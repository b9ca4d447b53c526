"""Prints the output of commands: tables to stdout, the running stage and its progress to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from autopar.errors import UsageError


def console(width: int = 120) -> Console:
    """Return a console for stdout; ``width`` applies if stdout is a file or a pipe and ``COLUMNS`` isn't set."""
    out = Console(highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=width)


class PlainTable(Table):
    """A table without lines that never truncates numbers: if it is too wide, it is split into several tables that repeat the first column.

    Numbers (``justify="right"``) stay on one line; other columns may wrap.
    """

    def add_column(self, header: RenderableType = "", *args: Any, **options: Any) -> None:
        options["no_wrap"] = bool(options.get("no_wrap")) or options.get("justify") == "right"
        super().add_column(header, *args, **options)

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> RenderResult:
        widths = [self._min_width(out, column) for column in self.columns]
        for number, part in enumerate(_split_columns(widths, options.max_width, self.padding[1])):
            if number:
                yield ""
            if len(part) == len(widths):
                yield from super().__rich_console__(out, options)
                return
            table = Table(title=None if number else self.title, **_PLAIN, show_header=self.show_header)
            for index in part:
                column = self.columns[index]
                no_wrap = column.no_wrap and index > 0
                overflow = column.overflow if no_wrap else "fold"
                table.add_column(column.header, justify=column.justify, no_wrap=no_wrap, overflow=overflow)
            rows = zip(*(self.columns[index].cells for index in part), strict=True)
            for row in rows:
                table.add_row(*row)
            yield from table.__rich_console__(out, options)

    @staticmethod
    def _min_width(out: Console, column: Column) -> int:
        """Return the width of a column's widest cell, or at most ``_WRAPPED_WIDTH`` if the column wraps."""
        unlimited = out.options.update(max_width=10_000)
        cells = [column.header, *column.cells]
        widest = max(Measurement.get(out, unlimited, cell).maximum for cell in cells)
        return widest if column.no_wrap else min(widest, _WRAPPED_WIDTH)


_WRAPPED_WIDTH = 16
_PLAIN: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "box": None,
    "pad_edge": False,
    "padding": (0, 2, 0, 0),
}


def _split_columns(widths: list[int], max_width: int, gap: int) -> Iterator[list[int]]:
    """Yield the column indices of each part. Every part has column 0, and as many others as ``max_width`` allows."""
    part, used = [0], widths[0] if widths else 0
    for index in range(1, len(widths)):
        if used + gap + widths[index] > max_width and len(part) > 1:
            yield part
            part, used = [0], widths[0]
        part.append(index)
        used += gap + widths[index]
    if widths:
        yield part


def plain_table(
    title: str | None = None,
    words: Sequence[str] = (),
    numbers: Sequence[str] = (),
    texts: Sequence[str] = (),
    **options: Any,
) -> PlainTable:
    """Return a table without lines, two spaces between its columns; ``options`` are those of ``rich.table.Table``.

    ``words``, ``numbers`` and ``texts`` are the headers of its columns, in this order. Only ``texts`` wrap.
    """
    table = PlainTable(title=title, **_PLAIN, **options)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    for name in texts:
        table.add_column(name, overflow="fold")
    return table


@contextmanager
def progress_bar(name: str, total: int | None = None, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr; yield a function that updates the bar: (name of the current item, items done, total).

    With ``lines`` the function prints a line per item instead, if stderr isn't a terminal.
    """
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=lines and not stderr.is_terminal) as bar:
        task = bar.add_task(name, total=total)

        def update(item: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {item}", completed=done, total=total)
            if item and lines and not stderr.is_terminal:
                stderr.print(f"{item} ...", highlight=False, markup=False)

        yield update


class Messages:
    """A context that reports progress on stderr: a call with (stage, text) updates the status line of a terminal.

    In a log file or a pipe each stage prints a line when it begins. What the model's code prints goes to stderr: stdout is only for
    the result.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._status = self.console.status("") if self.console.is_terminal else None
        self._stage = ""
        self._redirected = redirect_stdout(sys.stderr)

    def __enter__(self) -> Messages:
        self._redirected.__enter__()
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._status is not None:
            self._status.stop()
        self._redirected.__exit__(*exception)

    def __call__(self, stage: str, text: str = "") -> None:
        if self._status is not None:
            self._status.update(f"[bold]{stage}[/bold] {escape(text)}")
        elif stage != self._stage:
            self.console.print(f"{stage} ...", highlight=False)
        self._stage = stage

    def step(self, stage: str, text: str) -> None:
        """Report one of a stage's few long steps, which has a line of its own in a log file or a pipe, too."""
        if self._status is None:
            self.console.print(f"{stage}: {text} ...", highlight=False, markup=False, soft_wrap=True)
            self._stage = stage
        self(stage, text)

    def say(self, text: str) -> None:
        """Print a message without wrapping, so that commands in it can be copied."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def output_file(name: str | Path, option: str, picture: bool = False) -> Path:
    """Return ``name``, the value of ``option``, as a path that can be written. Commands call this before they start to work.

    Raises ``UsageError`` if the file can't be written, or, with ``picture``, if its suffix isn't that of a picture format.
    """
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder, not a file", f"give {option} the name of a file")
    if picture and path.suffix.lower() not in _PICTURE_SUFFIXES:
        raise UsageError(
            f"{option} {path} has no suffix of a picture format", f"use one of {', '.join(_PICTURE_SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written: there is no folder {path.parent}", "make the folder first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: no permission", "choose another place")
    return path


def show(as_json: bool, data: Any, *parts: RenderableType, width: int = 120) -> None:
    """Print a command's result on stdout: ``data`` as JSON, or ``parts`` for people."""
    if as_json:
        print(json.dumps(data, indent=1))
        return
    out = console(width)
    for part in parts:
        out.print(part, markup=False, soft_wrap=isinstance(part, str))
