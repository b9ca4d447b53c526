"""The process's place among those that ``torchrun`` started; without ``torchrun`` there is one process, rank 0."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable

import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.plan import Plan

_stores: list[dist.Store] = []  # one for each answer that this process waited for or gave


def is_rank_0() -> bool:
    """Whether this process is the first of all processes."""
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Whether ``torchrun`` started other processes besides this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_of_machine() -> bool:
    """Whether this process is the first of its machine: the one that writes files and checks them for the others."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def after_first_of_machine(work: Callable[[], None]) -> None:
    """Do ``work`` in the first process of each machine; the machine's other processes wait until it is done."""
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return work()
    store, _, _ = next(dist.rendezvous("env://", rank, count))
    _stores.append(store)
    key = f"autopar/machine/{len(_stores)}/{os.environ.get('GROUP_RANK', '0')}"
    if is_first_of_machine():
        failure = "the first process of this machine failed"
        try:
            work()
            failure = ""
        finally:
            store.set(key, failure)
    else:
        store.wait([key], datetime.timedelta(days=1))
        if failed := store.get(key).decode():
            raise AutoparError(failed, "its own message says why")


def plan_of_rank_0(find: Callable[[], Plan]) -> Plan:
    """``find()`` in rank 0; the other ranks wait for that plan.

    Two searches under a time limit need not agree, and ranks with different plans would wait for each other forever.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return find()
    store, _, _ = next(dist.rendezvous("env://", rank, count))
    _stores.append(store)  # the process that serves the store must keep it until all have read
    key = f"autopar/plan/{len(_stores)}"
    if rank == 0:
        try:
            store.set(key, json.dumps({"plan": find().to_json()}))
        except AutoparError as error:
            store.set(key, json.dumps({"error": error.message, "hint": error.hint}))
            raise
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise AutoparError(f"rank 0 found no plan: {answer['error']}", answer["hint"])
    return Plan.from_json(answer["plan"])
