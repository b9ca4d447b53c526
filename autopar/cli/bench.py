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
    published: str | None,
    as_json: bool,
) -> None:
    """Measures, prints tables or one JSON object, and writes the files that were asked for."""
    if published is not None:
        _published(published, as_json)
        return
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
        plot([result.to_json() for result in results], Path(plot_file))
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


def _published(path: str, as_json: bool) -> None:
    """The automatic layout of every cell of ``path`` beside the best that was measured there."""
    from rich.console import Console
    from rich.table import Table

    from autopar.bench.published import CellResult, summary, to_json
    from autopar.bench.published import published as on_paper
    from autopar.cli.talk import Talk

    with Talk() as talk:
        cells = on_paper(path, lambda what, done, total: talk("bench", f"{what}: {done} of {total} cells"))
    if as_json:
        print(json.dumps(to_json(cells), indent=1))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("cell", "GPUs", "ran", "automatic", "measured", "best", "measured", "regret"):
        table.add_column(
            column, justify="left" if column in ("cell", "automatic", "best") else "right", overflow="fold"
        )

    def row(cell: CellResult) -> list[str]:
        mine = "failed" if cell.choice.measured_s is None else f"{cell.choice.measured_s:.3g} s"
        names = [choice.id.removeprefix(f"{cell.name}-") for choice in (cell.choice, cell.best)]
        ran, best = f"{cell.measured} of {cell.layouts}", f"{cell.best.measured_s:.3g} s"
        return [cell.name, str(cell.devices), ran, names[0], mine, names[1], best, f"{cell.regret:.1%}"]

    for cell in cells:
        table.add_row(*row(cell))
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=150)
    console.print(table)
    found = summary(cells)
    if found["cells"]:
        worst = f"{found['worst_regret']:.1%} at worst"
        console.print(f"regret {found['mean_regret']:.1%} on average, {worst}; {found['failed']} choices failed")
