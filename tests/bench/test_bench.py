"""The benchmark: every hand-written program computes what one device does, and the arithmetic of the comparison."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_page
import pytest
import torch
from bench_page import markdown
from tiers import in_short, slow
from workers import WorkerPool

from autopar.bench.baselines import PIPELINES, HandTuned, HandTunedRecipe, _stage_of, recipes
from autopar.bench.contest import AUTOMATIC, BenchmarkSession, Contender, ContestResult
from autopar.bench.models import MODELS, BenchModel, _decoder, _wide
from autopar.bench.report import failures, table, verdict
from autopar.cli.console import plain_table
from autopar.errors import LaunchError, ProgramError
from autopar.measure import EXACT, compare
from autopar.memory import machine_memory_bytes
from autopar.timing import paired_ratio

SMALL: dict[str, BenchModel] = {
    subject.name: subject
    for subject in (
        _decoder("llama-5", width=128, layers=5, length=8, rows=8, vocabulary=64),
        _decoder("gpt-6", width=128, layers=6, length=8, rows=8, vocabulary=64, gpt=True),
        _wide("mlp-4", width=16, inner=32, layers=4, rows=8),
    )
}


def losses(model: str, recipe: dict[str, int | str], steps: int) -> list[float]:
    """In a worker: the losses of a few steps."""
    contender = HandTuned(SMALL[model], HandTunedRecipe(**recipe), lr=1e-2)  # type: ignore[arg-type]
    batch = SMALL[model].batch(0)
    return [contender.step(*batch) for _ in range(steps)]


def one_device(subject: BenchModel, steps: int) -> tuple[list[float], torch.nn.Module]:
    """The losses, and the module after the last step, with that step's gradients."""
    torch.manual_seed(0)
    module, batch = subject.build(), subject.batch(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = subject.loss_fn(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found, module


def in_float64(subject: BenchModel) -> BenchModel:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = subject.batch(seed)
        return (x.double(), y.double()) if x.is_floating_point() else (x, y)

    return dataclasses.replace(subject, build=lambda: subject.build().double(), batch=batch)


def trained(model: str, recipes: list[dict[str, Any]], steps: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """In a worker: the losses in float64, and this rank's parameters after the last step and gradients in it, of every recipe."""
    subject, answers = in_float64((SMALL | MODELS)[model]), []
    for recipe in recipes:
        contender = HandTuned(subject, HandTunedRecipe(**recipe), lr=1e-2)
        found: dict[str, torch.Tensor] = {}
        for stage in contender.modules:
            named = {
                f"blocks.{name[5:]}" if name.startswith("block") else name: p for name, p in stage.named_parameters()
            }
            found |= {name: p.detach() for name, p in named.items()}

            def keep(*_: object, found: Any = found, named: Any = named) -> None:
                found.update({f"gradient of {name}": p.grad for name, p in named.items()})

            contender.optimizer.register_step_pre_hook(keep)
        answers.append(([contender.step(*subject.batch(0)) for _ in range(steps)], found))
    return answers


def is_default(model: str, recipe: HandTunedRecipe) -> bool:
    """The small model has every recipe, a decoder those in two microbatches, the other decoder DDP in two."""
    of_decoders = recipe.microbatches == 2 and (model == "gpt-6" or recipe.sharding == "ddp" and recipe.tensor == 1)
    return model == "mlp-4" or recipe.bucket_mb == 1 or of_decoders


CASES = [(m, r) for m in SMALL for r in recipes(2, SMALL[m]) if r.pipeline == 1 and r.microbatches <= 2]
CASES.append(("llama-5", HandTunedRecipe(data=2, bucket_mb=1)))
CASES = [(m, r) if is_default(m, r) else slow(m, r) for m, r in CASES]


@pytest.mark.parametrize(("model", "recipe"), CASES, ids=lambda case: case if isinstance(case, str) else case.name)
def test_hand_tuned_programs_train_as_one_device_does(workers2: WorkerPool, model: str, recipe: HandTunedRecipe):
    ranks = workers2.run("test_bench:losses", model, recipe.to_dict(), 3)
    found = [sum(values) / len(values) for values in zip(*ranks, strict=True)]
    assert found == pytest.approx(one_device(SMALL[model], 3)[0], rel=1e-4)


def are_exact(workers: WorkerPool, processes: int, model: str, steps: int, most: int) -> set[tuple[str, int]]:
    """Compare every pipeline of up to ``most`` microbatches that is tried for a model with one device; the schedules."""
    subject = (SMALL | MODELS)[model]
    tried = [r for r in recipes(processes, subject) if r.pipeline == processes and r.microbatches <= most]
    losses0, module = one_device(in_float64(subject), steps)
    named = dict(module.named_parameters())
    expected = {n: p.detach() for n, p in named.items()} | {f"gradient of {n}": p.grad for n, p in named.items()}
    of_ranks = workers.run("test_bench:trained", model, [recipe.to_dict() for recipe in tried], steps, timeout_s=600)
    for recipe, answers in zip(tried, zip(*of_ranks, strict=True), strict=True):
        losses = next(losses for losses, _ in answers if losses[0] is not None)  # the last stage's
        assert losses == pytest.approx(losses0, rel=EXACT), recipe.name
        found = {name: value for _, values in answers for name, value in values.items()}
        error = compare(losses[-1], found, losses0[-1], expected)
        assert error.exact, (recipe.name, error)
    return {(recipe.schedule, recipe.chunks) for recipe in tried}


@pytest.mark.parametrize("model", in_short(SMALL, "mlp-4"))
def test_pipelines_are_exact(workers2: WorkerPool, model: str):
    """Losses, gradients and parameters of two steps in float64, under every schedule, in one round of microbatches and in two."""
    assert are_exact(workers2, 2, model, steps=2, most=4) == set(PIPELINES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_pipelines_of_the_benchmark_are_exact(workers2: WorkerPool, workers4: WorkerPool, model: str):
    assert are_exact(workers2, 2, model, steps=1, most=2) == set(PIPELINES)
    assert {("1f1b", 1), ("zero-bubble", 1)} <= are_exact(workers4, 4, model, steps=1, most=4)


def test_zero_bubble_is_refused_where_torch_reduces_nothing():
    for schedule, chunks in (("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)):
        with pytest.raises(AssertionError, match="skips the hooks of DDP and FSDP"):
            HandTunedRecipe(data=2, pipeline=2, microbatches=2, schedule=schedule, chunks=chunks)
    with pytest.raises(AssertionError, match="'zerobubble' is none of 1f1b"):
        HandTunedRecipe(pipeline=2, schedule="zerobubble")
    with pytest.raises(AssertionError, match="without a pipeline"):
        HandTunedRecipe(data=2, schedule="interleaved-1f1b", chunks=2)


def replica(schedule: str) -> float:
    """In a worker: a parameter's norm after a step of DDP over two pipelines, although the recipe refuses that."""
    recipe = HandTunedRecipe(pipeline=2, microbatches=2, schedule=schedule)
    object.__setattr__(recipe, "data", 2)
    contender = HandTuned(SMALL["mlp-4"], recipe, lr=1e-2)
    contender.step(*SMALL["mlp-4"].batch(0))
    return float(next(contender.modules.parameters()).detach().norm())


@pytest.mark.slow
def test_torch_reduces_nothing_under_zero_bubble(workers4: WorkerPool):
    """The reason of the refusal; when torch reduces, it can go."""
    for schedule, reduces in (("1f1b", True), ("zero-bubble", False)):
        a, b, c, d = workers4.run("test_bench:replica", schedule)
        assert ((a == b) and (c == d)) is reduces and a != c


@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
def test_ranks_of_a_pipeline_have_all_blocks_and_equal_shares(schedule: str, chunks: int):
    """But for one block, where they do not divide."""
    for blocks in range(8, 20):
        recipe, module = (
            HandTunedRecipe(pipeline=4, schedule=schedule, chunks=chunks),
            _wide("w", 2, 2, blocks, 8).build(),
        )
        stages = {number: rank for rank in range(4) for number in recipe.stages(rank)}
        names = [list(dict(_stage_of(module, i, len(stages)).named_children())) for i in range(len(stages))]
        assert sum(names, []) == ["embedding", *(f"block{i}" for i in range(blocks)), "head"]
        counts = [sum(name.startswith("block") for name in of_stage) for of_stage in names]
        shares = [sum(counts[number] for number in recipe.stages(rank)) for rank in range(4)]
        assert max(shares) - min(shares) <= 1 and min(counts) > 0


def test_four_processes_get_mixtures():
    names = [recipe.name for recipe in recipes(4, MODELS["llama"])]
    assert "fsdp 2 x tensor 2" in names and "ddp 2 x pipeline 2, 2 microbatches" in names
    assert len(names) == len(set(names)) and not any(name.count(" x ") > 1 for name in names)
    assert "pipeline 4, zero-bubble, 4 microbatches" in names
    assert not any(
        "chunks" in name or ("zero-bubble" in name and " x " in name) for name in names
    )  # 6 blocks, no 8 stages
    assert "pipeline 4, zbv, 2 chunks, 8 microbatches" in [recipe.name for recipe in recipes(4, MODELS["deep-gpt"])]


def test_ratio_is_paired():
    """A round that was slow for both does not widen the interval."""
    ratio, (low, high) = paired_ratio((1.0, 10.0, 2.0), (2.0, 20.0, 4.0), 0)
    assert (ratio, low, high) == (0.5, 0.5, 0.5)
    ratio, (low, high) = paired_ratio((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), 0)
    assert (ratio, low, high) == (2.0, 1.0, 3.0)


def test_who_stands_to_the_end_has_run_every_round():
    """Who is left out stays out, however the others' times go on: rounds would be paired with others' rounds."""
    session = object.__new__(BenchmarkSession)
    session.required = {AUTOMATIC}
    session.remaining, session.errors = [AUTOMATIC, "good", "slow", "broken"], {"broken": LaunchError("it broke")}
    session.rounds = {AUTOMATIC: [9.0], "good": [1.0], "slow": [2.1], "broken": []}
    session.drop_slow(slower_than=2.0)
    assert session.remaining == [AUTOMATIC, "good"]
    session.rounds = {AUTOMATIC: [9.0, 9.0], "good": [1.0, 5.0], "slow": [2.1], "broken": []}
    session.drop_slow(slower_than=2.0)
    assert session.remaining == [AUTOMATIC, "good"]
    session.rounds = {AUTOMATIC: [0.1, 0.1], "good": [1.0, 5.0], "slow": [2.1], "broken": []}
    session.drop_slow(slower_than=2.0)
    assert session.remaining == [
        AUTOMATIC,
        "good",
    ]  # an automatic program that is far faster leaves one to compare with
    with pytest.raises(ValueError):
        paired_ratio((1.0, 2.0, 3.0), (1.0, 1.0), 0)


def test_a_loss_that_is_nan_is_no_rank_without_a_loss():
    session = object.__new__(BenchmarkSession)
    session.batch_file, session.steps, session.rounds, session.losses = Path("batch.pt"), 1, {"a": [], "b": []}, {}
    session._open, session._bytes, session._room_bytes, session.peak_bytes = ["a", "b"], {}, math.inf, {}
    session.device = "cuda"
    of_ranks: list[list[float | None]] = [[None, None], [3.0, 1.0], [1.0, 1.0]]
    session.call = lambda *_, **__: [  # type: ignore[method-assign]
        {"seconds": [1.0, 1.0], "losses": losses, "peak_bytes": 0} for losses in of_ranks
    ]
    session.measure("a")
    assert session.losses == {"a": [2.0, 1.0]}
    of_ranks[1][0] = float("nan")
    session.measure("b")
    assert math.isnan(session.losses["b"][0])
    for ours in ("a", "b"):
        with pytest.raises(ProgramError, match="the first loss of .* is .*nan"):
            session.check_losses(ours)


def test_programs_are_closed_where_the_machine_has_little_memory(monkeypatch: pytest.MonkeyPatch):
    session = object.__new__(BenchmarkSession)
    session.device, session._open, session._bytes, session._room_bytes = "cpu", ["a", "b", "c"], {}, math.inf
    closed: list[str] = []
    session._processes = SimpleNamespace(call=lambda _, name, **__: closed.append(name))  # type: ignore[assignment]
    free = iter((0.05, 0.09, 0.2))
    monkeypatch.setattr("autopar.timing.session.available_memory_bytes", lambda: next(free) * machine_memory_bytes())
    session._make_room("b")
    assert closed == ["a", "c"] and session._open == ["b"]
    session.device = "cuda"
    session._make_room("d")
    assert session._open == ["b"]


def test_reports_say_what_was_measured():
    ours, theirs = Contender(AUTOMATIC, None, 0.9, (1.0, 1.2)), Contender("ddp 2", {"data": 2}, None, (2.0, 2.4))
    result = ContestResult("toy", 2, 64, {}, (ours, theirs), 0.5, (0.4, 0.6), "ddp 2")
    assert table(result, plain_table).row_count == 2 and failures(result) == []
    assert "0.50" in verdict(result) and "ddp 2" in verdict(result)
    line = result.to_json()
    assert line["automatic_s"] == pytest.approx(1.1) and line["best_hand_tuned_s"] == pytest.approx(2.2)
    assert line["candidates"] == 1
    row = "| toy | 2 | 1100 ms (1000 to 1200) | 2200 ms (2000 to 2400): ddp 2, of 1 | 0.50 (0.40 to 0.60) | 2 of 2 rounds |"
    assert row in markdown([line])


def test_what_did_not_run_is_said():
    ours, theirs = Contender(AUTOMATIC, None, 0.9, (1.0,)), Contender("fsdp 2", {}, None, (), "rank 1: it broke\nhere")
    result = ContestResult("toy", 2, 64, {}, (ours, theirs), 0.5, (0.4, 0.6), "ddp 2")
    assert table(result, plain_table).row_count == 1 and failures(result) == ["fsdp 2 did not run: rank 1: it broke"]


def test_the_pages_are_what_was_measured():
    assert bench_page.PAGE.read_text() == bench_page.page()
    assert bench_page.README.read_text() == bench_page.readme(bench_page.README.read_text())
