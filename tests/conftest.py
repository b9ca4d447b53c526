"""Fixtures for every test: worker processes that start at once, pools of them, one of each size for the whole run; the golden
programs' option."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

# Read when torch is imported: threads of several processes would get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from types import SimpleNamespace

import forked
import pytest
from compiled_once import compile_once
from workers import WorkerPool

from autopar.run import processes

os.environ["AUTOPAR_CALIBRATION"] = ""  # ignore any local calibration file

# What the tests import are hundreds of thousands of objects that stay until the end. Looking for garbage among them took a quarter of the
# time in which a process collects its tests, and every full collection after that would look through them again.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Run the garbage collector only once the imports are done, and never on their objects; keep the bytecode of what is imported, for the
    Pythons that tests start and for the next run."""
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = kept
        compile_once()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Ranks are forks of a process that has imported what they import, where what was imported survives that."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(processes, "subprocess", SimpleNamespace(Popen=forked.Popen, PIPE=subprocess.PIPE))
        yield


@pytest.fixture
def processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are Pythons of their own, as in use."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


def _pool(count: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(count)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def workers1() -> Iterator[WorkerPool]:
    """One process."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def workers2() -> Iterator[WorkerPool]:
    """Two processes."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def workers3() -> Iterator[WorkerPool]:
    """Three processes."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def workers4() -> Iterator[WorkerPool]:
    """Four processes."""
    yield from _pool(4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/emit/golden with what is emitted now")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
