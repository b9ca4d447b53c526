"""Reads this process's rank from the variables of ``torchrun``, and coordinates ranks; without them there is one process, rank 0."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.errors import AutoparError, UsageError
from autopar.plan import Plan

CLAIM = ".writer-"
"""The start of the name of a file that shows which machines share a folder (``writer_of``)."""

ANSWERS_S = 300
"""The seconds after which rank 0 removes this file, whether or not all ranks have looked for it."""

_stores: list[dist.Store] = []  # one for each exchange, kept alive because rank 0 serves it until all ranks have read


def is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Return whether ``torchrun`` started more than one process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_local_rank_0() -> bool:
    """Return whether this process has local rank 0: it type-checks files for the other ranks of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _new_store() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    _stores.append(store)
    return store


def machine() -> str:
    """Return a name of this process's machine: ``torchrun``'s number, or the host's name under other launchers."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def writer_of(folder: Path) -> str:
    """Return the machine whose local rank 0 writes this machine's ``folder``: rank 0's machine, if the two share the folder's file system,
    otherwise this one. All ranks call this.

    Raises:
        UsageError: the folder can't be made on this machine.
        AutoparError: it can't be made where another process has to.
    """
    if not is_one_of_several():
        return machine()
    store = _new_store()
    number = len(_stores)
    file, owner, done = f"autopar/file/{number}", f"autopar/writer/{number}/{machine()}", f"autopar/done/{number}"
    made: Path | None = None
    try:
        if is_local_rank_0():
            with _reporting(store, owner, folder):
                if is_rank_0():
                    made = folder / f"{CLAIM}{uuid.uuid4().hex}"
                    with _reporting(store, file, folder):
                        folder.mkdir(parents=True, exist_ok=True)
                        made.write_text("")
                    store.set(file, f"{machine()}\n{made.name}")
                found, _, name = _answer(store, file).partition("\n")
                folder.mkdir(
                    parents=True, exist_ok=True
                )  # asks the server, which a network file system's cache need not do
                store.set(owner, found if (folder / name).exists() else machine())
        return _answer(store, owner)
    finally:
        store.add(done, 1)
        if made is not None:
            limit = time.monotonic() + ANSWERS_S
            while store.add(done, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < limit:
                time.sleep(0.01)
            with contextlib.suppress(OSError):
                made.unlink()


@contextlib.contextmanager
def _reporting(store: dist.Store, key: str, folder: Path) -> Iterator[None]:
    """Let the processes that wait for ``key`` fail if this context does; raise ``UsageError`` if the folder can't be made or written."""
    try:
        yield
    except (OSError, AutoparError) as error:
        store.set(key, "")
        if isinstance(error, AutoparError):
            raise
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}", "give a folder that can be made and written to"
        ) from error


def _answer(store: dist.Store, key: str) -> str:
    """Wait for another process's answer; raise ``AutoparError`` if it failed."""
    if not (answer := _waited(store, key)):
        raise AutoparError("another process cannot write the program's folder", "see the message of that process")
    return answer


def writes(owner: str) -> bool:
    """Return whether this process writes a folder whose ``writer_of`` is ``owner``."""
    return is_local_rank_0() and owner == machine()


def after_writer(work: Callable[[], None], owner: str) -> None:
    """Call ``work`` in local rank 0 of the machine ``owner``; the other ranks with this owner wait until it returns, and raise
    ``AutoparError`` if it raises."""
    if not is_one_of_several():
        return work()
    store = _new_store()
    key = f"autopar/written/{len(_stores)}/{owner}"
    if writes(owner):
        failure = "the process that writes the folder failed"
        try:
            work()
            failure = ""
        finally:
            store.set(key, failure)
    elif failed := _waited(store, key):
        raise AutoparError(failed, "see the message of that process")


def _waited(store: dist.Store, key: str) -> str:
    store.wait([key], datetime.timedelta(days=1))  # a search may take longer than the store's own limit
    return str(store.get(key).decode())


def plan_of_rank_0(find: Callable[[], Plan]) -> Plan:
    """Return on all ranks the result of ``find()`` on rank 0. Raises rank 0's ``AutoparError`` on all ranks.

    If each rank searched, a time limit could lead to different plans, and the ranks would deadlock.
    """
    if not is_one_of_several():
        return find()
    return Plan.from_json(answer_of_rank_0(lambda: find().to_json()))


def answer_of_rank_0(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return on all ranks the result of ``find()`` on rank 0, which JSON can express. Raises rank 0's ``AutoparError`` on all ranks."""
    if not is_one_of_several():
        return find()
    store = _new_store()
    key = f"autopar/answer/{len(_stores)}"
    if is_rank_0():
        try:
            store.set(key, json.dumps({"answer": find()}))
        except AutoparError as error:
            store.set(key, json.dumps({"error": error.message, "hint": error.hint}))
            raise
    answer = json.loads(_waited(store, key))
    if "error" in answer:
        raise AutoparError(f"rank 0 failed: {answer['error']}", answer["hint"])
    found: dict[str, Any] = answer["answer"]
    return found
