"""A program's lifetime: closed programs, forks, threads, torch's modes, a terminal that closes, and what a compile leaves in memory."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import recipes
import torch
from soak import objects_after

import autopar
from autopar.errors import LaunchError, ModelError, UsageError
from autopar.program.watch import SIGNALS, Watch, heeded
from autopar.run import Program


def compiled(devices: int = 1) -> Program:
    torch.manual_seed(0)
    return autopar.compile(recipes.Reader(), devices, recipes.batch(0), recipes.loss_of, time_limit_s=1)


def test_a_closed_program_does_not_start_over(tmp_path: Path) -> None:
    with compiled() as program:
        program.step(recipes.batch(0))
    for call in (lambda: program.step(recipes.batch(1)), lambda: program.save(tmp_path), program.state_dict):
        with pytest.raises(UsageError, match="the program is closed, and the state of its training is gone") as refused:
            call()
        assert refused.value.hint
    assert not list(tmp_path.iterdir())
    program.close()


def in_fork(work: object) -> int:
    """The status with which a fork of this process ends that calls ``work``, and then what Python calls at its end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()  # type: ignore[operator]
            status = 0
        finally:
            import weakref

            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_leaves_its_parents_workers_alone() -> None:
    with compiled() as program:
        program.step(recipes.batch(0))

        def steps() -> None:
            with pytest.raises(LaunchError, match="this process is a fork"):
                program.step(recipes.batch(1))

        assert in_fork(steps) == 0
        assert in_fork(program.close) == 0
        assert program.folder.is_dir()
        assert program.step(recipes.batch(1)) > 0


def test_threads_compile_one_after_the_other() -> None:
    found: dict[int, float] = {}

    def work(number: int, model: torch.nn.Module) -> None:
        with autopar.compile(model, 1, recipes.batch(0), recipes.loss_of, time_limit_s=1) as program:
            found[number] = program.step(recipes.batch(0))

    torch.manual_seed(0)
    models = [recipes.Reader() for _ in range(2)]
    wanted = [recipes.loss_of(model(recipes.batch(0)[0]), recipes.batch(0)[1]).item() for model in models]
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == pytest.approx(wanted, rel=1e-5)


def test_torchs_modes_change_nothing() -> None:
    torch.manual_seed(0)
    model = recipes.Reader()
    wanted = recipes.loss_of(model(recipes.batch(0)[0]), recipes.batch(0)[1]).item()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), autopar.compile(model, 1, recipes.batch(0), recipes.loss_of, time_limit_s=1) as program:
            assert program.step(recipes.batch(0)) == pytest.approx(wanted, rel=1e-5)
            assert program.step(recipes.batch(0)) < wanted
    with torch.inference_mode(), pytest.raises(ModelError, match=r"embed\.weight was made under torch\.inference_mode"):
        compiled()


def test_a_terminal_that_closes_is_heeded_unless_it_is_to_be_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        assert signal.SIGHUP in SIGNALS and signal.SIGHUP in heeded()
        with Watch({"set-up": 60, "step": 60, "save": 60}, 60) as watch:
            os.kill(os.getpid(), signal.SIGHUP)
            assert watch._received == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert heeded() == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_compile_leaves_nothing_behind() -> None:
    """``make report NAME=soak`` measures the bytes of 300."""
    before = objects_after(2)
    assert (objects_after(2) - before) / 2 < 300
