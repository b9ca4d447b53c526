"""From a trainer's configuration to a setting, and from a plan that was made for a trainer back to its setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.devices import Cluster
from autopar.errors import BatchError, UsageError
from autopar.graph import Graph
from autopar.plan import DEGREES, Plan, Role
from autopar.precision import FLOAT8
from autopar.schedules import refusal
from autopar.techniques import Options
from autopar.techniques.activations import ACTIVATIONS, KEEP
from autopar.trainers import TRAINERS
from autopar.trainers.layout import plan_parts
from autopar.trainers.options import Option
from autopar.trainers.setting import FACTS, Setting
from autopar.trainers.trainer import Exported, Reading, Trainer

HINT = f"these trainers' configurations are read: {', '.join(each.title for each in TRAINERS.values())}"


@dataclass(frozen=True)
class Sizes:
    """The sizes that a configuration sets; ``None`` if it doesn't. ``precision`` is that of the model's parameters in computations."""

    seq: int | None
    global_batch: int | None
    precision: str | None


def trainer_named(name: str) -> Trainer:
    """Return the trainer ``name``. Raises ``UsageError`` if there is none."""
    if name not in TRAINERS:
        raise UsageError(f"there is no trainer {name!r}", f"the trainers are {', '.join(TRAINERS)}")
    return TRAINERS[name]


def recognised(options: Sequence[Option], source: str) -> Trainer:
    """Return the trainer whose configuration this is: the one that knows the most options.

    Raises ``UsageError`` if no trainer knows any, or if several know equally many.
    """
    counts = {t.name: sum(t.key(option.name) in t.flags for option in options) for t in TRAINERS.values()}
    most = max(counts.values())
    names = [name for name, count in counts.items() if count == most]
    if not most:
        raise UsageError(f"there is no option in {source} that autopar reads", HINT)
    if len(names) > 1:
        raise UsageError(f"{source} may be a configuration of {' or '.join(names)}", "name it with --trainer")
    return TRAINERS[names[0]]


def read(trainer: Trainer, options: Sequence[Option], blocks: int, devices: int, source: str) -> Reading:
    """Return what the options say. Raises ``UsageError`` if they are not the trainer's, or invalid."""
    found = trainer.read(options, blocks, devices)
    if found is None:
        raise UsageError(f"{source} has no option of {trainer.title}", HINT)
    return found


def sizes_of(reading: Reading) -> Sizes:
    """Return the sizes that a configuration sets."""
    precision = reading.values.get("precision")
    return Sizes(
        reading.values.get("seq"),
        reading.values.get("global_batch"),
        "bfloat16" if precision == FLOAT8 else precision,
    )


def setting_of(trainer: Trainer, reading: Reading, devices: int, global_batch: int, precision: str) -> Setting:
    """Return the setting of a configuration on ``devices`` devices; data parallelism takes what the other degrees leave.

    ``global_batch`` and ``precision`` are those of the captured model; a configuration's 8-bit precision replaces ``precision``.

    Raises:
        UsageError: the degrees do not divide the devices, or the experts' degree its ranks.
        BatchError: the microbatches do not divide the batch.
    """
    values = dict(reading.values)
    degrees = {name: values.get(name, 1) for name in ("tensor", "pipeline", "context")}
    data, odd = divmod(devices, math.prod(degrees.values()))
    if odd or not data:
        words = " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1)
        raise UsageError(f"{words} does not divide {devices} devices", "give --devices of the configuration's cluster")
    expert, folds = values.get("expert", 1), values.get("folds", frozenset())
    inner = math.prod(degrees[name] for name in folds)
    if expert > 1 and (expert % inner or data % (expert // inner)):
        over = " and ".join([*sorted(folds), "data"])
        raise UsageError(
            f"an expert degree of {expert} over {over}-parallel ranks does not divide {' x '.join(str(n) for n in (inner, data))} of them",
            "change the expert degree",
        )
    microbatch = _microbatch(values, data, global_batch)
    if global_batch % (data * microbatch):
        raise BatchError(
            f"a global batch of {global_batch} does not divide into microbatches of {microbatch} on {data} data-parallel ranks",
            f"use a multiple of {data * microbatch}",
        )
    zero, copies = values.get("zero", 0), _replicas(values, data)
    if copies == data > 1 and degrees["context"] == 1:  # nothing is sharded
        zero = 0
    return Setting(
        data=data,
        **degrees,
        expert=expert,
        chunks=values.get("chunks", 1) if degrees["pipeline"] > 1 else 1,
        sequence=bool(values.get("sequence")) and degrees["tensor"] > 1,
        zero=zero,
        options=Options(**{ACTIVATIONS.name: values.get("activations", KEEP)}),
        precision=FLOAT8 if values.get("precision") == FLOAT8 else precision,
        global_batch=global_batch,
        microbatch=microbatch,
        facts=reading.facts,
        replicate=copies if zero else 1,
        folds=folds,
        recomputed=values.get("recomputed"),
        cuts=values.get("cuts") if degrees["pipeline"] > 1 else None,
    )


def _microbatch(values: dict[str, Any], data: int, global_batch: int) -> int:
    """Return the sequences of a microbatch: as the configuration says, or from the steps of gradient accumulation, or else one."""
    if values.get("microbatch"):
        return int(values["microbatch"])
    steps = values.get("accumulation")
    return max(1, global_batch // (data * steps)) if steps else 1


def _replicas(values: dict[str, Any], data: int) -> int:
    copies = values.get("replicate", 1)
    if data % copies:
        raise UsageError(f"{copies} replicas do not divide {data} data-parallel ranks", "change the replicate degree")
    return int(copies)


def setting_of_plan(trainer: Trainer, plan: Plan) -> Setting:
    """Return the setting of a plan that was made for ``trainer``."""
    blocks = [layer.strategy for layer in plan.layers[1:-1]] or [plan.layers[0].strategy]
    strategy = max(blocks, key=lambda each: each.distributes_experts)  # the first with experts, if there are any
    recomputes = [layer.strategy.options[ACTIVATIONS] != KEEP for layer in plan.layers]
    options = next((each.options for each in blocks if each.options[ACTIVATIONS] != KEEP), strategy.options)
    some = 0 < sum(recomputes) < len(blocks)
    facts = plan.request.get("facts")
    folds = {"tensor": DEGREES["tensor"], "context": (*DEGREES["ulysses"], *DEGREES["ring"])}
    degree = {name: strategy.degree(plan.mesh, *roles) for name, roles in DEGREES.items()}
    data = math.prod(axis.size for axis in plan.mesh) // (degree["tensor"] * degree["ring"] * degree["ulysses"])
    return Setting(
        data=data,
        tensor=degree["tensor"],
        pipeline=plan.pipeline,
        context=degree["ring"] * degree["ulysses"],
        expert=degree["expert"],
        chunks=plan.chunks,
        sequence=Role.TENSOR_SEQUENCE in strategy.layout,
        zero=strategy.zero,
        options=options,
        precision=plan.precision,
        global_batch=plan.global_batch,
        microbatch=plan.global_batch // (data * plan.microbatches),
        facts=frozenset(facts or trainer.facts_of(degree["tensor"], degree["expert"])) & set(FACTS),
        replicate=strategy.replicate,
        folds=frozenset(
            name for name, roles in folds.items() if any(r in roles and r.distributes_experts for r in strategy.roles)
        ),
        recomputed=max(sum(recomputes[stage.start : stage.stop]) for stage in plan.stages) if some else None,
        cuts=tuple(stage.start for stage in plan.stages[1:]),
    )


def exported_plan(trainer: Trainer, plan: Plan, graph: Graph, cluster: Cluster) -> Exported:
    """Return the configuration of a plan that was made for ``trainer``, as its search exported it.

    Raises ``UsageError`` with the layer or the schedule that the trainer can't have: the plan's file was edited.
    """
    setting = setting_of_plan(trainer, plan)
    parts = plan_parts(graph, setting, trainer.root_zero(setting))
    for layer, strategy in zip(plan.layers, parts.strategies, strict=True):
        if layer.strategy != strategy:
            raise UsageError(
                f"{layer.name} differs from the other layers in a way that {trainer.title} cannot run",
                f"`autopar plan --trainer {trainer.name} --export DIR` writes the configuration of a plan that it can",
            )
    if why := refusal(parts.schedule, trainer.space.any_rounds):
        raise UsageError(*why)
    if parts.schedule != plan.sized_schedule:
        raise UsageError(f"{trainer.title} has no schedule {plan.schedule} here", f"it runs {parts.schedule.name}")
    return trainer.export(setting, graph, cluster)
