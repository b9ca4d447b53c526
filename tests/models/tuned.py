"""What tests of tuning share: the measured calibration of two nodes, a small model, and its plans."""

from __future__ import annotations

import functools
import json

from measured_plans import SMALL, memory_kinds
from places import EVIDENCE

from autopar.devices import Cluster, parse
from autopar.devices.calibration import Calibration, calibrated, from_json
from autopar.plan import Plan
from autopar.search import SearchOptions
from autopar.tune.prices import CorrectedPrices
from autopar.workload import Workload

OPTIONS = SearchOptions(precision="float32", time_limit_s=5)


@functools.cache
def base() -> Calibration:
    """The calibration of two nodes with links of 1 Gbit/s."""
    lines = map(json.loads, (EVIDENCE / "overlap.jsonl").read_text().splitlines())
    return from_json(next(line["calibration"] for line in lines if line["name"] == "2 nodes at 1gbit"))


def cluster() -> Cluster:
    return calibrated(parse(2), base(), (), "test")


def workload() -> Workload:
    subject = SMALL["decoder"]
    return Workload(subject.build(), subject.batch(0), subject.loss_fn, subject.name, "float32")


@functools.cache
def prices() -> CorrectedPrices:
    return CorrectedPrices(workload().capture(), cluster(), base(), OPTIONS)


@functools.cache
def plans() -> dict[str, Plan]:
    """The hand-made plans for two processes."""
    made = {kind.name: kind.plan(prices().graph) for kind in memory_kinds()}
    return {name: plan for name, plan in made.items() if plan.device_count == 2}
