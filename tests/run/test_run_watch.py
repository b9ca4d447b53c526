"""Ranks that die, hang or get a signal: every process ends, a sentence says why, and the next start goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watch_load
from fault_runs import Run, Server, alive, children
from programs import Shape, mlp_model, write_mlp
from torch.distributed import HashStore

from autopar.program import watch
from autopar.program.state import INITIAL
from autopar.program.watch import NodeHeartbeats, Watch, explain_hang, interval_s, run, stack_position
from autopar.program.weights import write_file

HANG = """        n = HIDDEN // MESH["tensor"]
        self.register_forward_pre_hook(hang)
"""
HANGING = """
import os
import time

calls = []


def hang(*_):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) > 6:
        time.sleep(600)


class Layer("""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def started(server: Server, folder: Path, shape: Shape, *options: str, change: tuple[tuple[str, str], ...] = ()) -> Run:
    program = write_mlp(folder / "program", shape)
    write_file(program / INITIAL, mlp_model().state_dict())
    for old, new in change:
        text = (program / "model.py").read_text()
        assert text.count(old) == 1
        (program / "model.py").write_text(text.replace(old, new))
    made = Run(program, shape.devices, ["--device", "cpu", "--no-check", *options], [server], folder / "run")
    return made.start()


def ended(made: Run, strike: Callable[[list[int]], Any]) -> float:
    """Wait for three steps, strike, and wait until no process is left; the seconds that takes."""
    assert made.wait(lambda: len(made.losses()) >= 3, 60), made.talk()
    everyone = [*made.workers(), *made.agents]
    strike(made.workers())
    began = time.monotonic()
    while any(map(alive, everyone)) and time.monotonic() - began < 40:
        time.sleep(0.02)
    left = [pid for pid in everyone if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, made.talk()
    return time.monotonic() - began


def test_a_signal_to_one_rank_saves_and_ends_all(server: Server, tmp_path: Path) -> None:
    options = ("--steps", "100000", "--checkpoint", f"{tmp_path}/saved", "--every", "100000")
    made = started(server, tmp_path, Shape(data=2, zero=(1, 3)), *options)
    ended(made, lambda workers: os.kill(workers[1], signal.SIGUSR1))
    steps = max(made.losses())
    assert f"SIGUSR1: training stops after {steps} of 100000 steps; --resume continues from there" in made.talk()
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{steps}"]
    assert not made.said()


def test_a_killed_rank_is_named(server: Server, tmp_path: Path) -> None:
    made = started(server, tmp_path, Shape(pipeline=2, microbatches=2, schedule="1f1b"), "--steps", "100000")
    seconds = ended(made, lambda workers: os.kill(workers[0], signal.SIGKILL))
    assert len(made.said()) == 1, made.talk()
    (said,) = made.said()
    assert said.startswith("a collective failed (Connection")
    assert "rank 0 no longer answers (dead, stopped or cut off)" in said and "; rank 1 waits in step " in said
    assert seconds < 15


def test_a_rank_that_hangs_is_named_with_its_layer(server: Server, tmp_path: Path) -> None:
    change = (("\nclass Layer(", HANGING), ('        n = HIDDEN // MESH["tensor"]\n', HANG))
    options = ("--steps", "100000", "--timeout", "2", "--lost-after", "3")
    made = started(server, tmp_path, Shape(tensor=2), *options, change=change)
    ended(made, lambda workers: None)
    (said,) = made.said()
    assert said.startswith(
        "step 4 takes longer than 2 s; the others wait for rank 1, in step 4 in layer_0 (First), model.py:"
    )
    assert re.search(r"; rank 0 waits in step 4 in (all_reduce|wait_tensor) of layer_0 \(First\), model.py:", said)


def test_a_killed_launcher_leaves_no_rank(server: Server, tmp_path: Path) -> None:
    made = started(server, tmp_path, Shape(data=2), "--steps", "100000")
    assert ended(made, lambda workers: os.kill(made.agents[0], signal.SIGKILL)) < 10
    assert all("has lost the ranks' store" in said for said in made.said()) and made.said()


@pytest.mark.slow
def test_another_rank_speaks_for_a_node_whose_speaker_dies(tmp_path: Path) -> None:
    """Two nodes of two ranks; rank 0 speaks for its node and is killed. Only rank 0 is named."""
    servers = [Server(), Server()]
    program = write_mlp(tmp_path / "program", Shape(data=2, tensor=2))
    write_file(program / INITIAL, mlp_model().state_dict())
    made = Run(program, 2, ["--device", "cpu", "--steps", "100000"], servers, tmp_path / "run").start()
    ended(made, lambda workers: os.kill(children(made.agents[0])[0], signal.SIGKILL))
    assert len(made.said()) == 1, made.talk()
    assert "; rank 0 no longer answers" in made.said()[0] and "; ranks 1, 2, 3 wait in step" in made.said()[0]
    for server in servers:
        server.close()


# -- one node's ranks -------------------------------------------------------------------------------------------------


def test_a_node_costs_the_store_three_requests_a_beat_and_one_connection() -> None:
    load = watch_load.measure(nodes=3, ranks=4, beats=5)
    assert load.connections == 1 and load.requests == pytest.approx(3, rel=0.2)
    assert [interval_s(n, 60) for n in (1, 2000, 16_000)] == [1, 1, 8]


def node_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> NodeHeartbeats:
    for name, value in (("GROUP_RANK", 0), ("GROUP_WORLD_SIZE", 1), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    return NodeHeartbeats(f"test {os.getpid()} {id(monkeypatch)}", rank, 3)


def test_the_lowest_rank_with_recent_heartbeats_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (node_of(rank, monkeypatch) for rank in range(3))
    assert [node.speaker(0.3) for node in (first, second, third)] == [0, 0, 0]
    time.sleep(0.4)  # nobody hears of the first
    second.send([1, "step 7", "in layer_0", True], "step 7 takes longer than 60 s")
    third.send([1, "step 7", "in layer_1", False], None)
    second.listen(), third.listen()
    assert (second.speaker(0.3), third.speaker(0.3)) == (1, 1)
    assert second.silent(0.3) == third.silent(0.3) == [0]
    assert third.problem == "step 7 takes longer than 60 s" and not third.ended
    assert third.reports == {1: [1, "step 7", "in layer_0", True], 2: [1, "step 7", "in layer_1", False]}
    second.send([2, "step 7", "in layer_0", True], None, ended=True)
    third.listen()
    assert third.ended


def test_a_rank_that_torchrun_has_not_started_is_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = NodeHeartbeats("test", 5, 8)
    assert (alone.index, alone.count, alone.ranks, alone.speaker(0.0)) == (5, 8, [5], 5)


def test_a_late_store_ends_no_training_whose_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sentences = Watch({"step": 600.0}, lost_after_s=0.6), []
    made._waking[0].setblocking(False)
    monkeypatch.setattr(made, "_end", lambda sentence: (sentences.append(sentence), made._ended.set()))
    monkeypatch.setattr(watch, "dist", SimpleNamespace(get_rank=lambda: 0))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1"), monkeypatch.setenv("MASTER_PORT", "1")
    made._store = made._node = object()  # never answers: nothing sets the time at which it did
    made.enter("step", "step 1")
    thread = threading.Thread(target=made._guard, daemon=True)
    thread.start()
    for step in range(2, 12):
        made.enter("step", f"step {step}")
        time.sleep(0.12)
    assert not sentences
    thread.join(5)
    assert "no answer from the ranks' store" in sentences[0]


def test_a_speaker_that_dies_between_its_datagram_and_its_request_to_the_store_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, node = (node_of(rank, monkeypatch) for rank in (0, 1))
    killed.send([6, "step 7", "in layer_0 (Layer)", False], None)
    node.listen()
    node.ranks = [0, 1]
    made, sentences, store = Watch({"step": 600.0}, lost_after_s=0.3), [], HashStore()
    store.set("node 0", json.dumps({0: [5, "step 7", "in layer_0 (Layer)", False]}))
    made._node, made._store, made._section = node, store, ("step", "step 7", time.monotonic())
    monkeypatch.setattr(made, "_end", sentences.append)
    made._report(node, "a collective failed")
    assert len(sentences) == 1
    assert "; rank 0 no longer answers (dead, stopped or cut off), last seen in step 7 in layer_0" in sentences[0]


# -- in words ---------------------------------------------------------------------------------------------------------


def said_by(*ranks: tuple[int, str, str, bool]) -> dict[int, list[Any]]:
    return {rank: list(words) for rank, words in enumerate(ranks)}


def test_the_rank_that_others_wait_for_is_the_one_outside_of_collectives() -> None:
    waits = ("step 7", "in all_reduce of layer_1 (Layer), model.py:48", True)
    before = said_by((4, *waits), (4, "step 7", "in Python code, data.py:9", False), (4, *waits))
    after = said_by((6, *waits), (6, "step 7", "in Python code, data.py:9", False), (6, *waits))
    assert explain_hang("step 7 takes longer than 60 s", before, after) == (
        "step 7 takes longer than 60 s; the others wait for rank 1, in step 7 in Python code, data.py:9; "
        "ranks 0, 2 wait in step 7 in all_reduce of layer_1 (Layer), model.py:48"
    )


def test_a_silent_rank_comes_before_a_late_one() -> None:
    before = said_by((4, "step 7", "in layer_0 (Layer)", False), (9, "step 6", "in layer_1 (Layer)", False))
    after = said_by((6, "step 7", "in layer_0 (Layer)", False), (9, "step 6", "in layer_1 (Layer)", False))
    assert explain_hang("a collective failed", before, after) == (
        "a collective failed; rank 1 no longer answers (dead, stopped or cut off), last seen in step 6 in layer_1 (Layer); "
        "rank 0 waits in step 7 in layer_0 (Layer)"
    )


def test_the_position_of_a_thread() -> None:
    assert stack_position(sys._getframe(), "layer_3 (Block)")[0].startswith("in layer_3 (Block), test_run_watch.py:")
    assert stack_position(sys._getframe(), "")[1] is False


def test_the_program_ends_with_the_status_of_its_end(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    def end(code: Any) -> None:
        raise SystemExit(code)

    for main in (lambda: None, lambda: end(3), lambda: end("no such file"), lambda: 1 / 0):
        run(main)
    assert statuses == [0, 3, 1, 1]
    assert "no such file" in capsys.readouterr().err
