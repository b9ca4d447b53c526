"""The pictures and the figures of ``docs/concepts``: ``make report NAME=concepts``.

The pages are written by hand, except for what stands between ``<!-- made: NAME -->`` and ``<!-- end -->`` and for the SVG files beside
them. Every figure is priced or counted here; nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import concept_pictures as pictures
from places import DOCS
from volumes import WAYS, Block, captured

from autopar.checks.collectives import exchanges
from autopar.cli.load import SizeOptions, load_model
from autopar.cli.pricing import price_plan
from autopar.cli.sync import SyncRow, rows
from autopar.devices import Cluster, parse
from autopar.graph import Graph
from autopar.plan import NARROW_GRADIENTS, NARROW_MOMENTS, Axis, Memory, Plan
from autopar.planning import find_plan
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.price.collectives import group, group_time_s
from autopar.price.state import Precision, precision
from autopar.report import predict_step
from autopar.schedules import Schedule
from autopar.schedules.memory import max_in_flight
from autopar.schedules.step_time import Span, timeline
from autopar.search import SearchOptions, make_mesh, manual_plan
from autopar.shard import plan_shardings
from autopar.types import Collective, I, P, R, S, SpmdType, conversion
from autopar.units import seconds, size
from passes.collectives import convert
from passes.stages import cut_stages

FOLDER = DOCS / "concepts"
DEVICES, SEQ, BATCH = "8xH100-80GB", 4096, 64


@dataclasses.dataclass(frozen=True)
class Page:
    """The parts of a page that are made: tables by name, and pictures by the name of their file."""

    tables: dict[str, str]
    pictures: dict[str, Callable[[Path], None]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model of the zoo with the sizes of its batch, on a cluster, and what prices its plans."""

    graph: Graph
    cluster: Cluster
    pricer: Pricer

    def plan(self, **pins: Any) -> Plan:
        """The manual plan with these pins and compiled layers, as a search has them on GPUs, priced."""
        plan = manual_plan(self.graph, precision=name_of(self.graph.dtype), compile="layers", **pins)
        return price_plan(self.graph, self.cluster, plan, self.pricer)

    def sent(self, plan: Plan) -> float:
        """Bytes that a device sends in a step."""
        return sum(one.bytes for one in predict_step(self.graph, self.cluster, self.pricer, plan).traffic)


@functools.cache
def setting(model: str = "llama3-8b", devices: str = DEVICES, seq: int = SEQ, batch: int = BATCH) -> Setting:
    graph = load_model(model, SizeOptions(seq, batch, None)).capture()
    cluster = parse(devices)
    return Setting(graph, cluster, Pricer(graph, cluster, name_of(graph.dtype)))


def fullest(plan: Plan) -> Memory:
    """The memory of the fullest stage's devices."""
    return max((stage.memory for stage in plan.stages), key=lambda memory: memory.total)


def limit(plan: Plan) -> int:
    return plan.stages[0].memory_limit_bytes


def step(plan: Plan) -> str:
    """The step time, or the time that it would take if it fitted."""
    text = seconds(plan.prediction.step_time_s)
    return text if fullest(plan).total <= limit(plan) else f"does not fit ({text})"


def table(head: str, lines: Iterator[str] | list[str]) -> str:
    cells = head.split("|")
    return "\n".join([f"|{head}|", "|" + "---|" * len(cells), *(f"| {line} |" for line in lines)])


def parts(memory: Memory) -> str:
    return " | ".join(size(getattr(memory, field.name)) for field in dataclasses.fields(memory))


PARTS = " parameters | gradients | optimizer | activations | transients "


def memory_page(file: str, plans: dict[str, Plan], first: str) -> Page:
    """A page of plans by their names: a table of memory by part and the step, and the picture of both."""
    lines = [f"{name} | {parts(fullest(p))} | {size(fullest(p).total)} | {step(p)}" for name, p in plans.items()]
    most = limit(next(iter(plans.values())))
    return Page(
        {file: table(f" {first} |{PARTS}| total | step ", lines)},
        {f"{file}.svg": functools.partial(pictures.memory_and_time, bars_of(plans), most)},
    )


def bars_of(plans: dict[str, Plan]) -> list[tuple[str, Memory, float]]:
    return [(name, fullest(plan), plan.prediction.step_time_s) for name, plan in plans.items()]


# -- one page each ------------------------------------------------------------------------------------------------------


def overview() -> Page:
    """One model on one node, in the textbook's ways and in the plan that the search finds."""
    here = setting()
    ways: dict[str, dict[str, Any]] = {
        "data, ZeRO 0": {"data": 8, "microbatches": 8},
        "data, ZeRO 1": {"data": 8, "microbatches": 8, "zero": 1},
        "data, ZeRO 2": {"data": 8, "microbatches": 8, "zero": 2},
        "data, ZeRO 3": {"data": 8, "microbatches": 8, "zero": 3},
        "tensor": {"tensor": 8, "microbatches": 64},
        "tensor+sequence": {"tensor": 8, "microbatches": 64, "sequence": True},
        "Ulysses, ZeRO 3": {"ulysses": 8, "microbatches": 64, "zero": 3},
        "ring, ZeRO 3": {"ring": 8, "microbatches": 64, "zero": 3},
        "pipeline, 1F1B": {"pipeline": 8, "microbatches": 64},
    }
    plans = {name: here.plan(**pins) for name, pins in ways.items()}
    plans["found by the search"] = find_plan(here.graph, here.cluster, SearchOptions(), pricer=here.pricer)
    lines = [
        f"{name} | {size(round(here.sent(p)))} | {size(fullest(p).total)} | {step(p)} | {p.prediction.mfu:.0%}"
        for name, p in plans.items()
    ]
    return Page(
        {"overview": table(" plan | sent per device | memory per device | step | MFU ", lines)},
        {"overview.svg": functools.partial(pictures.memory_and_time, bars_of(plans), limit(plans["tensor"]))},
    )


CONVERSIONS: tuple[tuple[SpmdType, SpmdType], ...] = ((P, I), (P, S(0)), (S(0), R), (S(0), S(1)), (I, R), (I, S(0)))


def collectives() -> Page:
    """What collectives do, as conversions between types, and what they cost by bytes."""
    cluster = parse("8x8xH100-80GB")
    groups = {
        "8 GPUs of a node": group((Axis("tensor", 8, 1),), cluster),
        "8 GPUs of 8 nodes": group((Axis("data", 8, 8),), cluster),
        "64 GPUs": group((Axis("data", 64, 1),), cluster),
    }
    kinds = (
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.BROADCAST,
    )
    pairs = []
    for source, target in CONVERSIONS:
        both = conversion(source, target)
        assert both is not None
        pairs.append((source, target, *(words(one) for one in both)))
    shapes = [f"`{a}` to `{b}` | {forward} | {backward}" for a, b, forward, backward in pairs]
    sizes = [2**n for n in range(12, 31, 2)]
    costs = [
        f"{words(kind)} | "
        + " | ".join(f"{seconds(group_time_s(kind, 2**n, g, cluster))}" for g in groups.values() for n in (16, 30))
        for kind in kinds
    ]
    head = "".join(f"| {name}, {text} " for name in groups for text in ("64 KiB", "1 GiB"))
    curves = {
        (name, words(kind)): [group_time_s(kind, n, g, cluster) for n in sizes]
        for name, g in groups.items()
        for kind in kinds
    }
    return Page(
        {
            "conversions": table(" conversion | forward | backward ", shapes),
            "costs": table(f" collective {head}", costs),
        },
        {
            "conversions.svg": functools.partial(pictures.conversions, pairs),
            "collectives.svg": functools.partial(pictures.curves, sizes, curves),
        },
    )


def words(collective: Collective) -> str:
    if not collective.sends:
        return {"none": "nothing", "local": "nothing is sent"}[collective.value]
    return collective.value.replace("_", "-")


def data_parallel() -> Page:
    """Ways to keep replicas alike: the textbook's algorithms and the priced collectives."""
    numbers, elements = precision("bfloat16"), 8_000_000_000
    counts = (8, 16, 32, 64, 128, 256)
    by_count = {n: rows(elements, parse(f"{n // 8}x8xH100-80GB"), numbers, 10) for n in counts}

    def line(row: SyncRow) -> str:
        through = "-" if row.busiest_bytes is None else size(round(row.busiest_bytes))
        messages = "-" if row.messages is None else f"{row.messages:,.4g}"
        return f"{row.sync} | {row.algorithm} | {messages} | {through} | {seconds(row.seconds)}"

    curves: dict[str, list[float]] = {}
    for found in by_count.values():
        for row in found:
            if row.sync == "all-reduce" or (row.sync, row.algorithm) in (
                ("parameter-server", "sequential"),
                ("parameter-server", "as priced"),
            ):
                curves.setdefault(f"{row.sync}, {row.algorithm}", []).append(row.seconds)
    head = " sync | algorithm | sequential messages | through the busiest rank | time "
    return Page(
        {"sync": table(head, [line(row) for row in by_count[64]])},
        {"data-parallel.svg": functools.partial(pictures.by_ranks, counts, curves)},
    )


def zero() -> Page:
    here = setting()
    plans = {f"ZeRO {stage}": here.plan(data=8, microbatches=8, zero=stage) for stage in range(4)}
    return memory_page("zero", plans, "stage")


def tensor() -> Page:
    """What a device holds of one block under tensor parallelism, and a model by its degree."""
    here = setting()
    lines = []
    for degree in (1, 2, 4, 8):
        for sequence in (False, True)[: 1 + (degree > 1)]:
            plan = here.plan(data=8 // degree, tensor=degree, microbatches=8 * degree, zero=1, sequence=sequence)
            name = f"tensor {degree}" + (", sequence" if sequence else "")
            p, memory = plan.prediction, fullest(plan)
            lines.append(
                f"{name} | {size(memory.activations)} | {size(memory.total)} | {seconds(p.communication_s)} | {step(plan)}"
            )
    graph = captured(Block)
    panels = []
    for name, sequence in (("tensor", False), ("tensor+sequence", True)):
        plan = manual_plan(graph, mesh=make_mesh(("tensor", 4)), sequence=sequence, precision="float32")
        panels.append((name, held(graph, plan)))
    head = " layers | activations | memory per device | exposed communication | step "
    return Page({"tensor": table(head, lines)}, {"tensor.svg": functools.partial(pictures.block, panels)})


PLACES = {(3, 1): "a slice of the sequence", (3, 2): "a slice of the columns", (4, 1): "some heads"}


def held(graph: Graph, plan: Plan) -> list[pictures.Held]:
    """The activations of the middle block, in the order of the program: their type on the axis, the bytes that a device has, and the
    collectives that they take part in."""
    program = cut_stages(graph, plan, plan_shardings(graph, plan))
    block = next(layer for i, layer in enumerate(program.layers) if graph.layers[i].name == "1")
    traffic: dict[str, list[str]] = {}
    for one in exchanges(block):
        way = "backward" if one.backward else "forward"
        traffic.setdefault(one.value, []).append(f"{way}: {one.collective.replace('_', '-')}")
    found = []
    for node in block.graph.graph.nodes:
        value, types = node.meta.get("val"), node.meta.get("types")
        if types is None or value is None or value.ndim < 3 or node.name.startswith(("view", "transpose", "reshape")):
            continue
        *_, (path, _) = node.meta["nn_module_stack"].values()
        module, op = path.rpartition(".")[2], node.name.replace("scaled_dot_product_", "").partition("_")[0]
        name = f"{module}, summed" if node.target is convert else op if module.isdigit() else module
        what = {"I": "whole", "P": "terms of a sum", "S": PLACES.get((value.ndim, types[-1].dim), "")}[types[-1].kind]
        found.append(
            pictures.Held(
                {"add": "residual", "x": "input"}.get(name, name),
                types[-1].kind,
                value.numel() * value.element_size(),
                (f"{types[-1]}: {what}", *traffic.get(node.name, ())),
            )
        )
    return found


def long_sequences() -> Page:
    """Sequences of 32,768 tokens by the ways to divide them, the bytes that these send, and the causal ring's balance."""
    here = setting(seq=32768, batch=8)
    ways: dict[str, dict[str, Any]] = {
        "data 8, a whole sequence each": {"data": 8},
        "tensor+sequence 8": {"tensor": 8, "sequence": True, "microbatches": 8},
        "Ulysses 8": {"ulysses": 8, "microbatches": 8, "zero": 3},
        "ring 8": {"ring": 8, "microbatches": 8, "zero": 3},
    }
    ways["data 8, a whole sequence each"]["zero"] = 3
    lines = []
    for name, pins in ways.items():
        plan = here.plan(**pins)
        memory = fullest(plan)
        lines.append(
            f"{name} | {size(memory.activations)} | {size(memory.total)} | {size(round(here.sent(plan)))} | {step(plan)}"
        )
    degrees = (2, 4, 8, 16)
    volumes = {
        way.name: [float(sum(way.published(n))) * 2 / 1e6 for n in degrees]  # bfloat16
        for way in WAYS
        if way.name in ("1D with sequence (Megatron-SP)", "Ulysses", "ring attention")
    }
    return Page(
        {"sequences": table(" parallelism | activations | memory per device | sent per device | step ", lines)},
        {"long-sequences.svg": functools.partial(pictures.sequences, degrees, volumes)},
    )


SCHEDULES = (
    Schedule("gpipe", 4, 8),
    Schedule("1f1b", 4, 8),
    Schedule("interleaved-1f1b", 4, 8, 2),
    Schedule("zero-bubble", 4, 8),
    Schedule("zbv", 4, 8, 2),
    Schedule("dualpipev", 4, 8, 2),
    Schedule("chimera", 4, 8),
)


def spans_of(schedule: Schedule) -> tuple[Span, ...]:
    """The actions where a device's forward pass of a microbatch takes 1, and its backward pass 2, half of it for the weights."""
    share = 1 / schedule.chunks
    return timeline(schedule, *([share * n] * schedule.stages for n in (1, 2, 1)))


def pipeline() -> Page:
    """Every schedule with equal stages: its timeline, the share of the step in which devices wait, microbatches in flight."""
    lines, drawn = [], []
    for schedule in SCHEDULES:
        spans = spans_of(schedule)
        end = max(span.stop_s for span in spans)
        busy = sum(span.stop_s - span.start_s for span in spans) / schedule.pipeline
        flight = max(max_in_flight(schedule, d) for d in range(schedule.pipeline)) / schedule.chunks
        lines.append(
            f"`{schedule.name}` | {len(schedule.stages_of(0))} | {end:g} | {1 - busy / end:.0%} | {flight:g} "
            f"| {'in two parts' if schedule.split else 'whole'}"
        )
        drawn.append((f"{schedule.name}: a step of {end:g}, {1 - busy / end:.0%} waiting", schedule, spans))
    more = []
    for m in (4, 8, 16, 32, 64):
        waits = []
        for schedule in (Schedule("1f1b", 4, m), Schedule("interleaved-1f1b", 4, m, 2)):
            end = max(span.stop_s for span in spans_of(schedule))
            waits.append(f"{1 - 3 * m / end:.1%}")
        more.append(f"{m} | {' | '.join(waits)}")
    head = " schedule | stages per device | step | waiting | microbatches in flight, at most | backward pass "
    return Page(
        {
            "schedules": table(head, lines),
            "bubble": table(" microbatches | waiting under 1F1B | waiting under interleaved 1F1B ", more),
        },
        {"pipeline.svg": functools.partial(pictures.timelines, drawn)},
    )


def experts() -> Page:
    here = setting("mixtral-8x7b", "8x8xH100-80GB")
    plans = {f"expert {n}": here.plan(data=64 // n, expert=n, zero=1, recompute="full") for n in (1, 2, 4, 8)}
    return memory_page("experts", plans, "layers with experts")


def recomputation() -> Page:
    here = setting()
    common = {"data": 8, "zero": 3, "microbatches": 4}
    plans = {name: here.plan(**common, recompute=name) for name in ("none", "selective", "full")}
    plans["full, segments of 4"] = here.plan(**common, segment=4)
    return memory_page("recomputation", plans, "recompute")


def offload() -> Page:
    here = setting()
    common = {"data": 8, "zero": 3, "microbatches": 4, "recompute": "selective"}
    ways: dict[str, dict[str, Any]] = {
        "nothing": {},
        "optimizer states, host": {"states": "host"},
        "optimizer states, NVMe": {"states": "nvme"},
        "activations, host": {"offload": "activations"},
        "both, host": {"states": "host", "offload": "activations"},
    }
    plans = {name: here.plan(**common, **way) for name, way in ways.items()}
    page = memory_page("offload", plans, "offload")
    lines = [
        f"{name} | {size(fullest(p).total)} | {size(p.stages[0].host_bytes)} | {size(p.stages[0].nvme_bytes)} | {step(p)}"
        for name, p in plans.items()
    ]
    head = " offloaded | memory per device | host memory per device | NVMe per device | step "
    return Page({"offload": table(head, lines)}, page.pictures)


def mixed_precision() -> Page:
    """Bytes of a parameter's state by precision."""
    names: dict[str, Precision] = {
        "float32": precision("float32"),
        "bfloat16, float16": precision("bfloat16"),
        "bfloat16 gradients": precision("bfloat16", {NARROW_GRADIENTS}),
        "bfloat16 gradients, moments": precision("bfloat16", {NARROW_GRADIENTS, NARROW_MOMENTS}),
    }
    found = []
    for name, p in names.items():
        master = 4 if p.master else 0
        found.append((name, (p.width, p.gradient, master, p.optimizer - master)))
    lines = [f"{name} | {' | '.join(map(str, b))} | {sum(b)}" for name, b in found]
    head = " precision | parameter | gradient | master copy | Adam's moments | bytes per parameter "
    return Page({"precision": table(head, lines)}, {"precision.svg": functools.partial(pictures.bytes_each, found)})


PAGES: dict[str, Callable[[], Page]] = {
    "README.md": overview,
    "collectives.md": collectives,
    "data-parallel.md": data_parallel,
    "zero.md": zero,
    "tensor.md": tensor,
    "long-sequences.md": long_sequences,
    "pipeline.md": pipeline,
    "experts.md": experts,
    "recomputation.md": recomputation,
    "offload.md": offload,
    "precision.md": mixed_precision,
}


def renewed(text: str, tables: dict[str, str]) -> str:
    """The page ``text`` with its tables as they should be."""
    for name, made in tables.items():
        pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, made=made: f"{m[1]}{made}\n{m[2]}", text, flags=re.DOTALL)
        assert count == 1, f"the page has {count} places for the table {name}"
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, make in PAGES.items():
        page = make()
        path = FOLDER / name
        path.write_text(renewed(path.read_text(), page.tables))
        for file, draw in page.pictures.items():
            pictures.drawn(draw, FOLDER / file)


if __name__ == "__main__":
    main()
