"""What the commands say on stderr while they work: the stage that is running, and its news."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from types import TracebackType

from rich.console import Console


class Talk:
    """A context in which calling the object with (stage, text) reports progress, on one moving line where there is a terminal.

    Elsewhere (a log file, a pipe) each stage is a line, when it begins. What the model's own code prints meanwhile goes to stderr
    as well: stdout is for the result alone.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._status = self.console.status("") if self.console.is_terminal else None
        self._stage = ""
        self._aside = redirect_stdout(sys.stderr)

    def __enter__(self) -> Talk:
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
