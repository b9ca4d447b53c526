"""Reads this process's rank from the variables of ``torchrun``, and coordinates ranks; without them there is one process, rank 0."""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.plan import Plan

CLAIM = ".writer-"
"""The start of the names of files by which machines elect the writer of a folder (``writer_of``)."""

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
    """Return the number of this process's machine."""
    return os.environ.get("GROUP_RANK", "0")


def writer_of(folder: Path) -> str:
    """Return the number of the machine whose local rank 0 writes this machine's ``folder``: one for all machines that share the folder's
    file system, otherwise this one. All ranks call this.

    Each machine tries to create the same file, which one of those that share it can do (``O_EXCL``, on NFS, too).
    """
    if not is_one_of_several():
        return machine()
    store = _new_store()
    number = len(_stores)
    if is_rank_0():
        store.set(f"autopar/claim/{number}", f"{CLAIM}{uuid.uuid4().hex}")

    def claim() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _waited(store, f"autopar/claim/{number}")
        try:
            with file.open("x") as made:
                made.write(machine())
            owner = machine()
        except FileExistsError:
            while not (owner := file.read_text()):  # its writer has created it, and not yet written
                time.sleep(0.01)
        store.set(f"autopar/writer/{number}/{machine()}", owner)
        store.add(f"autopar/claimed/{number}", 1)
        if owner == machine():
            while store.add(f"autopar/claimed/{number}", 0) < int(os.environ.get("GROUP_WORLD_SIZE", "1")):
                time.sleep(0.01)
            file.unlink()

    after_writer(claim, machine())
    return _waited(store, f"autopar/writer/{number}/{machine()}")


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
        raise AutoparError(failed, "that process's message says why")


def _waited(store: dist.Store, key: str) -> str:
    store.wait([key], datetime.timedelta(days=1))  # a search may take longer than the store's own limit
    return str(store.get(key).decode())


def plan_of_rank_0(find: Callable[[], Plan]) -> Plan:
    """Return on all ranks the result of ``find()`` on rank 0. Raises rank 0's ``AutoparError`` on all ranks.

    If each rank searched, a time limit could lead to different plans, and the ranks would deadlock.
    """
    if not is_one_of_several():
        return find()
    store = _new_store()
    key = f"autopar/plan/{len(_stores)}"
    if is_rank_0():
        try:
            store.set(key, json.dumps({"plan": find().to_json()}))
        except AutoparError as error:
            store.set(key, json.dumps({"error": error.message, "hint": error.hint}))
            raise
    answer = json.loads(_waited(store, key))
    if "error" in answer:
        raise AutoparError(f"rank 0 found no plan: {answer['error']}", answer["hint"])
    return Plan.from_json(answer["plan"])
