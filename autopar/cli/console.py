"""What commands print: tables to stdout, and to stderr, while a command works, the running stage and its progress."""

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
    """The console of stdout; ``width`` is the number of columns where stdout is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=width)


def plain_table(title: str | None = None, **options: Any) -> Table:
    """A table without lines, two spaces between its columns; ``options`` are those of ``rich.table.Table``."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0), **options
    )


@contextmanager
def progress_bar(name: str, total: int | None = None, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr until the block ends. The block calls the result with (what is being done, done so far, total).

    Where stderr is no terminal, ``lines`` prints a line for everything that is done.
    """
    to = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=to, transient=True, disable=lines and not to.is_terminal) as bar:
        task = bar.add_task(name, total=total)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)
            if what and lines and not to.is_terminal:
                to.print(f"{what} ...", highlight=False, markup=False)

        yield show


class Messages:
    """A context in which calling the object with (stage, text) reports progress, on one moving line where there is a terminal.

    Elsewhere (a log file, a pipe) each stage prints one line when it begins. Output of the model's own code goes to stderr meanwhile:
    stdout is for the result only.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        self._redirected.__exit__(kind, error, trace)

    def __call__(self, stage: str, text: str = "") -> None:
        if self._status is not None:
            self._status.update(f"[bold]{stage}[/bold] {text}")
        elif stage != self._stage:
            self.console.print(f"{stage} ...", highlight=False)
        self._stage = stage
