"""Renders a plan as tables for the terminal: mesh, layers, stages, time, memory, bound and gap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cli.console import plain_table
from autopar.plan import (
    GIVEN,
    REPLICATING,
    LayerPlan,
    Memory,
    Plan,
    Sensitivity,
    StagePlan,
    Strategy,
)
from autopar.schedules import V_SHAPED
from autopar.summary import legend, parallelism
from autopar.techniques import LAYER
from autopar.techniques.sync import SYNC
from autopar.units import seconds, size

_BAR = 20  # characters of a full bar
_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "transients")
_DEGREES = ("data", "tensor", "expert", "sequence")
_OFFLOADED = {"in the host": "host_bytes", "on NVMe": "nvme_bytes"}  # header of a column -> field of a stage


def plan_tables(plan: Plan, hint: str = "") -> Group:
    """Return all tables of ``plan``, followed by its notes and ``hint``."""
    return Group(*_sections(plan, hint))


def _sections(plan: Plan, hint: str) -> Iterable[RenderableType]:
    yield Text.assemble(
        (plan.model, "bold"), " on ", (plan.devices, "bold"), f" ({_plural(plan.device_count, 'device')})"
    )
    yield ""
    yield _overview(plan)
    yield ""
    yield _layers(plan)
    yield ""
    yield _stages(plan)
    yield ""
    yield _time(plan)
    yield ""
    yield _quality(plan)
    if plan.alternatives:
        yield ""
        yield _alternatives(plan)
    if plan.pins:
        yield ""
        yield _pins(plan)
    for note in plan.notes:
        yield Text(f"note: {note}", "dim")
    if used := legend(plan):
        yield Text(f"legend: {'; '.join(used)}", "dim")
    if hint:
        yield Text.assemble(("hint: ", "cyan"), hint)


def _overview(plan: Plan) -> RenderableType:
    table = _grid()
    table.add_row("parallel", parallelism(plan))
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh)
    spread = f", in each of {len(plan.stages)} pipeline stages" if plan.pipeline > 1 else ""
    if plan.chunks > 1:
        spread += f", {plan.chunks} of them on each device" + (", in a V" if plan.schedule in V_SHAPED else "")
    if plan.sized_schedule.copies > 1:
        spread += ", and a copy of each on the device that mirrors its own"
    table.add_row("mesh", f"{axes}{spread}" + (" (last axis innermost)" if len(plan.mesh) > 1 else ""))
    rows = (
        f"{plan.global_batch:,} x {plan.tokens_per_row:,} tokens"
        if plan.tokens_per_row > 1
        else f"{plan.global_batch:,}"
    )
    batch = f"{rows} in {_plural(plan.microbatches, 'microbatch', 'microbatches')}"
    table.add_row("batch", batch if plan.schedule == "none" else f"{batch}, schedule {plan.schedule}")
    if words := SYNC.phrase(plan.sync):
        table.add_row(SYNC.subject, words)
    table.add_row("precision", plan.precision)
    return table


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers with one strategy."""

    start: int
    layers: tuple[LayerPlan, ...]

    @property
    def strategy(self) -> Strategy:
        return self.layers[0].strategy

    @property
    def title(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return first if len(self.layers) == 1 else f"{first} ... {last}"


def runs(plan: Plan) -> list[LayerRun]:
    """Return the plan's layers, grouped into runs of consecutive layers with the same strategy."""
    grouped, start = [], 0
    for _, group in itertools.groupby(plan.layers, key=lambda layer: layer.strategy):
        layers = tuple(group)
        grouped.append(LayerRun(start, layers))
        start += len(layers)
    return grouped


def _layers(plan: Plan) -> RenderableType:
    of_layers = [layer.strategy.degrees(plan.mesh) for layer in plan.layers]
    named = [name for name in _DEGREES if name != "expert" or any(degrees[name] > 1 for degrees in of_layers)]
    table = plain_table("layers", ("layers",), ("count", *named, "ZeRO"))
    hsdp = any(layer.strategy.replicate > 1 for layer in plan.layers)
    if hsdp:
        table.add_column("copies", justify="right")
    techniques = [t for t in LAYER if t.shown or any(t.phrase(layer.strategy.options[t]) for layer in plan.layers)]
    for technique in techniques:
        table.add_column(technique.name)
    for run in runs(plan):
        s, degrees = run.strategy, run.strategy.degrees(plan.mesh)
        table.add_row(
            run.title,
            str(len(run.layers)),
            *(_degree(degrees[name]) for name in named),
            str(s.zero) if s.degree(plan.mesh, *REPLICATING) > 1 else "-",
            *([_degree(s.replicate)] if hsdp else []),
            *(technique.cell(s.options[technique]) for technique in techniques),
        )
    return table


def _stages(plan: Plan) -> RenderableType:
    table = plain_table("memory of one device", ("stage",), ("layers", *_MEMORY_PARTS, "total", "limit"))
    offloaded = {header: f for header, f in _OFFLOADED.items() if any(getattr(stage, f) for stage in plan.stages)}
    for header in offloaded:
        table.add_column(header, justify="right")
    table.add_column("", no_wrap=True)
    for first, last, stage in _equal_stages(plan.stages):
        memory, limit = stage.memory, stage.memory_limit_bytes
        table.add_row(
            str(first) if first == last else f"{first} ... {last}",
            str(stage.stop - stage.start),
            *(size(getattr(memory, part)) for part in _MEMORY_PARTS),
            size(memory.total),
            size(limit),
            *(size(getattr(stage, field)) for field in offloaded.values()),
            _bar(memory.total / limit if limit else 0.0),
        )
    return table


def _equal_stages(stages: tuple[StagePlan, ...]) -> Iterable[tuple[int, int, StagePlan]]:
    """Group consecutive stages with equal numbers of layers and equal memory; yield (first index, last index, first stage)."""

    def key(item: tuple[int, StagePlan]) -> tuple[int, Memory, int, int]:
        stage = item[1]
        return stage.stop - stage.start, stage.memory, stage.host_bytes, stage.nvme_bytes

    for _, group in itertools.groupby(enumerate(stages), key=key):
        members = list(group)
        yield members[0][0], members[-1][0], members[0][1]


def _time(plan: Plan) -> RenderableType:
    p = plan.prediction
    table = plain_table(f"one step: {seconds(p.step_time_s)}", ("part",), ("time",), show_header=False)
    table.add_column(no_wrap=True)
    parts = {
        "compute": p.compute_s,
        "exposed communication": p.communication_s,
        "bubble": p.bubble_s,
        "optimizer": p.optimizer_s,
    }
    for name, part_s in parts.items():
        share = part_s / p.step_time_s if p.step_time_s else 0.0
        table.add_row(name, seconds(part_s), f"{_bar(share)} {share:5.1%}")
    return table


def _quality(plan: Plan) -> RenderableType:
    p = plan.prediction
    table = _grid()
    table.add_row("speed", f"{p.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {p.mfu:.1%}")
    if plan.solver == GIVEN:
        return table
    table.add_row("bound", f"no searched plan takes less than {seconds(plan.bound_s)}: gap {plan.gap:.2%}")
    if plan.sensitivity is not None:
        table.add_row("margin", _margin(plan.sensitivity))
        table.add_row("sensitivity", _sensitivity(plan.sensitivity))
    if plan.solver:
        table.add_row("solver", plan.solver)
    table.add_row("planned in", f"{seconds(plan.wall_time_s)}, {size(plan.planning_memory_bytes)} of memory")
    return table


def _margin(found: Sensitivity) -> str:
    """Return in words how full the fullest device is, and what more room costs."""
    if found.margin_bytes >= found.wider_margin_bytes:
        return f"{size(found.margin_bytes)} below the limit on the fullest device"
    cost = "fits none of the plans found"
    if found.wider_margin_cost is not None:
        cost = f"makes the step {found.wider_margin_cost:.1%} longer, at most"
    return f"{size(found.margin_bytes)} below the limit; a margin of {size(found.wider_margin_bytes)} {cost}"


def _sensitivity(found: Sensitivity) -> str:
    """Return in words what wrong prices do to the step."""
    return (
        f"compute {found.error:.0%} slower: step {found.slower_compute:+.1%}; links {found.error:.0%} slower: "
        f"{found.slower_links:+.1%}; with both off, another plan is faster by at most {found.regret:.1%}"
    )


def _alternatives(plan: Plan) -> RenderableType:
    table = plain_table("nearest alternatives", ("parallel",), ("step", "against this plan"))
    for other in plan.alternatives:
        change = other.step_time_s / plan.prediction.step_time_s - 1
        table.add_row(other.summary, seconds(other.step_time_s), f"{change:+.1%}")
    return table


def _pins(plan: Plan) -> RenderableType:
    """Return a table of the cost of each pin: the time that the best plan without it saves, and an upper bound for any such plan."""
    table = plain_table("the price of each pin", ("pin",), ("best step without it", "saves", "at most"))
    for pin in plan.pins:
        saved, bound = pin.gain(plan.prediction.step_time_s)
        value = str(pin.value).lower()
        table.add_row(f"{pin.pin}={value}", seconds(pin.step_time_without_s), f"{saved:.1%}", f"{bound:.1%}")
    return table


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    return grid


def _degree(n: int) -> str:
    return "-" if n == 1 else str(n)


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR)
    return "█" * full + "·" * (_BAR - full)


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
