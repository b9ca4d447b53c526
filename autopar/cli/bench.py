"""``autopar bench``."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from autopar.bench import MODELS, contest
from autopar.bench.contest import Result
from autopar.bench.report import plot, table, verdict, write_lines
from autopar.errors import UsageError


def bench_command(
    names: tuple[str, ...],
    processes: int,
    rounds: int,
    steps: int,
    seed: int,
    calibration: str | None,
    output: str | None,
    plot_file: str | None,
    as_json: bool,
) -> None:
    """Measures, prints tables or one JSON object, and writes the files that were asked for."""
    for name in names:
        if name not in MODELS:
            near = difflib.get_close_matches(name, MODELS, n=1)
            raise UsageError(
                f"the benchmark has no model {name!r}",
                f"did you mean {near[0]}?" if near else f"it has {', '.join(MODELS)}",
            )
    results = [_contest(name, processes, rounds, steps, seed, calibration) for name in names or MODELS]
    if output:
        write_lines(results, Path(output))
    if plot_file:
        plot(results, Path(plot_file))
    if as_json:
        print(json.dumps({"models": [result.to_json() for result in results]}, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    for result in results:
        console.print(table(result))
        console.print(verdict(result), soft_wrap=True)
        console.print()


def _contest(name: str, processes: int, rounds: int, steps: int, seed: int, calibration: str | None) -> Result:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)

        return contest(name, processes, rounds=rounds, steps=steps, seed=seed, calibration=calibration, progress=show)
