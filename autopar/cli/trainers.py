"""Plans for other trainers: ``autopar plan --trainer``, ``autopar price --from`` and ``autopar compare`` with a configuration."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar import pins
from autopar.cli.commands import (
    allowed,
    cluster_and_options,
    load,
    recapture,
)
from autopar.cli.console import Messages
from autopar.cli.options import PlanRequest
from autopar.cli.recorded import recorded_options
from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.memory import peak_memory_bytes
from autopar.plan import Plan
from autopar.planning import capture_model, compared_graph, plan_graph
from autopar.precision import FLOAT8, name_of, normalise
from autopar.price import Pricer
from autopar.progress import Progress
from autopar.search import SearchOptions
from autopar.search.numerics import preferred
from autopar.trainers import Exported, Setting, Trainer
from autopar.trainers.changes import Change, best_changes
from autopar.trainers.choose import PINS, TrainerPricers, best_setting, check_values, deviating_values, folds_of
from autopar.trainers.errors import published_errors
from autopar.trainers.options import Option, of_words, read_options
from autopar.trainers.reading import read, recognised, setting_of, setting_of_plan, sizes_of, trainer_named
from autopar.trainers.setting import KEPT
from autopar.trainers.trainer import Reading

_SPELLED = {"ring": "context"}  # pin -> field of ``Setting``


@dataclass(frozen=True)
class Configured:
    """A user's configuration: the trainer, the model's graph, and the priced plan."""

    trainer: Trainer
    graph: Graph
    cluster: Cluster
    setting: Setting
    plan: Plan
    pricers: TrainerPricers


def plan_for_trainer(request: PlanRequest, messages: Messages) -> tuple[Plan, Exported]:
    """Return the fastest plan that ``request.trainer`` can run, and its configuration."""
    start_s = time.perf_counter()
    cluster, options = cluster_and_options(request)
    workload = load(request, cluster, messages, few_blocks=True)
    graph = compared_graph(workload, request.capture_check, messages, for_program=False)
    return plan_graph_for_trainer(request, graph, cluster, options, messages, start_s)


def plan_graph_for_trainer(
    request: PlanRequest,
    graph: Graph,
    cluster: Cluster,
    options: SearchOptions,
    messages: Progress,
    start_s: float | None = None,
) -> tuple[Plan, Exported]:
    """Return what ``plan_for_trainer`` does, for a captured graph; ``wall_time_s`` counts from ``start_s``."""
    begun_s = time.perf_counter() if start_s is None else start_s
    trainer = trainer_named(str(request.trainer))
    setting, found = choose(graph, cluster, trainer, _pins(request, trainer), messages, options)
    exported = trainer.export(setting, graph, cluster)
    plan = dataclasses.replace(
        found,
        wall_time_s=time.perf_counter() - begun_s,
        planning_memory_bytes=peak_memory_bytes(),
        request=recorded(request, trainer, setting),
        notes=(*found.notes, *cluster.notes, *graph.notes),
    )
    return plan, exported


def choose(
    graph: Graph,
    cluster: Cluster,
    trainer: Trainer,
    pins: dict[str, Any],
    messages: Progress,
    options: SearchOptions | None = None,
) -> tuple[Setting, Plan]:
    """Return the fastest setting of a trainer, and its plan."""
    messages("search", trainer.title)
    best = best_setting(graph, cluster, trainer, pins, lambda text: messages("search", text), options)
    searched = "each priced or excluded by a bound"
    if best.left:
        searched = f"{best.left:,} of them neither priced nor excluded when --time-limit ended the search"
    plan = dataclasses.replace(
        best.plan,
        bound_s=best.bound_s,
        gap=1 - best.bound_s / best.plan.prediction.step_time_s,
        solver=f"{best.families:,} kinds of settings of {trainer.title}, {searched}",
        notes=(priced_as(trainer), *best.plan.notes),
    )
    return best.setting, plan


def pricer_of(request: PlanRequest, graph: Graph, cluster: Cluster, plan: Plan) -> tuple[Cluster, Pricer]:
    """Return the devices and the pricer of ``plan``, as ``request.trainer`` runs it, or an emitted program if there is no trainer."""
    if not request.trainer:
        return cluster, Pricer(graph, cluster, name_of(graph.dtype))
    pricers = TrainerPricers(graph, cluster, trainer_named(request.trainer))
    return pricers.cluster, pricers.of(setting_of_plan(pricers.trainer, plan))


def recorded(request: PlanRequest, trainer: Trainer, setting: Setting) -> dict[str, Any]:
    """Return what a plan's file records of the request: its options, the trainer, and how the trainer runs."""
    options = recorded_options(dataclasses.replace(request, trainer=trainer.name))
    return {**options, "facts": sorted(setting.facts)}


def priced_as(trainer: Trainer) -> str:
    """Return the note that says whose program a plan is priced for, and how well such prices held."""
    errors = published_errors().get(trainer.evidence)
    held = f"; {errors}" if errors else "; no published run was compared with such prices"
    return f"priced as {trainer.title} runs it, with one strategy for all blocks{held}"


def _pins(request: PlanRequest, trainer: Trainer) -> dict[str, Any]:
    """Return the pins as fields of ``Setting``. Raises ``UsageError`` for one that is not a decision of the trainer."""
    decisions = {name: field for name in pins.PINS if (field := _SPELLED.get(name, name)) in PINS}
    found = {}
    for name, value in pins.read_pins(request.pins).items():
        if name not in decisions:
            raise UsageError(
                f"the pin {name}={value} is not a decision of {trainer.title}, which has one strategy for all blocks",
                f"with --trainer these may be pinned: {', '.join(decisions)}",
            )
        found[decisions[name]] = value
    return found


def check_export(folder: str, names: Iterable[str] = ("plan.json", "NOTES.md")) -> None:
    """Raise ``UsageError`` if one of the files, by default those of every trainer, exists in the folder already."""
    existing = [name for name in names if (Path(folder) / name).exists()]
    if existing:
        raise UsageError(f"{Path(folder) / existing[0]} exists already", "give --export a new folder")


def write_export(exported: Exported, plan: Plan, folder: str, messages: Messages) -> None:
    """Write a configuration's files, its notes and the plan into a folder. Raises ``UsageError`` if a file exists already."""
    path = Path(folder)
    files = {**exported.files, "plan.json": plan.dumps() + "\n"}
    files["NOTES.md"] = "".join(f"- {note}\n" for note in exported.notes)
    check_export(folder, files)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (path / name).open("x", encoding="utf-8") as file:  # never through a link
                file.write(text)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}", "give --export another folder") from error
    messages.say(f"{', '.join(files)} are in {folder}")
    for note in exported.notes:
        messages.say(f"note: {note}")


def configured(request: PlanRequest, source: str | None, flags: Sequence[str], messages: Messages) -> Configured:
    """Return the priced plan of a configuration file (``source``) or of ``flags``.

    Raises ``UsageError`` for pins beside it, and for sizes that contradict the request's.
    """
    words = "the flags after --" if source is None else source
    decisions = [*["--plan"] * bool(request.plan_file), *(f"--pin {pin}" for pin in request.pins)]
    pins.refuse_pins([*decisions, *(f"--allow {name}" for name in request.allow)], words)
    cluster, _ = cluster_and_options(request)
    options = of_words(list(flags)) if source is None else read_options(source)
    trainer = trainer_named(request.trainer) if request.trainer else recognised(options, words)
    request = with_sizes(request, trainer, options, cluster.count, words)
    graph = capture_model(load(request, cluster, messages, few_blocks=True), messages)
    messages("price", trainer.title)
    reading = read(trainer, options, max(0, len(graph.layers) - 2), cluster.count, words)
    return _priced(TrainerPricers(graph, cluster, trainer), cluster, reading)


def pinned(request: PlanRequest, microbatch: int | None, sequence: bool, messages: Messages) -> Configured:
    """Return the priced plan of the pins as ``request.trainer`` runs it; what is not pinned has degree 1, ZeRO 0 where the trainer has it,
    and no recomputation; tensor parallelism shards the sequence, too, where the trainer has that. Of the allowed deviations from exact
    training it has those with which it is faster.

    Raises ``UsageError`` for pins and deviations that the trainer doesn't have.
    """
    trainer, (cluster, options) = trainer_named(str(request.trainer)), cluster_and_options(request)
    values = {"pipeline": 1} | _pins(request, trainer)
    if sequence and not trainer.space.sequence:
        raise UsageError(f"--sequence: {trainer.title} does not have it", "leave it out")
    graph = capture_model(load(request, cluster, messages, few_blocks=True), messages)
    check_values(trainer, graph, values)
    messages("price", trainer.title)
    zero = {"zero": 0 if 0 in trainer.space.zero else max(trainer.space.zero)}
    sizes = {"sequence": trainer.space.sequence} | ({} if microbatch is None else {"microbatch": microbatch})
    folds = {"folds": folds_of(trainer, cluster.count, values)}
    facts = trainer.facts_of(values.get("tensor", 1), values.get("expert", 1))
    pricers, found = TrainerPricers(graph, cluster, trainer), list[Configured]()
    for deviation in deviating_values(trainer, options.allow, graph.dtype):
        said = {**zero, **sizes, **folds, **values, **deviation}
        found.append(_priced(pricers, cluster, Reading(said, facts | said.pop("facts", frozenset()))))
    best = preferred(found, lambda each: each.plan, options.target_gap)
    assert best is not None  # exact training is always among them
    return best


def _priced(pricers: TrainerPricers, cluster: Cluster, reading: Reading) -> Configured:
    """Return the priced plan of what a configuration says."""
    graph, trainer = pricers.graph, pricers.trainer
    s = setting_of(trainer, reading, cluster.count, graph.batch_size, name_of(graph.dtype))
    plan = pricers.plan(s)
    notes = (priced_as(trainer), *reading.notes, *plan.notes, *cluster.notes)
    return Configured(trainer, graph, cluster, s, dataclasses.replace(plan, notes=notes), pricers)


def with_sizes(
    request: PlanRequest, trainer: Trainer, options: Sequence[Option], devices: int, words: str
) -> PlanRequest:
    """Return the request with the sizes that a configuration sets. Raises ``UsageError`` if it sets others than the request."""
    sizes = sizes_of(read(trainer, options, 0, devices, words))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(sizes):
        value, own = getattr(sizes, field.name), getattr(request, field.name)
        own = normalise(own) if field.name == "precision" and own else own
        if value is not None and own not in (None, value):
            option = f"--{field.name.replace('_', '-')}"
            raise UsageError(f"{option} is {own}, and {value} in {words}", f"leave {option} out")
        changes[field.name] = own if value is None else value
    return dataclasses.replace(request, **changes)


@dataclass(frozen=True)
class Compared:
    """A configuration beside the best one of its trainer and autopar's own program, and the changes that gain most."""

    own: Configured
    best: Plan
    exported: Exported
    program: Plan
    changes: list[Change]


def compared(request: PlanRequest, source: str, messages: Messages) -> Compared:
    """Compare the configuration in the file ``source`` with the best ones."""
    own = configured(dataclasses.replace(request, allow=()), source, (), messages)
    same = {"precision": own.setting.precision, "facts": own.setting.facts & KEPT}
    allow = {name for name in allowed(request.allow) if name in own.trainer.space.deviations}
    _, options = cluster_and_options(dataclasses.replace(request, trainer=own.trainer.name))
    options = dataclasses.replace(options, allow=allow)
    setting, best = choose(own.graph, own.cluster, own.trainer, same, messages, options)
    exported = own.trainer.export(setting, own.graph, own.cluster)
    messages("price", "single changes")
    changes = best_changes(own.pricers, own.setting, own.plan.prediction.step_time_s)
    sized = dataclasses.replace(
        request,
        trainer=None,
        seq=own.graph.tokens // own.graph.batch_size,
        global_batch=own.graph.batch_size,
        precision=name_of(own.graph.dtype),
    )
    cluster, options = cluster_and_options(sized)
    _, program = plan_graph(own.graph, cluster, options, recapture(sized, cluster), progress=messages)
    if own.setting.precision == FLOAT8:
        note = (
            f"your configuration and the best of {own.trainer.title} multiply in 8 bits, autopar's program in {program.precision}: "
            "`autopar plan --allow fp8` plans one in 8 bits"
        )
        own = dataclasses.replace(own, plan=dataclasses.replace(own.plan, notes=(*own.plan.notes, note)))
    return Compared(own, best, exported, program, changes)
