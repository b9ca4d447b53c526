"""Presents the result of a contest as a table, as JSON lines and as a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from autopar.bench.contest import AUTOMATIC, Contender, ContestResult
from autopar.picture import pyplot, save


def table(result: ContestResult, make: Callable[[str], Any]) -> Any:
    """Fill and return the empty table ``make(title)``: a row for the automatic program, then one per hand-tuned program, fastest first."""
    made = make(f"{result.name} on {result.processes} processes")
    made.add_column("program", no_wrap=True)
    for name in ("ms a step", "fastest to slowest round", "predicted", "tokens/s", "automatic is"):
        made.add_column(name, justify="right", no_wrap=True)
    ran = [contender for contender in result.hand_tuned if contender.rounds_s]
    for contender in (result.automatic, *sorted(ran, key=lambda c: c.step_s)):
        made.add_row(*_row(result, contender))
    return made


def failures(result: ContestResult) -> list[str]:
    """Return a line for every program that failed, with the first line of its error."""
    return [f"{c.name} did not run: {c.error.partition(chr(10))[0]}" for c in result.hand_tuned if not c.rounds_s]


def verdict(result: ContestResult) -> str:
    """Return a sentence with the step time of the automatic program, divided by that of the best hand-tuned one."""
    low, high = result.ratio_interval
    return (
        f"automatic / best hand-tuned ({result.best}) = {result.ratio:.2f}, 95 % interval {low:.2f} to {high:.2f}, "
        f"{len(result.hand_tuned)} hand-tuned candidates"
    )


def write_lines(results: Iterable[ContestResult], path: Path) -> None:
    """Write each result as one line of JSON."""
    path.write_text("".join(json.dumps(result.to_json()) + "\n" for result in results))


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the measured step times of contests (``ContestResult.to_json``) as bars, one panel per contest."""
    figure, panels = pyplot().subplots(len(lines), 1, figsize=(8, 3.2 * len(lines)), squeeze=False)
    for panel, line in zip(panels[:, 0], lines, strict=True):
        running = [(statistics.median(c["rounds_s"]) * 1e3, c["name"]) for c in line["contenders"] if c["rounds_s"]]
        running = sorted(running)[:12]
        colours = ["tab:orange" if name == AUTOMATIC else "tab:blue" for _, name in running]
        panel.barh([name for _, name in running], [step_ms for step_ms, _ in running], color=colours)
        panel.invert_yaxis()
        panel.set_xlabel("measured step time (ms)")
        panel.set_title(f"{line['name']}, {line['processes']} processes", loc="left")
    save(figure, path)


def _row(result: ContestResult, contender: Contender) -> tuple[str, ...]:
    step_s = contender.step_s
    predicted = "-" if contender.predicted_s is None else f"{contender.predicted_s * 1e3:.1f}"
    share = "" if contender.name == AUTOMATIC else f"{result.automatic.step_s / step_s:.2f} of it"
    spread = f"{min(contender.rounds_s) * 1e3:.1f} to {max(contender.rounds_s) * 1e3:.1f}"
    return contender.name, f"{step_s * 1e3:.1f}", spread, predicted, f"{result.tokens / step_s:,.0f}", share
