"""Where the commands' words go: tables to stdout; to stderr, while they work, the stage that is running and its news."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def console(width: int = 120) -> Console:
    """stdout; ``width`` is the columns that tables have where it is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=width)


def plain_table(title: str | None = None, **options: Any) -> Table:
    """A table without lines, two spaces between its columns; ``options`` are those of ``rich.table.Table``."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0), **options
    )


@contextmanager
def progress_bar(name: str, total: int | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr until the block ends; what it gives is told (what is done now, how much is done, of how much)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)

        yield show


class Messages:
    """A context in which calling the object with (stage, text) reports progress, on one moving line where there is a terminal.

    Elsewhere (a log file, a pipe) each stage is a line, when it begins. What the model's own code prints meanwhile goes to stderr
    as well: stdout is for the result alone.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._status = self.console.status("") if self.console.is_terminal else None
        self._stage = ""
        self._aside = redirect_stdout(sys.stderr)

    def __enter__(self) -> Messages:
        self._aside.__enter__()
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        self._aside.__exit__(kind, error, trace)

    def __call__(self, stage: str, text: str = "") -> None:
        if self._status is not None:
            self._status.update(f"[bold]{stage}[/bold] {text}")
        elif stage != self._stage:
            self.console.print(f"{stage} ...", highlight=False)
        self._stage = stage
