"""``autopar bench`` measures automatic programs against hand-written ones."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from autopar.bench import MODELS, contest
from autopar.bench.contest import ContestResult
from autopar.bench.published import CellResult, published, summary, to_json
from autopar.bench.report import failures, plot, table, verdict, write_lines
from autopar.cli.console import Messages, output_file, plain_table, progress_bar, show
from autopar.devices import parse
from autopar.errors import UsageError
from autopar.picture import pyplot


@dataclass(frozen=True, slots=True)
class Measurement:
    """The options of ``autopar bench`` that a measurement reads."""

    processes: int
    rounds: int
    steps: int
    seed: int
    calibration: str | None

    def result(self, model: str) -> ContestResult:
        """Measure the programs of ``model`` in turns, with a progress bar."""
        cluster = parse(self.processes, calibration=self.calibration)
        with progress_bar(model) as progress:
            return contest(model, cluster, rounds=self.rounds, steps=self.steps, seed=self.seed, progress=progress)


def bench_command(
    names: tuple[str, ...], output: str | None, plot_file: str | None, published: str | None, as_json: bool, **how: Any
) -> None:
    """Measure, print tables or one JSON object, and write the requested files. With ``published``, evaluate the measurements in that file;
    the other options except ``as_json`` are ignored."""
    if published is not None:
        _print_published(published, as_json)
        return
    measurement = Measurement(**how)
    for name in names:
        if name not in MODELS:
            near = difflib.get_close_matches(name, MODELS, n=1)
            raise UsageError(
                f"the benchmark has no model {name!r}",
                f"did you mean {near[0]}?" if near else f"it has {', '.join(MODELS)}",
            )
    lines = output_file(output, "-o") if output else None
    picture = output_file(plot_file, "--plot", picture=True) if plot_file else None
    if picture:
        pyplot()  # raises now, not after the measurement, if matplotlib is not installed
    results = [measurement.result(name) for name in names or MODELS]
    if lines:
        write_lines(results, lines)
    parts = [[table(result, plain_table), *failures(result), verdict(result), ""] for result in results]
    show(as_json, {"models": [result.to_json() for result in results]}, *itertools.chain.from_iterable(parts))
    if picture:
        plot([result.to_json() for result in results], picture)


def _print_published(path: str, as_json: bool) -> None:
    """Print the automatic layout next to the layout with the best measured time, for every cell of the file ``path``. A cell is a model on
    some devices; those with fewer than two measured layouts are left out."""
    with Messages() as messages:
        cells = published(path, lambda what, done, total: messages("bench", f"{what}: {done} of {total} cells"))
    table = plain_table()
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
    found = summary(cells)
    parts: list[RenderableType] = [table]
    if found["cells"]:
        worst = f"{found['worst_regret']:.1%} at worst"
        parts.append(f"regret {found['mean_regret']:.1%} on average, {worst}; {found['failed']} choices failed")
    show(as_json, to_json(cells), *parts, width=150)
