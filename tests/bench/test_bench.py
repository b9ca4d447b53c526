"""The benchmark: every hand-written program computes what one device does, and the arithmetic of the comparison."""

from __future__ import annotations

import bench_page
import pytest
import torch
from bench_page import markdown
from workers import WorkerPool

from autopar.bench.baselines import HandTuned, Recipe, recipes
from autopar.bench.contest import AUTOMATIC, Arena, Contender, Result, paired_ratio
from autopar.bench.models import MODELS, Subject, _decoder, _wide
from autopar.bench.report import failures, table, verdict
from autopar.cli.console import plain_table

SMALL: dict[str, Subject] = {
    "llama": _decoder("llama", width=128, layers=2, length=8, rows=8, vocabulary=64),
    "gpt": _decoder("gpt", width=128, layers=2, length=8, rows=8, vocabulary=64, gpt=True),
    "wide-mlp": _wide("wide-mlp", width=16, inner=32, layers=2, rows=8),
}


def losses(model: str, recipe: dict[str, int | str], steps: int) -> list[float]:
    """In a worker: the losses of a few steps."""
    contender = HandTuned(SMALL[model], Recipe(**recipe), lr=1e-2)  # type: ignore[arg-type]
    batch = SMALL[model].batch(0)
    return [contender.step(*batch) for _ in range(steps)]


def one_device(model: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    module, batch = SMALL[model].build(), SMALL[model].batch(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = SMALL[model].loss_fn(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


CASES = [(model, recipe) for model in SMALL for recipe in recipes(2, SMALL[model]) if recipe.microbatches <= 2]
CASES.append(("llama", Recipe(data=2, bucket_mb=1)))


@pytest.mark.parametrize(("model", "recipe"), CASES, ids=lambda case: case if isinstance(case, str) else case.name)
def test_hand_tuned_programs_train_as_one_device_does(workers2: WorkerPool, model: str, recipe: Recipe):
    ranks = workers2.run("test_bench:losses", model, recipe.to_dict(), 3)
    found = [sum(values) / len(values) for values in zip(*ranks, strict=True)]
    if recipe.pipeline > 1:
        found = ranks[-1]
    assert found == pytest.approx(one_device(model, 3), rel=1e-4)


def test_four_processes_get_mixtures():
    names = [recipe.name for recipe in recipes(4, MODELS["llama"])]
    assert "fsdp 2 x tensor 2" in names and "ddp 2 x pipeline 2, 2 microbatches" in names
    assert len(names) == len(set(names)) and not any(name.count(" x ") > 1 for name in names)


def test_ratio_is_paired():
    """A round that was slow for both does not widen the interval."""
    ratio, (low, high) = paired_ratio((1.0, 10.0, 2.0), (2.0, 20.0, 4.0), 0)
    assert (ratio, low, high) == (0.5, 0.5, 0.5)
    ratio, (low, high) = paired_ratio((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), 0)
    assert (ratio, low, high) == (2.0, 1.0, 3.0)


def test_who_stands_to_the_end_has_run_every_round():
    """Who is left out stays out, however the others' times go on: rounds would be paired with others' rounds."""
    arena = object.__new__(Arena)
    arena._emitted = {AUTOMATIC}
    arena.standing, arena.errors = [AUTOMATIC, "good", "slow", "broken"], {"broken": "it broke"}
    arena.rounds = {AUTOMATIC: [9.0], "good": [1.0], "slow": [2.1], "broken": []}
    arena.leave_out(slower_than=2.0)
    assert arena.standing == [AUTOMATIC, "good"]
    arena.rounds = {AUTOMATIC: [9.0, 9.0], "good": [1.0, 5.0], "slow": [2.1], "broken": []}
    arena.leave_out(slower_than=2.0)
    assert arena.standing == [AUTOMATIC, "good"]
    arena.rounds = {AUTOMATIC: [0.1, 0.1], "good": [1.0, 5.0], "slow": [2.1], "broken": []}
    arena.leave_out(slower_than=2.0)
    assert arena.standing == [AUTOMATIC, "good"]  # an automatic program that is far faster leaves one to compare with
    with pytest.raises(ValueError):
        paired_ratio((1.0, 2.0, 3.0), (1.0, 1.0), 0)


def test_reports_say_what_was_measured():
    ours, theirs = Contender(AUTOMATIC, None, 0.9, (1.0, 1.2)), Contender("ddp 2", {"data": 2}, None, (2.0, 2.4))
    result = Result("toy", 2, 64, {}, (ours, theirs), 0.5, (0.4, 0.6), "ddp 2")
    assert table(result, plain_table).row_count == 2 and failures(result) == []
    assert "0.50" in verdict(result) and "ddp 2" in verdict(result)
    line = result.to_json()
    assert line["automatic_s"] == pytest.approx(1.1) and line["best_hand_tuned_s"] == pytest.approx(2.2)
    assert line["candidates"] == 1
    assert "| toy | 2 | 1100 ms | 2200 ms: ddp 2, of 1 | 0.50 (0.40 to 0.60) |" in markdown([line])


def test_what_did_not_run_is_said():
    ours, theirs = Contender(AUTOMATIC, None, 0.9, (1.0,)), Contender("fsdp 2", {}, None, (), "rank 1: it broke\nhere")
    result = Result("toy", 2, 64, {}, (ours, theirs), 0.5, (0.4, 0.6), "ddp 2")
    assert table(result, plain_table).row_count == 1 and failures(result) == ["fsdp 2 did not run: rank 1: it broke"]


def test_the_pages_are_what_was_measured():
    assert bench_page.PAGE.read_text() == bench_page.page()
    assert bench_page.README.read_text() == bench_page.readme(bench_page.README.read_text())
