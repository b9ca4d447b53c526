"""Pairs of passes under DualPipeV: they run in turns, all-to-alls of one under the computation of the other, and compute what they compute
one after the other."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from exactness import make_subject, subject
from expert_models import mixtral
from functorch.compile import make_boxed_func
from tiers import slow
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from workers import WorkerPool

from autopar.checks.nccl.records import Operation, RankTrace, Wait
from autopar.data_files import MalformedFileError
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.measure import EXACT
from autopar.plan_schema import check_plan
from autopar.program.pairs import BACKWARD, FORWARD, Turns, _Schedule
from autopar.program.tracing import COMMUNICATION, COMPUTATION, PAIRED, PAIRED_KEY, action_name
from autopar.report.trace import read_trace
from autopar.run.folder import import_runtime, program_modules
from autopar.schedules import Schedule
from autopar.schedules.orders import device_groups
from autopar.search import SearchOptions
from autopar.search.manual import make_mesh, manual_plan
from autopar.search.options import pins_by_layer
from autopar.verify import remote
from autopar.verify.case import compare_step
from autopar.verify.recording import Workers, record

PIPELINE: dict[str, Any] = {"pipeline": 2, "chunks": 2, "microbatches": 4, "schedule": "dualpipev"}
PINS = {**PIPELINE, "expert": 2}
CUTS = (2, 3, 4)
"""One mixture in each stage."""


# -- turns ------------------------------------------------------------------------------------------------------------


def in_turns(forward: list[Any], backward: list[Any]) -> tuple[list[str], BaseException | None]:
    """What two passes log, each of which hands over after each entry; an entry that is an error is raised."""
    turns, log = Turns(), []

    def logging(side: int, entries: list[Any]) -> None:
        for entry in entries:
            time.sleep(0.001)
            if isinstance(entry, Exception):
                raise entry
            log.append(entry)
            turns.hand_over(side)
        log.append("end")

    beside = threading.Thread(target=turns.run, args=(BACKWARD, lambda: logging(BACKWARD, backward)))
    beside.start()
    turns.run(FORWARD, lambda: logging(FORWARD, forward))
    beside.join(10)
    assert not beside.is_alive()
    return log, turns.error


def test_the_backward_begins_and_the_longer_pass_goes_on_alone() -> None:
    assert in_turns(["f0"], ["b0", "b1", "b2"])[0] == ["b0", "f0", "b1", "end", "b2", "end"]
    assert in_turns(["f0", "f1"], [])[0] == ["end", "f0", "f1", "end"]
    assert in_turns([], ["b0", "b1"])[0] == ["b0", "end", "b1", "end"]


@pytest.mark.parametrize("side", [FORWARD, BACKWARD])
def test_a_pass_that_fails_ends_the_other_at_its_next_turn(side: int) -> None:
    error = ValueError("one rank's fault")
    passes = [["f0", error, "f2"], ["b0", "b1", "b2"]] if side == FORWARD else [["f0", "f1"], ["b0", error]]
    log, found = in_turns(*passes)
    assert found is error and "end" not in log and not {"f2", "b2"} & set(log)


def test_a_recomputation_in_the_backward_does_not_hand_over() -> None:
    turns, log = Turns(), []

    def backward() -> None:
        turns.hand_over(FORWARD)
        log.append("backward")

    beside = threading.Thread(target=turns.run, args=(BACKWARD, backward))
    beside.start()
    turns.run(FORWARD, lambda: log.append("forward"))
    beside.join(10)
    assert log == ["backward", "forward"]


def test_a_backward_that_cannot_enter_its_mesh_ends_the_pair() -> None:
    """``set_stream`` may fail in the same place."""

    def in_mesh() -> AbstractContextManager[None]:
        raise ValueError("no mesh")

    schedule: Any = object.__new__(_Schedule)
    schedule.__dict__ |= {
        "fwd_recv_ops": {},
        "bwd_recv_ops": {},
        "_stages": [SimpleNamespace(device=torch.device("cpu"))],
    }
    schedule.__dict__ |= {"in_mesh": in_mesh, "_thread": ThreadPoolExecutor(1)}
    one = SimpleNamespace(stage_index=0, microbatch_index=0)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            schedule._run_pair(SimpleNamespace(sub_actions=(one, one)), None)
        except ValueError as error:
            errors.append(error)

    beside = threading.Thread(target=run, daemon=True)
    beside.start()
    beside.join(10)
    assert [str(error) for error in errors] == ["no mesh"]


# -- plans ------------------------------------------------------------------------------------------------------------


def test_pairs_need_a_schedule_that_pairs_passes() -> None:
    graph, pins = subject("mixtral").graph, {**PINS, "overlap": "pairs"}
    data = manual_plan(graph, **pins).to_json()
    check_plan(data)
    with pytest.raises(MalformedFileError, match="overlap pairs under the schedule zbv"):
        check_plan({**data, "schedule": "zbv"})
    with pytest.raises(UsageError, match="overlap=pairs, which needs a pinned schedule"):
        pins_by_layer(graph, SearchOptions(overlap="pairs"))
    for schedule in ("1f1b", "zbv"):
        with pytest.raises(UsageError, match=f"overlap=pairs cannot be combined with schedule={schedule}"):
            manual_plan(graph, **{**pins, "schedule": schedule})


# -- programs ---------------------------------------------------------------------------------------------------------


def gradients(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """In a worker: the loss and the gradients of a second step, which is traced."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        trainer.forward_backward(batch)
        loss = trainer.traced(lambda: trainer.forward_backward(batch), f"{folder}/trace.json")
        return loss, trainer.gradients()


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"zero": 3, "activations": "full"},
        {"mesh": make_mesh(("relay", 2))},
        slow({"zero": 2, "reduce": "step"}),
        slow({"zero": 1, "activations": "selective"}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_bitwise_those_of_one_pass_after_the_other(
    pins: dict[str, Any], workers4: WorkerPool, tmp_path: Path
) -> None:
    """``verify``'s cases compare them with eager PyTorch."""
    given, found = subject("mixtral"), []
    for value in ("pairs", "none"):
        folder = tmp_path / value
        plan = manual_plan(given.graph, overlap=value, cuts=CUTS, **(PIPELINE if "mesh" in pins else PINS), **pins)
        emit(given.graph, plan, folder)
        assert (folder / "runtime" / "pairs.py").is_file() == (value == "pairs")
        found.append(
            workers4.run("test_pairs:gradients", str(folder), dict(given.state), dict(given.batch), timeout_s=120)
        )
        check_trace(folder / "trace.json", plan.sized_schedule, in_turns=value == "pairs")
    for (loss, ours), (other, theirs) in zip(*found, strict=True):
        assert loss == other and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def compiling_gradients(
    folder: str, state: str, batch: dict[str, Tensor]
) -> tuple[tuple[float, dict[str, Tensor], dict[str, Tensor]], set[tuple[str, bool]]]:
    """In a worker: the step that verification compares, and for each graph whether it is a forward or a backward one, and whether the
    thread of paired backward passes compiled it. The first pair compiles anew."""
    found: set[tuple[str, bool]] = set()

    def compiler(side: str, gm: torch.fx.GraphModule, _: Any) -> Any:
        found.add((side, threading.current_thread() is not threading.main_thread()))
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    forward, backward = (functools.partial(compiler, side) for side in ("forward", "backward"))
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=backend)):
        return remote.gradients(folder, state, batch), found


@pytest.mark.parametrize(
    "pins",
    [
        {},
        slow({"zero": 3, "activations": "full"}),
        slow({"zero": 1}),
        slow({"zero": 2, "activations": "selective"}),
        slow({"mesh": make_mesh(("relay", 2))}),
    ],
    ids=str,
)
def test_both_passes_of_a_pair_compile_layers(pins: dict[str, Any], workers4: WorkerPool, tmp_path: Path) -> None:
    """While one pass waits for its turn, the other one compiles what it runs: forward graphs, those of a recomputation, and backward
    graphs. A pass that waits inside of a lock of the compiler would stop both; the limit is a multiple of what the step takes."""
    given, found = subject("mixtral"), {}
    torch.save(given.state, tmp_path / "initial.pt")
    for overlap in ("pairs", "none") if pins else ("pairs",):
        folder = tmp_path / overlap
        given_pins = {**(PIPELINE if "mesh" in pins else PINS), **pins, "overlap": overlap}
        emit(given.graph, manual_plan(given.graph, compile="layers", cuts=CUTS, **given_pins), folder)
        if overlap == "pairs":
            path = folder / "runtime" / "pairs.py"
            text, count = re.subn(
                r"(        global _turns\n)(        forward)", r"\1        forget_compiled()\n\2", path.read_text()
            )
            assert count == 1
            path.write_text(f"{text}\n\nforget_compiled = functools.cache(torch._dynamo.reset)\n")
        found[overlap] = workers4.run(
            "test_pairs:compiling_gradients", str(folder), str(tmp_path / "initial.pt"), given.batch, timeout_s=120
        )
    where = set().union(*(threads for _, threads in found["pairs"]))
    assert where >= {("forward", False), ("backward", False), ("backward", True)}
    assert (("forward", True) in where) == ("activations" in pins)
    error = compare_step(given, *found["pairs"][0][0])
    assert error.value <= EXACT, error
    if pins:
        (loss, gradients, _), (other_loss, others, _) = (found[overlap][0][0] for overlap in ("pairs", "none"))
        assert loss == other_loss and all(torch.equal(gradients[name], others[name]) for name in gradients)


def check_trace(path: Path, schedule: Schedule, in_turns: bool) -> None:
    """A trace has all actions of all ranks: those of pairs that run in turns are marked, and those of one track do not overlap."""
    actions = [event for event in read_trace(path) if event["ph"] == "X" and event["tid"] != COMMUNICATION]
    for rank in range(4):
        mine = sorted((event for event in actions if event["pid"] == 1 + rank), key=lambda event: event["ts"])
        groups = [*device_groups(schedule, rank // 2)]
        assert {event["name"] for event in mine} == {action_name(*one) for group in groups for one in group}
        assert len(mine) == sum(map(len, groups))
        marked = {event["name"] for event in mine if PAIRED_KEY in event["args"]}
        assert marked == {action_name(*one) for group in groups for one in group if len(group) > 1 and in_turns}
        assert {event["name"] for event in mine if event["tid"] == PAIRED} == {
            name for name in marked if name.startswith("backward")
        }
        for track in (COMPUTATION, PAIRED):
            own = [event for event in mine if event["tid"] == track]
            assert all(one["ts"] + one["dur"] <= other["ts"] + 0.01 for one, other in itertools.pairwise(own))


def most_in_flight(trace: RankTrace) -> int:
    """The largest number of all-to-alls between their issue and their wait."""
    flying: set[int] = set()
    most = 0
    for event in trace.events:
        if isinstance(event, Operation) and event.kind == "all_to_all":
            flying.add(event.index)
        elif isinstance(event, Wait):
            flying.discard(event.index)
        most = max(most, len(flying))
    return most


RELAYED = {"mesh": make_mesh(("relay", 2), ("expert", 2))}


@pytest.mark.parametrize(
    ("overlap", "experts", "flying"),
    [("pairs", {"expert": 2}, 2), ("none", {"expert": 2}, 1), ("pairs", RELAYED, 2), slow("none", RELAYED, 1)],
)
def test_ranks_agree_on_an_order_in_which_both_passes_have_an_exchange_in_flight(
    overlap: str, experts: dict[str, Any], flying: int
) -> None:
    """With relays, no other exchange is issued while both passes have tokens in flight: it would wait for both."""
    given = subject("mixtral")
    if experts is RELAYED:  # on twice as many ranks
        model, batch, loss = mixtral()
        given = make_subject(model, {name: torch.cat([rows, rows]) for name, rows in batch.items()}, loss)
    plan = manual_plan(given.graph, overlap=overlap, cuts=CUTS, **PIPELINE, **experts)
    with Workers() as workers:
        found = record(given.graph, plan, given.state, given.batch, workers)
    assert not found.findings() and not found.failures
    assert {most_in_flight(trace) for trace in found.late.values()} == {flying}


def test_a_program_without_exchanges_runs_pairs_as_torch_does(tmp_path: Path) -> None:
    given = subject("mixtral")
    emit(given.graph, manual_plan(given.graph, **{**PINS, "expert": None, "tensor": 2}), tmp_path)
    assert not (tmp_path / "runtime" / "pairs.py").exists()
    assert "split_pipeline.SplitPipeline" in (tmp_path / "model.py").read_text()
