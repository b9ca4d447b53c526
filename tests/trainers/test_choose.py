"""The fastest setting of a trainer, against pricing every setting of a small space in plain loops; single changes; stage bounds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from typing import Any

import pytest

from autopar.data_files import MalformedFileError
from autopar.devices import Cluster, parse
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.plan_schema import check_plan
from autopar.price import Pricer
from autopar.schedules import refusal
from autopar.search import SearchOptions
from autopar.techniques import Options
from autopar.trainers import ACCELERATE, DEEPSPEED, MEGATRON, TORCHTITAN, Setting, Trainer, choose
from autopar.trainers.changes import best_changes
from autopar.trainers.choose import TrainerPricers, balanced_bounds, best_setting, folds_of
from autopar.trainers.layout import even_bounds, is_even, schedule_of
from autopar.trainers.megatron import overlaps_experts
from autopar.trainers.reading import exported_plan, setting_of_plan
from autopar.validate.architecture import Architecture
from autopar.validate.models import graph_of

BATCH, GB = 32, 10**9


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A Llama-like model of 8 blocks."""
    return graph_of(Architecture(8, 2048, 16, 8, 5504, True, 32000, 2048, False, False), BATCH)


def cluster(gigabytes: float) -> Cluster:
    return parse("8xH100-80GB", memory_limit_bytes=int(gigabytes * GB))


def every_setting(trainer: Trainer) -> list[Setting]:
    """Every setting of the trainer's space on 8 devices with even stages and all blocks recomputed or none."""
    space, found = trainer.space, []
    ranges = [
        (1, 2, 4, 8) if space.tensor else (1,),
        (1, 2, 4, 8) if space.pipeline else (1,),
        (1, 2, 4, 8, 16, 32),
        space.zero,
        range(1, 9),
        (1, 2, 4) if space.replicate else (1,),
        space.activations,
    ]
    for tensor, pipeline, micro, zero, chunks, copies, kind in itertools.product(*ranges):
        data, odd = divmod(8, tensor * pipeline)
        whole = not odd and BATCH % (data * micro) == 0 and (pipeline > 1 or chunks == 1) and pipeline * chunks <= 8
        if not whole or (chunks > 1 and not (space.chunks and BATCH // (data * micro) % pipeline == 0)):
            continue
        if copies > 1 and (zero < 2 or data % copies or copies == data):
            continue
        s = Setting(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            context=1,
            expert=1,
            chunks=chunks,
            sequence=tensor > 1 and trainer is not ACCELERATE,
            zero=zero if data > 1 else 0,
            options=Options(),
            precision="bfloat16",
            global_batch=BATCH,
            microbatch=micro,
            facts=trainer.facts_of(tensor, 1),
            replicate=copies,
        )
        found.append(s.with_activations(kind))
    return found


def fastest(graph: Graph, devices: Cluster, trainer: Trainer) -> float:
    """The step time of the fastest setting that fits, each priced."""
    pricers, best = TrainerPricers(graph, devices, trainer), float("inf")
    for s in every_setting(trainer):
        if s.stages > 1 and not is_even(even_bounds(graph, s)):
            continue
        try:
            plan = pricers.plan(s)
        except AutoparError:
            continue
        if not plan.too_full:
            best = min(best, plan.prediction.step_time_s)
    return best


@pytest.mark.parametrize("limit", [60, 8, 4])
@pytest.mark.parametrize("trainer", [ACCELERATE, DEEPSPEED, TORCHTITAN, MEGATRON], ids=lambda trainer: trainer.name)
def test_no_setting_is_faster(graph: Graph, trainer: Trainer, limit: float):
    devices = cluster(limit)
    wanted = fastest(graph, devices, trainer)
    if wanted == float("inf"):
        with pytest.raises(InfeasibleError, match=f"no setting of {trainer.title} fits"):
            best_setting(graph, devices, trainer)
        return
    found = best_setting(graph, devices, trainer)
    step_s = found.plan.prediction.step_time_s
    assert not found.plan.too_full and found.evaluated <= found.families * 2
    assert step_s <= wanted * (1 + 1e-9)
    if not trainer.space.uneven and not trainer.space.some_blocks:
        assert step_s == pytest.approx(wanted, rel=1e-9)
    again = TrainerPricers(graph, devices, trainer).plan(found.setting)
    assert again.prediction.step_time_s == step_s


def test_an_interrupt_ends_the_search(graph: Graph):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        best_setting(graph, cluster(60), MEGATRON, options=SearchOptions(interrupt=interrupt))


@pytest.mark.parametrize(("limit", "families"), [(60, 0), (60, 1), (60, 20), (3, 0)])
def test_the_time_limit_ends_the_search_with_a_plan_and_a_true_bound(
    graph: Graph, limit: float, families: int, monkeypatch: pytest.MonkeyPatch
):
    """A clock of one second a family replaces the processor's; the first families do not fit in 3 GB."""
    all_families = sorted(
        choose._Choice(graph, cluster(limit), MEGATRON, {})._families(lambda: None),
        key=lambda family: family.estimate_s,
    )
    exact = best_setting(graph, cluster(limit), MEGATRON)
    assert exact.left == 0 and exact.bound_s == exact.plan.prediction.step_time_s
    priced: list[tuple[Setting, bool]] = []  # with whether there was a plan before
    evaluate = choose._Choice._evaluate

    def recorded(self: choose._Choice, s: Setting) -> None:
        priced.append((s, self.best is not None))
        evaluate(self, s)

    monkeypatch.setattr(choose._Choice, "_evaluate", recorded)
    monkeypatch.setattr(choose.time, "thread_time", lambda: float(len(priced)))
    found = best_setting(graph, cluster(limit), MEGATRON, options=SearchOptions(time_limit_s=families))
    step_s, at = found.plan.prediction.step_time_s, [family.setting for family in all_families].index(priced[-1][0])
    left = [family.bound_s for family in all_families[at + 1 :] if family.bound_s < step_s]
    assert not found.plan.too_full and found.families == exact.families == len(all_families)
    assert found.left == len(left) > 0 and found.bound_s == min([step_s, *left])
    assert found.bound_s <= exact.plan.prediction.step_time_s <= step_s
    assert not any(had_plan for _, had_plan in priced[families:])
    assert len(priced) == max(1, families) if limit == 60 else len(priced) > 1


def test_a_time_limit_does_not_hide_that_nothing_fits(graph: Graph):
    with pytest.raises(InfeasibleError, match="even the smallest one needs"):
        best_setting(graph, cluster(1), MEGATRON, options=SearchOptions(time_limit_s=0))


@pytest.mark.parametrize("limit", [40, 24])
def test_bounds_are_bounds_for_long_sequences(limit: float, monkeypatch: pytest.MonkeyPatch):
    """Attention takes most of the time; without bounds, every family is evaluated."""
    long = graph_of(Architecture(12, 2048, 16, 8, 5504, True, 32000, 16384, False, False), BATCH)
    pins = {"context": 1, "zero": 1}
    found = best_setting(long, cluster(limit), MEGATRON, pins).plan.prediction.step_time_s
    without_bounds(monkeypatch)
    assert best_setting(long, cluster(limit), MEGATRON, pins).plan.prediction.step_time_s == found


def test_bounds_are_bounds_for_exchanges_that_overlap_in_interleaved_pipelines(monkeypatch: pytest.MonkeyPatch):
    """Megatron hides exchanges of experts in a pipeline with virtual stages alone; 14 microbatches are two rounds of 7 over 4 stages."""
    sizes = Architecture(8, 2048, 16, 8, 5504, True, 32000, 4096, False, False, experts=8, experts_per_token=2)
    mixture, pins = graph_of(sizes, 112), {"tensor": 1, "pipeline": 4, "microbatch": 1, "expert": 8}
    devices = parse("8x4xA100-80GB")
    found = best_setting(mixture, devices, MEGATRON, pins)
    assert found.setting.chunks == 2 and overlaps_experts(found.setting)
    assert refusal(schedule_of(found.setting)) is not None
    pricers = TrainerPricers(mixture, devices, MEGATRON)  # whose pricers share what does not depend on the overlap
    alone = Pricer(mixture, pricers.cluster, "bfloat16", trainer=MEGATRON.model(found.setting, pricers.cluster))
    plan = pricers.parts(found.setting).evaluate(mixture, pricers.cluster, alone)
    assert plan.prediction == pricers.plan(found.setting).prediction == found.plan.prediction
    request = {"trainer": "megatron", "facts": sorted(found.setting.facts)}
    recorded = dataclasses.replace(found.plan, request=request)
    check_plan(json.loads(recorded.dumps()))
    (text,) = exported_plan(MEGATRON, recorded, mixture, devices).files.values()
    assert "--microbatch-group-size-per-virtual-pipeline-stage 7\n" in text
    with pytest.raises(MalformedFileError, match="equal rounds"):  # a plan for programs of autopar
        check_plan(json.loads(found.plan.dumps()))
    without_bounds(monkeypatch)
    assert best_setting(mixture, devices, MEGATRON, pins).plan.prediction == found.plan.prediction


def without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    families = choose._Choice._families
    monkeypatch.setattr(
        choose._Choice, "_families", lambda *args: (dataclasses.replace(f, bound_s=0.0) for f in families(*args))
    )
    monkeypatch.setattr(choose._Choice, "_is_slower", lambda self, s: False)


@pytest.mark.parametrize("trainer", [DEEPSPEED, MEGATRON], ids=lambda trainer: trainer.name)
def test_a_plan_fits_in_exactly_its_memory(trainer: Trainer):
    """Tied parameters, which one stage stores once, count once."""
    tied = graph_of(Architecture(4, 1024, 16, 8, 2752, True, 64000, 512, True, False), BATCH)
    pins = {"pipeline": 1, "activations": "keep"}
    found = best_setting(tied, cluster(60), trainer, pins)
    needed = found.plan.stages[0].memory.total
    again = best_setting(tied, parse("8xH100-80GB", memory_limit_bytes=needed), trainer, pins)
    assert again.setting == found.setting
    with pytest.raises(InfeasibleError):
        best_setting(tied, parse("8xH100-80GB", memory_limit_bytes=needed // 8), trainer, pins)


def test_pins_are_kept_and_others_refused(graph: Graph):
    found = best_setting(graph, cluster(60), MEGATRON, {"tensor": 4, "pipeline": 2, "zero": 0, "microbatch": 4})
    s = found.setting
    assert (s.tensor, s.pipeline, s.zero, s.microbatch, s.data) == (4, 2, 0, 4, 1)
    for pin in ({"zero": 3}, {"activations": "host"}):
        with pytest.raises(UsageError, match="Megatron-Core does not have it"):
            best_setting(graph, cluster(60), MEGATRON, pin)
    with pytest.raises(UsageError, match="tensor=2: DeepSpeed ZeRO has no tensor parallelism"):
        best_setting(graph, cluster(60), DEEPSPEED, {"tensor": 2})


@pytest.mark.parametrize("limit", [72, 20])
def test_the_best_setting_is_no_slower_than_one_of_the_same_precision_and_facts(graph: Graph, limit: float):
    facts = frozenset({"overlapped tensor"})
    best = best_setting(graph, cluster(limit), TORCHTITAN, {"precision": "float8", "facts": facts})
    assert best.setting.precision == "float8" and (best.setting.tensor == 1 or facts < best.setting.facts)
    pricers = TrainerPricers(graph, cluster(limit), TORCHTITAN)
    for s in every_setting(TORCHTITAN):
        plan = pricers.plan(
            dataclasses.replace(s, precision="float8", facts=s.facts | (facts if s.tensor > 1 else set()))
        )
        assert plan.too_full or best.plan.prediction.step_time_s <= plan.prediction.step_time_s * (1 + 1e-9)


def test_single_changes_are_faster_and_one_decision_each(graph: Graph):
    devices = cluster(60)
    pricers = TrainerPricers(graph, devices, MEGATRON)
    slow = next(
        s
        for s in every_setting(MEGATRON)
        if (s.tensor, s.pipeline, s.chunks, s.microbatch, s.zero, s.activations) == (8, 1, 1, 1, 0, "full")
    )
    now_s = pricers.plan(slow).prediction.step_time_s
    changes = best_changes(pricers, slow, now_s)
    assert 1 <= len(changes) <= 3
    times = [change.plan.prediction.step_time_s for change in changes]
    assert times == sorted(times) and times[-1] < now_s
    names = [change.words.partition(" ")[0] for change in changes]
    assert len(set(names)) == len(names) and "activations" in names
    best = best_setting(graph, devices, MEGATRON)
    assert times[0] >= best.plan.prediction.step_time_s


@pytest.mark.parametrize(
    ("trainer", "limit", "pins"),
    [
        (MEGATRON, 60, {"pipeline": 4, "microbatch": 1}),
        (MEGATRON, 5, {"pipeline": 2, "tensor": 2}),  # recomputes some blocks of each stage
        (MEGATRON, 4, {"context": 2}),
        (TORCHTITAN, 4, {"replicate": 2}),
        (TORCHTITAN, 3, {"pipeline": 2, "tensor": 2}),
        (DEEPSPEED, 4, {}),
        (ACCELERATE, 4, {"context": 2}),
    ],
    ids=lambda value: value.name if isinstance(value, Trainer) else str(value),
)
def test_the_configuration_of_a_plan_is_that_of_its_setting(
    graph: Graph, trainer: Trainer, limit: float, pins: dict[str, int]
):
    found = best_setting(graph, cluster(limit), trainer, pins)
    check_configuration(graph, trainer, found.setting, found.plan)


@pytest.mark.parametrize(
    ("trainer", "dense", "fields"),
    [
        (MEGATRON, 0, {"expert": 8, "tensor": 2, "folds": frozenset({"tensor"})}),
        (MEGATRON, 2, {"expert": 4, "context": 2, "folds": frozenset({"context"}), "activations": "selective"}),
        (MEGATRON, 2, {"expert": 2, "pipeline": 2, "cuts": (4,), "activations": "full", "recomputed": 1}),
        (MEGATRON, 2, {"expert": 2, "activations": "full", "recomputed": 1}),  # no block with experts is recomputed
        (TORCHTITAN, 0, {"expert": 8, "tensor": 2, "context": 2, "folds": frozenset({"tensor", "context"}), "zero": 3}),
    ],
)
def test_the_configuration_of_a_plan_with_experts_is_that_of_its_setting(
    trainer: Trainer, dense: int, fields: dict[str, Any]
):
    """The first ``dense`` blocks have no experts."""
    sizes = {"experts": 8, "experts_per_token": 2, "dense_layers": dense}
    mixture = graph_of(Architecture(6, 1024, 16, 8, 2752, True, 32000, 512, False, False, **sizes), BATCH)
    degrees = {name: fields.get(name, 1) for name in ("tensor", "pipeline", "context")}
    known: dict[str, Any] = {"expert": 1, "chunks": 1, "sequence": degrees["tensor"] > 1, "zero": 1, "microbatch": 1}
    known |= {"facts": trainer.facts_of(degrees["tensor"], fields["expert"]), "precision": "bfloat16"}
    rest = {name: value for name, value in fields.items() if name != "activations"}
    data = 8 // math.prod(degrees.values())
    options = Options(activations=fields.get("activations", "keep"))
    s = Setting(**(known | degrees | {"data": data, "options": options, "global_batch": BATCH} | rest))
    plan = TrainerPricers(mixture, cluster(60), trainer).plan(s)
    check_configuration(mixture, trainer, dataclasses.replace(s, cuts=s.cuts or ()), plan)


def check_configuration(graph: Graph, trainer: Trainer, s: Setting, plan: Plan) -> None:
    recorded = dataclasses.replace(plan, request={"facts": sorted(s.facts)})
    assert setting_of_plan(trainer, recorded) == s
    assert exported_plan(trainer, recorded, graph, cluster(60)) == trainer.export(s, graph, cluster(60))
    layer = recorded.layers[2]
    edited = dataclasses.replace(layer, strategy=layer.strategy.with_options(compile="layers"))
    layers = (*recorded.layers[:2], edited, *recorded.layers[3:])
    with pytest.raises(UsageError, match=f"{layer.name} differs from the other layers"):
        exported_plan(trainer, dataclasses.replace(recorded, layers=layers), graph, cluster(60))


def test_balanced_bounds_are_optimal():
    draw = random.Random(3)
    for _ in range(200):
        seconds = [draw.choice([0.0, 0.1, 1.0, 2.5]) for _ in range(draw.randint(2, 9))]
        stages = draw.randint(1, len(seconds))
        found = balanced_bounds(seconds, stages)
        assert found[0] == 0 and found[-1] == len(seconds) and all(a < b for a, b in itertools.pairwise(found))
        best = min(
            max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, len(seconds))))
            for cuts in itertools.combinations(range(1, len(seconds)), stages - 1)
        )
        assert max(sum(seconds[a:b]) for a, b in itertools.pairwise(found)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("trainer", "devices", "values", "expected"),
    [
        (MEGATRON, 8, {"expert": 4, "tensor": 2}, set()),  # by default Megatron's experts are tensor-parallel, too
        (MEGATRON, 8, {"expert": 8, "tensor": 8}, {"tensor"}),
        (MEGATRON, 8, {"expert": 4, "context": 2}, {"context"}),
        (MEGATRON, 8, {"tensor": 2}, set()),
        (TORCHTITAN, 8, {"expert": 8, "tensor": 2}, {"tensor"}),
    ],
)
def test_experts_lie_over_the_first_axes_that_their_degree_divides_into(
    trainer: Trainer, devices: int, values: dict[str, int], expected: set[str]
) -> None:
    assert folds_of(trainer, devices, values) == expected
