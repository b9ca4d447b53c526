"""Simpler searches under the same prices: how much slower is each one's plan? ``make report NAME=simpler`` writes ``docs/simpler.*``.

============  =========================================================================================================
greedy        starts with data parallelism and one microbatch, and repeats the best single change (double a degree or the
              microbatches, ZeRO or recomputation for all layers) while it helps; if the plan does not fit, the change that saves memory
megatron      the rule of thumb: the smallest tensor degree within a node, then the smallest pipeline, that fits, the rest data
              parallel; ZeRO-1; no recomputation if that fits at the same degrees; the fastest number of microbatches
uniform       tries every plan in which all layers have the same strategy and stages have equal numbers of layers
bucketed      as Galvatron: for each configuration, even stages, and in each stage dynamic programming over the layers on a memory axis
              of ``BUCKETS`` buckets (rounded up, so that feasible plans fit); layers that share parameters get the same strategy
============  =========================================================================================================

All use the same cost model and end in ``search.evaluate``; a plan that does not fit counts as none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from places import EVIDENCE

from autopar.capture import capture
from autopar.devices import Cluster, parse
from autopar.errors import AutoparError
from autopar.graph import Graph
from autopar.pins import LayerPins
from autopar.plan import Plan, Role, Strategy
from autopar.price import Pricer
from autopar.schedules import Schedule, default_schedule
from autopar.search import SearchOptions, evaluate, make_mesh, search
from autopar.search.manual import even_cuts
from autopar.search.problem import divisors, meshes, tied_groups
from autopar.search.strategies import candidates, context_of
from autopar.shard import annotate
from autopar.summary import describe
from autopar.zoo import build

BUCKETS = 200

PAIRS = (  # model, sequence, global batch, devices
    ("gpt2", 1024, 64, "2x8xH100-80GB"),
    ("gpt2-xl", 1024, 256, "1x8xA100-40GB-SXM"),
    ("bert-large", 512, 256, "1x8xA100-40GB-SXM"),
    ("vit-large", None, 1024, "2x8xV100-32GB-SXM2"),
    ("t5-large", 512, 128, "1x8xV100-32GB-SXM2"),
    ("llama3-8b", 8192, 64, "1x8xH100-80GB"),
    ("llama3-8b", 8192, 128, "2x8xA100-40GB-SXM"),
    ("llama3-8b", 8192, 512, "8x8xH100-80GB"),
    ("llama3-8b", 2048, 96, "3x8xA100-80GB-SXM"),
    ("qwen3-8b", 8192, 128, "4x8xA100-40GB-SXM"),
    ("llama3-70b", 8192, 128, "8x8xH100-80GB"),
    ("llama3-70b", 8192, 512, "32x8xA100-80GB-SXM"),
    ("gpt3-175b", 2048, 512, "32x8xH100-80GB"),
)


@dataclass(frozen=True)
class Problem:
    """A graph on a cluster with its prices; ``price`` is kept small: uniform choices by their parameters."""

    graph: Graph
    cluster: Cluster
    pricer: Pricer

    @property
    def limit(self) -> int:
        return self.cluster.memory_limit_bytes


@dataclass(frozen=True)
class Uniform:
    """One strategy for all layers."""

    pipeline: int = 1
    tensor: int = 1
    sequence: bool = False
    zero: int = 0
    activations: str = "keep"
    microbatches: int = 1


def price(problem: Problem, choice: Uniform) -> Plan | None:
    """The plan of a uniform choice; ``None`` where sizes do not divide, or a layer has no price so."""
    graph, count = problem.graph, problem.cluster.count
    rest, odd = divmod(count, choice.pipeline * choice.tensor)
    rows = graph.batch_size
    if odd or not rest or choice.pipeline > len(graph.layers) or rows % choice.microbatches:
        return None
    if rows // choice.microbatches % rest or (graph.unmicrobatchable and choice.microbatches > 1):
        return None
    mesh = make_mesh(("data", rest), ("tensor", choice.tensor))
    inner = Role.TENSOR_SEQUENCE if choice.sequence else Role.TENSOR
    roles = tuple(inner if axis.name == "tensor" else Role.DATA for axis in mesh)
    strategy = Strategy(roles, choice.zero if rest > 1 else 0, activations=choice.activations)
    cuts = (0, *even_cuts(len(graph.layers), choice.pipeline), len(graph.layers))
    return written(problem, mesh, cuts, [strategy] * len(graph.layers), choice.microbatches)


def written(problem: Problem, mesh: tuple, cuts: tuple, chosen: list[Strategy], microbatches: int) -> Plan | None:
    stages = len(cuts) - 1
    try:
        return evaluate(
            problem.graph,
            problem.cluster,
            problem.pricer,
            mesh=mesh,
            stage_bounds=cuts,
            strategies=chosen,
            schedule=Schedule(default_schedule(stages, microbatches), stages, microbatches),
            precision="bfloat16",
        )
    except AutoparError:
        return None


def over(problem: Problem, plan: Plan) -> float:
    """Bytes above the limit of the fullest stage, 0 for a plan that fits."""
    return max(0.0, max(stage.memory.total for stage in plan.stages) - problem.limit)


def better(problem: Problem, a: Plan | None, b: Plan | None) -> bool:
    """Whether ``a`` is better than ``b``: fits and is faster, or needs less too much."""
    if a is None or b is None:
        return a is not None
    keys = [(over(problem, plan), plan.prediction.step_time_s) for plan in (a, b)]
    return keys[0] < keys[1]


def greedy(problem: Problem) -> Plan | None:
    now = Uniform()
    best = price(problem, now)
    while True:
        steps = [
            replace(now, tensor=now.tensor * 2),
            replace(now, tensor=max(1, now.tensor // 2)),
            replace(now, pipeline=now.pipeline * 2, microbatches=max(now.microbatches, now.pipeline * 2)),
            replace(now, pipeline=max(1, now.pipeline // 2)),
            replace(now, microbatches=now.microbatches * 2),
            replace(now, microbatches=max(1, now.microbatches // 2)),
            replace(now, sequence=not now.sequence),
            replace(now, activations="keep" if now.activations == "full" else "full"),
            *(replace(now, zero=zero) for zero in range(4)),
        ]
        tried = [(step, price(problem, step)) for step in dict.fromkeys(steps) if step != now]
        chosen = None
        for step, plan in tried:
            if better(problem, plan, best):
                chosen, best = step, plan
        if chosen is None:
            return best
        now = chosen


def megatron(problem: Problem) -> Plan | None:
    """The least model parallelism that fits, tensor in the node first; among its microbatches the fastest."""
    node = problem.cluster.gpus_per_node
    tensors = divisors(node)
    pipelines = [p for p in divisors(problem.cluster.count // node) if p <= len(problem.graph.layers)]
    ladder = [(t, 1) for t in tensors] + [(node, p) for p in pipelines if p > 1]
    for again in ("keep", "full"):
        for tensor, pipeline in ladder:
            found = None
            for m in divisors(problem.graph.batch_size):
                if pipeline > 1 and m < pipeline:
                    continue
                plan = price(problem, Uniform(pipeline, tensor, tensor > 1, 1, again, m))
                if plan is not None and not over(problem, plan) and better(problem, plan, found):
                    found = plan
            if found is not None:
                return found
    return None


def uniform(problem: Problem) -> Plan | None:
    best = None
    for choice in every_uniform(problem):
        plan = price(problem, choice)
        if plan is not None and not over(problem, plan) and better(problem, plan, best):
            best = plan
    return best


def every_uniform(problem: Problem) -> Iterator[Uniform]:
    count, layers = problem.cluster.count, len(problem.graph.layers)
    for pipeline in (p for p in divisors(count) if p <= layers):
        for tensor in (t for t in divisors(count // pipeline) if t <= 4 * problem.cluster.gpus_per_node):
            for m in divisors(problem.graph.batch_size):
                if pipeline > 1 and m < pipeline:
                    continue
                for sequence, zero, again in itertools.product((False, True), range(4), ("keep", "full")):
                    if not (sequence and tensor == 1):
                        yield Uniform(pipeline, tensor, sequence, zero, again, m)


def bucketed(problem: Problem) -> Plan | None:
    best = None
    layers = len(problem.graph.layers)
    for pipeline in (p for p in divisors(problem.cluster.count) if p <= layers):
        mesh = meshes(problem.cluster.count // pipeline)[0]
        cuts = (0, *even_cuts(layers, pipeline), layers)
        for m in divisors(problem.graph.batch_size):
            if (pipeline > 1 and m < pipeline) or (m > 1 and problem.graph.unmicrobatchable):
                continue
            for chosen in tied_alike(problem.graph, by_budget(problem, mesh, cuts, m)):
                plan = written(problem, mesh, cuts, chosen, m)
                if plan and not over(problem, plan) and better(problem, plan, best):
                    best = plan
    return best


def tied_alike(graph: Graph, chosen: list[Strategy] | None) -> Iterator[list[Strategy]]:
    """Layers that share parameters must have the same roles and ZeRO stage: as the first of them has, or as the last."""
    if chosen is None:
        return
    groups = tied_groups(graph)
    if all(len({(chosen[i].roles, chosen[i].zero) for i in group}) == 1 for group in groups):
        yield chosen
        return
    for end in (0, -1):
        alike = list(chosen)
        for group in groups:
            for i in group:
                roles, zero = chosen[group[end]].roles, chosen[group[end]].zero
                alike[i] = Strategy(roles, zero, options=chosen[i].options.replace(reduce="microbatch"))
        yield alike


def by_budget(problem: Problem, mesh: tuple, cuts: tuple, m: int) -> list[Strategy] | None:
    """Each stage's layers by dynamic programming on a bucketed memory axis; resharding is in the costs, per pair of roles."""
    options = SearchOptions(roles=(Role.TENSOR, Role.TENSOR_SEQUENCE))
    every = candidates(
        mesh,
        problem.graph.batch_size // m,
        problem.cluster.gpus_per_node,
        options,
        LayerPins(),
        context=context_of(options, several_microbatches=m > 1),
    ).every
    chosen: list[Strategy] = []
    for s, (i, j) in enumerate(itertools.pairwise(cuts)):
        flying = min(m, len(cuts) - 1 - s) if len(cuts) > 2 else 1
        stage = _stage(problem, mesh, every, i, j, m, flying)
        if stage is None:
            return None
        chosen += stage
    return chosen


def _stage(
    problem: Problem, mesh: tuple, every: list[Strategy], i: int, j: int, m: int, flying: int
) -> list[Strategy] | None:
    size = problem.limit / BUCKETS
    prices = [
        [problem.pricer.layer(problem.graph.layers[layer].cls, mesh, s, m) for s in every] for layer in range(i, j)
    ]
    # what the stage's transients will be is not known yet: the largest of each layer's smallest is set aside, and checked at the end
    aside = max(min((p.transient_bytes for p in row if p is not None), default=0) for row in prices)
    room = int((problem.limit - aside) // size)
    best = np.full((room + 1, len(every)), np.inf)
    came: list[np.ndarray] = []
    for a, row in enumerate(prices):
        new = np.full((room + 1, len(every)), np.inf)
        back = np.zeros((room + 1, len(every)), dtype=np.int64)
        for k, p in enumerate(row):
            if p is None or p.transient_bytes > 2 * aside:
                continue
            weights = p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes
            need = int(np.ceil((weights + flying * p.saved_bytes) / size))
            if need > room:
                continue
            cost = p.forward_s + p.backward_s + p.step_s / m
            if a == 0:
                new[need, k] = cost
                continue
            edge = [problem.pricer.edge(i + a - 1, mesh, s, every[k], m) for s in every]
            through = best[: room + 1 - need] + np.array(edge)[None, :]
            back[need:, k] = through.argmin(axis=1)
            new[need:, k] = through.min(axis=1) + cost
        came.append(back)
        best = new
    if not np.isfinite(best).any():
        return None
    at, k = np.unravel_index(int(best.argmin()), best.shape)
    chosen = [every[k]]
    for a in range(len(prices) - 1, 0, -1):
        p = prices[a][k]
        assert p is not None
        before = came[a][at, k]
        at -= int(np.ceil((p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes + flying * p.saved_bytes) / size))
        k = before
        chosen.append(every[k])
    return chosen[::-1]


SEARCHES: dict[str, Callable[[Problem], Plan | None]] = {
    "greedy": greedy,
    "megatron": megatron,
    "uniform": uniform,
    "bucketed": bucketed,
}


def contest(problem: Problem, model: str, seq: int | None) -> dict[str, object]:
    """One line of results: every search's plan, its step time over ours, its seconds."""
    start = time.process_time()
    ours = search(problem.graph, problem.cluster, problem.pricer, SearchOptions(time_limit_s=60))
    line: dict[str, object] = {
        "model": model,
        "devices": problem.cluster.name,
        "seq": seq,
        "global_batch": problem.graph.batch_size,
        "autopar": {
            "step_time_s": ours.prediction.step_time_s,
            "bound_s": ours.bound_s,
            "gap": ours.gap,
            "cpu_s": time.process_time() - start,
            "plan": describe(ours),
        },
    }
    for name, simple in SEARCHES.items():
        start = time.process_time()
        plan = simple(problem)
        fits = plan is not None and not over(problem, plan)
        took = plan.prediction.step_time_s if plan is not None and fits else None
        line[name] = {
            "step_time_s": took,
            "slower": None if took is None else took / ours.prediction.step_time_s - 1,
            "cpu_s": time.process_time() - start,
            "plan": describe(plan) if plan is not None and fits else "",
        }
    return line


def page(lines: list[dict]) -> str:
    """The page that is made of the results."""
    head = " | ".join(SEARCHES)
    rows = [f"| model | devices | batch | autopar | gap | {head} |", "|---" * (5 + len(SEARCHES)) + "|"]
    for line in lines:
        cells = [_slower(line[name]["slower"]) for name in SEARCHES]
        ours = line["autopar"]
        rows.append(
            f"| {line['model']}{_tokens(line['seq'])} | {line['devices']} | {line['global_batch']:,} "
            f"| {ours['step_time_s']:.3g} s | {ours['gap']:.1%} | {' | '.join(cells)} |"
        )
    summary = []
    for name in SEARCHES:
        found = [line[name]["slower"] for line in lines if line[name]["slower"] is not None]
        missed = len(lines) - len(found)
        half = sorted(found)[len(found) // 2] if found else 0.0
        summary.append(
            f"| {name} | {half:+.1%} | {max(found, default=0.0):+.1%} | {missed} | {sum(s > 0.01 for s in found)} |"
        )
    doc = __doc__ or ""
    return (
        "# Against simpler searches\n\nHow much slower the plan of a simpler search is than autopar's, by the same cost model. *none*: it "
        "finds no plan that fits. Negative figures are within the gap at which autopar's search stops.\n\n```text\n"
        + doc.split("\n\n")[1]
        + "\n```\n\n" + "\n".join(rows)
        + "\n\n| search | median | worst | found no plan | slower by more than 1 % |\n|---|---|---|---|---|\n"
        + "\n".join(summary)
        + "\n\n`simpler.jsonl` has every plan, and the time of each search. Made by `make report NAME=simpler`. Do not edit.\n"
    )  # fmt: skip


def _tokens(seq: int | None) -> str:
    return f", {seq:,} tokens" if seq else ""


def _slower(share: float | None) -> str:
    return "none" if share is None else f"{share:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="*", help="only these, counted from 0")
    parser.add_argument("--fresh", action="store_true", help="do not keep the results that are there")
    asked = parser.parse_args()
    path = EVIDENCE / "simpler.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() and not asked.fresh else []
    done = {(line["model"], line["seq"], line["global_batch"], line["devices"]): line for line in known}
    for number, (model, seq, batch, devices) in enumerate(PAIRS):
        key = (model, seq, batch, devices)
        if key in done or (asked.pairs is not None and number not in asked.pairs):
            continue
        module, example = build(model, seq, batch, "bfloat16", "meta")
        graph = annotate(capture(module, example, None, precision="bfloat16", name=model))
        cluster = parse(devices)
        done[key] = contest(Problem(graph, cluster, Pricer(graph, cluster, "bfloat16")), model, seq)
        path.write_text("".join(json.dumps(done[pair]) + "\n" for pair in PAIRS if pair in done))
        print(json.dumps(done[key]), file=sys.stderr, flush=True)
    (EVIDENCE / "simpler.md").write_text(page([done[pair] for pair in PAIRS if pair in done]))


if __name__ == "__main__":
    main()
