"""Fixtures for every test: pools of warm gloo processes, one of each size for the whole run; the golden programs' option."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from workers import WorkerPool

os.environ["AUTOPAR_CALIBRATION"] = ""  # what somebody measured on this machine is no business of the tests


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
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden with what is emitted now")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
