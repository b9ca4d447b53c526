"""Prices every row of a file of measurements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.data_files import MalformedFileError, parse_json
from autopar.devices import Cluster
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.expert_loads import ExpertLoads
from autopar.graph import Graph
from autopar.plan import NARROW_MOMENTS, Plan
from autopar.price import Pricer
from autopar.trainers import OtherTrainer, Setting, figures
from autopar.trainers.layout import plan_parts
from autopar.validate.architecture import Architecture
from autopar.validate.fields import RowError
from autopar.validate.models import graph_of, textbook, textbook_types
from autopar.validate.rows import Hardware, Measured, Row, labels, measured, read_row
from autopar.validate.setting import cluster_of, reported_bytes, trainer_of

_AGREEMENT = 0.05  # by how much values may differ that count as one
_ROWS = 8  # batch size of the small graph that determines the op-level layouts


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """A row's measurements, and its predictions. Without predictions, ``reason`` or ``refused`` says why."""

    id: str
    source: str
    group: str
    measured: Measured
    step_s: float | None
    memory_bytes: int | None
    feasible: bool | None
    reason: str = ""
    refused: str = ""  # a reason other than memory why the plan can't run
    within_plan_limit: bool = False
    """Whether memory is within the limit for plans; ``feasible`` compares with a device's capacity, which is larger."""
    evidence: str = ""
    """For which trainers' prices the row is evidence (``Trainer.evidence``)."""

    @property
    def priced(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions for a setting, or those that all possible settings of a row agree on (``memory_bytes``: ``None`` if they differ)."""

    step_s: float
    memory_bytes: int | None
    feasible: bool
    within_plan_limit: bool


@dataclass(frozen=True)
class ValidationReport:
    """The outcomes in the order of the file."""

    outcomes: tuple[RowOutcome, ...]


def validate(path: str | Path, progress: Callable[[int, int], None] | None = None) -> ValidationReport:
    """Price every row of a JSON Lines file. Raises ``UsageError`` if it doesn't exist or has no JSON objects."""
    rows = read_file(path)
    bench = Bench()
    outcomes = []
    for number, data in enumerate(rows, 1):
        outcomes.append(bench.outcome(data, number))
        if progress is not None:
            progress(number, len(rows))
    return ValidationReport(tuple(outcomes))


def read_file(path: str | Path) -> list[Mapping[str, Any] | str]:
    """Return the file's rows; a line that isn't a JSON object becomes a string with the reason."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # text may have the other line ends that splitlines knows
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}", "give a JSON Lines file of measurements") from error
    rows: list[Mapping[str, Any] | str] = []
    for line in lines:
        if line.strip():
            try:
                row = parse_json(line)
                rows.append(row if isinstance(row, dict) else "not a JSON object")
            except MalformedFileError as error:
                rows.append(f"not JSON: {str(error).removeprefix('line 1 is not JSON: ')}")
    if not any(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} contains no measurements", "write one JSON object per line")
    return rows


class Bench:
    """Prices rows, with a cache of captured graphs, clusters and pricers that rows share.

    ``cluster``, ``model``, ``setting`` and ``reported`` return what the price depends on besides the graph. A subclass overrides them to
    price rows with other figures.
    """

    def __init__(self) -> None:
        self.graphs: dict[object, Graph | AutoparError] = {}
        self.variants: dict[tuple[int, frozenset[str]], Graph] = {}
        self.pricers: dict[object, Pricer] = {}
        self.clusters: dict[object, Cluster] = {}

    def outcome(self, data: Mapping[str, Any] | str, number: int) -> RowOutcome:
        """Return the row's outcome; an error in pricing becomes its reason."""
        if isinstance(data, str):
            return RowOutcome(f"line {number}", "?", "?", Measured(None, None, False), None, None, None, data)
        names = labels(data, number)
        try:
            seen = measured(data)
        except (AttributeError, TypeError, ValueError, OverflowError):
            return RowOutcome(*names, Measured(None, None, False), None, None, None, "measured values are not readable")
        try:
            row = read_row(data, number)
            found = self.predicted(row)
        except InfeasibleError as error:
            return RowOutcome(*names, seen, None, None, False, "", error.message)
        except AutoparError as error:
            return RowOutcome(*names, seen, None, None, None, error.message)
        except Exception as error:
            # list a bad row with its error, and go on with the next row
            return RowOutcome(*names, seen, None, None, None, f"{type(error).__name__}: {error}")
        return RowOutcome(
            *names,
            seen,
            found.step_s,
            found.memory_bytes,
            found.feasible,
            within_plan_limit=found.within_plan_limit,
            evidence=trainer_of(row.setting).evidence,
        )

    def predicted(self, row: Row) -> Predicted:
        """Return the predictions for the row; if fields leave several settings open, those that all feasible settings agree on.

        Raises ``RowError`` if their step times differ, and ``InfeasibleError`` if no setting has a price.
        """
        found: dict[tuple[Any, ...], Predicted] = {}
        refused: InfeasibleError | None = None
        for choice, setting in zip(row.choices, row.settings, strict=True):
            try:
                plan, limit = self.price(row, setting)
            except InfeasibleError as error:
                refused = error
                continue
            stages = [stage.memory.total for stage in plan.stages]
            reported, memory = stages[0] if trainer_of(setting).reports_first_stage else max(stages), max(stages)
            within = all(stage.memory.total <= stage.memory_limit_bytes for stage in plan.stages)
            shown = int(self.reported(setting, reported))
            found[choice] = Predicted(plan.prediction.step_time_s, shown, memory <= limit, within)
        if not found:
            assert refused is not None
            raise refused
        fitting = {choice: p for choice, p in found.items() if p.feasible} or found
        ordered = sorted(fitting.values(), key=lambda p: p.step_s)
        if not _agree(p.step_s for p in ordered):
            fields = _deciding(row.unknown, {choice: p.step_s for choice, p in fitting.items()})
            raise RowError(
                f"{fields}, and with it the step time, from {ordered[0].step_s:.3g} s to {ordered[-1].step_s:.3g} s"
            )
        middle = ordered[(len(ordered) - 1) // 2]
        if not _agree(p.memory_bytes or 0 for p in ordered):
            return dataclasses.replace(middle, memory_bytes=None)
        return middle

    def price(self, row: Row, setting: Setting) -> tuple[Plan, int]:
        """Return the row's priced plan with one of its settings, and the memory capacity of a device."""
        graph, cluster, pricer = self.prices(row, setting)
        parts = plan_parts(graph, self.setting(setting, graph), trainer_of(setting).root_zero(setting))
        plan = parts.evaluate(graph, cluster, pricer)
        return plan, cluster.memory_capacity_bytes

    def prices(self, row: Row, setting: Setting | None = None) -> tuple[Graph, Cluster, Pricer]:
        """Return the row's graph, cluster, and cost model of its trainer under one of its settings, by default the first."""
        setting = setting or row.setting
        graph = self.graph(row)
        if row.hardware not in self.clusters:
            self.clusters[row.hardware] = self.cluster(row.hardware)
        trainer = trainer_of(setting)
        cluster = trainer.devices(self.clusters[row.hardware])
        model = self.model(setting, cluster)
        key = (id(graph), row.hardware, setting.precision, trainer.name, model)
        if key not in self.pricers:
            solve = textbook_types(graph, self.plain(row))
            self.pricers[key] = Pricer(graph, cluster, setting.precision, solve, model)
        return graph, cluster, self.pricers[key]

    def cluster(self, hardware: Hardware) -> Cluster:
        """Return the machines of a row, before its trainer's kernels."""
        return cluster_of(hardware)

    def model(self, setting: Setting, cluster: Cluster) -> OtherTrainer:
        """Return the cost model of the trainer that ran a setting."""
        return trainer_of(setting).model(setting, cluster)

    def setting(self, setting: Setting, graph: Graph) -> Setting:
        """Return the setting whose plan is priced."""
        return setting

    def reported(self, setting: Setting, memory: int) -> float:
        """Return the bytes that the row's tool would have reported for ``memory`` allocated bytes."""
        return reported_bytes(setting, memory)

    def graph(self, row: Row) -> Graph:
        """Return the row's model with its global batch, and with Adam's moments in 16 bits and uneven loads of experts if the row's are."""
        graph, facts = self._captured(row.architecture, row.setting.global_batch), row.setting.facts
        key = id(graph), facts & {"16-bit moments", "natural routing"}
        if not key[1]:
            return graph
        if key not in self.variants:
            loads = ExpertLoads("natural routing", assumed=figures.NATURAL_IMBALANCE.value)
            uneven = loads.on(graph) if "natural routing" in facts and row.architecture.experts else graph
            narrow = (NARROW_MOMENTS,) if "16-bit moments" in facts else graph.narrow
            self.variants[key] = dataclasses.replace(uneven, narrow=narrow)
        return self.variants[key]

    def plain(self, row: Row) -> Graph:
        """Return the row's model at modest sizes, which determines its op-level layouts."""
        return self._captured(textbook(row.architecture), _ROWS)

    def _captured(self, architecture: Architecture, batch: int) -> Graph:
        key = (architecture, batch)
        if key not in self.graphs:
            try:
                self.graphs[key] = graph_of(architecture, batch)
            except AutoparError as error:
                self.graphs[key] = error
        found = self.graphs[key]
        if isinstance(found, AutoparError):
            raise found
        return found


def _agree(values: Iterable[float]) -> bool:
    """Return whether values are so close that it doesn't matter which of them is right."""
    known = list(values)
    return max(known) <= (1 + _AGREEMENT) * min(known)


def _deciding(fields: Sequence[str], found: Mapping[tuple[Any, ...], float]) -> str:
    """Return which unknown fields decide a value, by the combination of the fields' values: those that alone change it, or else all."""
    pairs = [(a, b) for a, b in itertools.combinations(found, 2) if not _agree((found[a], found[b]))]
    alone = {i for a, b in pairs if len(apart := [i for i in range(len(a)) if a[i] != b[i]]) == 1 for i in apart}
    names = [fields[i] for i in sorted(alone)] or fields
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} unknown"


def of_groups(outcomes: Iterable[RowOutcome], key: Callable[[RowOutcome], str]) -> dict[str, list[RowOutcome]]:
    """Group outcomes by ``key``, in order of first appearance."""
    found: dict[str, list[RowOutcome]] = {}
    for outcome in outcomes:
        found.setdefault(key(outcome), []).append(outcome)
    return found
