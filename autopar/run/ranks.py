"""Reads this process's rank from the variables of ``torchrun``, and coordinates ranks; without them there is one process, rank 0."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable

import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.plan import Plan

_stores: list[dist.Store] = []  # one for each exchange, kept alive because rank 0 serves it until all ranks have read


def is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Return whether ``torchrun`` started more than one process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_local_rank_0() -> bool:
    """Return whether this process has local rank 0: it writes and type-checks files for the other ranks of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _new_store() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    _stores.append(store)
    return store


def after_local_rank_0(work: Callable[[], None]) -> None:
    """Call ``work`` in local rank 0; the machine's other ranks wait until it returns, and raise ``AutoparError`` if it raises."""
    if not is_one_of_several():
        return work()
    store = _new_store()
    key = f"autopar/machine/{len(_stores)}/{os.environ.get('GROUP_RANK', '0')}"
    if is_local_rank_0():
        failure = "the first process of this machine failed"
        try:
            work()
            failure = ""
        finally:
            store.set(key, failure)
    else:
        store.wait([key], datetime.timedelta(days=1))
        if failed := store.get(key).decode():
            raise AutoparError(failed, "that process's message says why")


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
    store.wait([key], datetime.timedelta(days=1))  # a search may take longer than the store's own limit
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise AutoparError(f"rank 0 found no plan: {answer['error']}", answer["hint"])
    return Plan.from_json(answer["plan"])
