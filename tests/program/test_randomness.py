"""Dropout in distributed programs: a function of the seed, drawn where data differ, the same where they are the same."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import Float64Everywhere, capture
from autopar.emit import emit
from autopar.graph import Graph
from autopar.measure import EXACT, compare
from autopar.program import kernels as program_kernels
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate

PIPELINE: dict[str, Any] = {"pipeline": 2, "microbatches": 2, "schedule": "1f1b"}
BOTH_WAYS: dict[str, Any] = {"pipeline": 2, "microbatches": 4, "schedule": "chimera"}
STEPS = 2


def gpt2(hidden: float = 0.0, attention: float = 0.0) -> nn.Module:
    """The same weights every time, in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": hidden, "embd_pdrop": hidden, "attn_pdrop": attention}
    config = GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=8, vocab_size=32, use_cache=False, **drops)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double().train()


@functools.cache
def dropping(hidden: float, attention: float) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """A small GPT-2 whose embedding and head share their weight, with dropout: the graph, the state dict, the batch."""
    model = gpt2(hidden, attention)
    torch.manual_seed(0)
    ids = torch.randint(32, (8, 8))
    batch = {"input_ids": ids, "labels": ids.clone()}
    with Float64Everywhere():
        graph = annotate(capture(model, batch, precision="float64"))
    return graph, {name: value.detach().clone() for name, value in model.state_dict().items()}, batch


def run(
    pool: WorkerPool, folder: Path, seeds: list[int], drops: tuple[float, float] = (0.25, 0.25), **plan: Any
) -> Any:
    """For every rank and seed: the losses of some steps without updates, what was drawn, and (on rank 0) the last gradients."""
    graph, state, batch = dropping(*drops)
    emit(graph, manual_plan(graph, **plan), folder)
    return pool.run("test_randomness:steps", str(folder), state, batch, seeds)


def steps(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor], seeds: list[int]) -> list[Any]:
    """In a worker: see ``run``."""
    with program_modules(folder):
        runtime, kernels = import_runtime(folder), importlib.import_module("runtime.kernels")
        program = runtime.load(folder)
        world = runtime.start(program, device="cpu", timeout_s=60)
        drawn: dict[str, list[Any]] = {"hidden": [], "attention": []}
        dropout, attention = kernels.dropout, kernels.attention

        def spy_dropout(x: Tensor, p: float, seed: int) -> Tensor:
            out = dropout(x, p, seed)
            drawn["hidden"].append((out != 0).tolist())
            return out

        def spy_attention(*args: Any, seed: int | None = None, **kwargs: Any) -> Tensor:
            drawn["attention"].append(seed)
            return attention(*args, seed=seed, **kwargs)

        kernels.dropout, kernels.attention = spy_dropout, spy_attention
        answers = []
        for seed in seeds:
            trainer = runtime.Trainer(
                program, world, optimizer=functools.partial(torch.optim.SGD, lr=0.0), state=state, seed=seed
            )
            for found in drawn.values():
                found.clear()
            losses = [trainer.step(batch) for _ in range(STEPS)]
            answers.append((losses, {kind: list(found) for kind, found in drawn.items()}, trainer.gradients()))
        return answers


def distinct(drawn: list[Any]) -> bool:
    return len({str(each) for each in drawn}) == len(drawn)


PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2, "zero": 2, "microbatches": 2},
    "tensor": {"tensor": 2},
    "tensor+sequence": {"tensor": 2, "sequence": True},
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "pipeline": PIPELINE,
    "both ways": BOTH_WAYS,
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_is_a_function_of_its_seed(plan: str, workers2: WorkerPool, tmp_path: Path) -> None:
    first, again, other = run(workers2, tmp_path, [1, 1, 2], **PLANS[plan])[0]
    assert first[0] == again[0]  # bit by bit
    assert all(torch.equal(again[2][name], gradient) for name, gradient in first[2].items())
    assert len({*first[0], *other[0]}) == 2 * STEPS  # a step draws anew, and so does another seed


@pytest.mark.parametrize(
    ("plan", "hidden", "attention"),
    [("data", "differ", "differ"), ("tensor", "agree", "differ"), ("tensor+sequence", "differ", "differ")],
)
def test_ranks_agree_where_they_hold_the_same(
    plan: str, hidden: str, attention: str, workers2: WorkerPool, tmp_path: Path
) -> None:
    (_, mine, _), (_, theirs, _) = (answers[0] for answers in run(workers2, tmp_path, [1], **PLANS[plan]))
    microbatches = PLANS[plan].get("microbatches", 1)
    for kind, relation, ops in (("hidden", hidden, 5), ("attention", attention, 2)):
        assert len(mine[kind]) == len(theirs[kind]) == ops * microbatches * STEPS
        assert distinct(mine[kind])  # layers, microbatches and steps draw anew
        same = [a == b for a, b in zip(mine[kind], theirs[kind], strict=True)]
        assert all(same) if relation == "agree" else not any(same)


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("data", {"recompute": True}),
        ("tensor", {"recompute": True}),
        ("pipeline", {"recompute": True}),
        ("both ways", {"recompute": True}),
        ("tensor", {"segment": 3}),
    ],
    ids=["data", "tensor", "pipeline", "both ways", "tensor, layers as one"],
)
def test_recomputation_repeats_the_masks(plan: str, how: dict[str, Any], workers2: WorkerPool, tmp_path: Path) -> None:
    kept = run(workers2, tmp_path / "kept", [1], **PLANS[plan])
    again = run(workers2, tmp_path / "again", [1], **PLANS[plan], **how)
    (losses, drawn, gradients), (losses_again, drawn_again, gradients_again) = kept[0][0], again[0][0]
    assert compare(losses_again[-1], gradients_again, losses[-1], gradients).value <= EXACT
    assert losses_again == pytest.approx(losses, rel=EXACT)
    assert len(drawn_again["attention"]) == 2 * len(drawn["attention"])
    assert set(drawn_again["attention"]) == set(drawn["attention"])


@pytest.mark.parametrize(
    ("plan", "drops"),
    [("tensor", (0.25, 0.0)), ("pipeline", (0.25, 0.25)), ("both ways", (0.25, 0.25))],
    ids=["tensor", "pipeline", "both ways"],
)
def test_masks_do_not_depend_on_the_plan_where_nothing_random_is_sharded(
    plan: str, drops: tuple[float, float], workers2: WorkerPool, tmp_path: Path
) -> None:
    """Then one device with the same seed and microbatches computes the same: the masks, and all that is done with them, are right."""
    microbatches = PLANS[plan].get("microbatches", 1)
    with WorkerPool(1) as one:
        losses, _, gradients = run(one, tmp_path / "one", [1], drops, microbatches=microbatches)[0][0]
    found, _, gradients_found = run(workers2, tmp_path / "two", [1], drops, **PLANS[plan])[0][0]
    assert found == pytest.approx(losses, rel=EXACT)
    assert compare(found[-1], gradients_found, losses[-1], gradients).value <= EXACT


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
def test_without_dropout_the_losses_are_eager_ones(plan: str, workers2: WorkerPool, tmp_path: Path) -> None:
    losses, drawn, gradients = run(workers2, tmp_path, [1], (0.0, 0.0), **PLANS[plan])[0][0]
    assert not drawn["hidden"] and not any(drawn["attention"])
    model = gpt2()
    with Float64Everywhere():
        loss = model(**dropping(0.0, 0.0)[2]).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert losses == pytest.approx([loss.item()] * STEPS, rel=EXACT)
    assert compare(losses[-1], gradients, loss.item(), expected).value <= EXACT


def test_dropout_of_everything_is_zero() -> None:
    x = torch.ones(4, requires_grad=True)
    dropped = program_kernels.dropout(x, 1.0, 0)
    dropped.sum().backward()
    assert not dropped.any() and x.grad is not None and not x.grad.any()


# -- tied weights, clipped ---------------------------------------------------------------------------------------------

MAX_NORM = 0.5
OPTIMIZERS = {"sgd": functools.partial(torch.optim.SGD, lr=0.5), "adamw": functools.partial(torch.optim.AdamW, lr=0.01)}


def train(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor], optimizer: str) -> Any:
    """In a worker: the losses of some clipped steps, and the parameters after them."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device="cpu", timeout_s=60)
        trainer = runtime.Trainer(program, world, optimizer=OPTIMIZERS[optimizer], state=state, max_norm=MAX_NORM)
        return [trainer.step(batch) for _ in range(STEPS)], trainer.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["pipeline", "both ways"])
def test_a_weight_of_two_stages_counts_once_in_the_norm(
    plan: str, optimizer: str, workers2: WorkerPool, tmp_path: Path
) -> None:
    graph, state, batch = dropping(0.0, 0.0)
    emit(graph, manual_plan(graph, **PLANS[plan]), tmp_path)
    losses, trained = workers2.run("test_randomness:train", str(tmp_path), state, batch, optimizer)[0]
    model = gpt2()
    update = OPTIMIZERS[optimizer](model.parameters())
    for found in losses:
        update.zero_grad()
        with Float64Everywhere():
            loss = model(**batch).loss
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
        update.step()
        assert found == pytest.approx(loss.item(), rel=EXACT)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=EXACT, atol=EXACT)
