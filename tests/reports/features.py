"""What each feature of emitted programs gains, as predicted: ``make report NAME=features`` writes ``docs/evidence/features.{jsonl,md}``.

Every request is planned anew for a program without the features, then with one more feature at a time, so that each plan suits its program.
The prices of the first rows are those of a program that waits for every collective where it issues it; its memory is that of today's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from places import EVIDENCE, GROUNDTRUTH

from autopar.cli.load import SizeOptions, load_model
from autopar.devices import parse
from autopar.plan import Plan
from autopar.planning import find_plan
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.price.trainer import EMITTED, TrainerModel
from autopar.search import SearchOptions
from autopar.workload import sequence_length

RESULTS, PAGE = EVIDENCE / "features.jsonl", EVIDENCE / "features.md"
TIME_LIMIT_S = 120.0


@dataclass(frozen=True)
class Waiting(TrainerModel):
    """A program that does not hide some of data parallelism's collectives: those of ZeRO 2 and 3, the reductions of ZeRO 0 and 1, or ZeRO
    1's gathers."""

    sharded: bool = True
    reductions: bool = True
    gathers: bool = True

    def exposed_sharded_s(self, communication_s: float, compute_s: float, slowdown: float) -> float:
        return (
            communication_s
            if self.sharded
            else TrainerModel.exposed_sharded_s(self, communication_s, compute_s, slowdown)
        )

    def exposed_reduction_s(self, communication_s: float, backward_s: float, slowdown: float) -> float:
        if self.reductions:
            return communication_s
        return TrainerModel.exposed_reduction_s(self, communication_s, backward_s, slowdown)

    def exposed_gather_s(self, communication_s: float, forward_s: float, slowdown: float) -> float:
        if self.gathers:
            return communication_s
        return TrainerModel.exposed_gather_s(self, communication_s, forward_s, slowdown)


@dataclass(frozen=True)
class Step:
    """A program with one feature more than the step before: its name, the program, and the pins that keep later features off."""

    name: str
    trainer: TrainerModel
    pins: Mapping[str, Any] = field(default_factory=dict)


_LATER: Mapping[str, Any] = {
    "replicate": 1,
    "reduce": "microbatch",
    "overlap": "none",
    "compile": "none",
    "logits": "whole",
}
"""Pins that keep every feature off that is a choice of the plan."""


def _steps() -> Iterator[Step]:
    """A trainer that waits for less and less, then one feature after the other that the plan may choose."""
    yield Step("nothing hidden", Waiting(), _LATER)
    yield Step("one FSDP root", Waiting(sharded=False), _LATER)
    yield Step("reductions under the backward", Waiting(sharded=False, reductions=False), _LATER)
    yield Step("gathers under the next forward", EMITTED, _LATER)
    pins = dict(_LATER)
    for name, key in (
        ("hybrid sharding", "replicate"),
        ("reductions once a step", "reduce"),
        ("tensor overlap", "overlap"),
        ("compiled layers", "compile"),
        ("logits in slices", "logits"),
    ):
        del pins[key]
        yield Step(name, EMITTED, dict(pins))


STEPS = tuple(_steps())


@dataclass(frozen=True)
class Request:
    """A model of the zoo, H100s in nodes of 8, and the global batch (the model's own if left out)."""

    title: str
    model: str
    gpus: int
    global_batch: int | None = None
    published: str | None = None  # the id of a row of groundtruth/published.jsonl


REQUESTS = (
    Request("Llama-3-8B", "llama3-8b", 64, 1024, "dgxc-llama3.1-8b-bf16-64"),
    Request("Llama-3-70B", "llama3-70b", 1024),
    Request("Llama-3-405B", "llama3-405b", 16384),
    Request("GPT-3 175B", "gpt3-175b", 128, 256, "dgxc-gpt3-175b-bf16-128"),
    Request("GPT-3 175B", "gpt3-175b", 2048, 4096, "dgxc-gpt3-175b-bf16-2048"),
    Request("Mixtral 8x7B", "mixtral-8x7b", 512),
)


def plans(request: Request, done: Sequence[str]) -> Iterator[tuple[Step, Plan, int | None]]:
    """The plan of every step whose name is not in ``done``, and the tokens of a sequence; one capture and one solution of the types serve
    all."""
    todo = [step for step in STEPS if step.name not in done]
    if not todo:
        return
    cluster = parse(f"{request.gpus // 8}x8xH100-80GB")
    graph = load_model(request.model, SizeOptions(None, request.global_batch, None)).capture()
    for step in todo:
        pricer = Pricer(graph, cluster, name_of(graph.dtype), trainer=step.trainer)
        options = SearchOptions(time_limit_s=TIME_LIMIT_S, **step.pins)
        yield step, find_plan(graph, cluster, options, pricer=pricer), sequence_length(graph)


def published(request: Request) -> dict[str, Any] | None:
    """The published run of the same model, hardware, batch and precision."""
    if request.published is None:
        return None
    rows = map(json.loads, (GROUNDTRUTH / "published.jsonl").read_text().splitlines())
    (row,) = (row for row in rows if row["id"] == request.published)
    assert row["precision"] == "bf16" and row["gpu"].startswith("H100-80GB"), row["id"]
    assert (row["n_gpus"], row["global_batch"]) == (request.gpus, request.global_batch), row["id"]
    found: dict[str, Any] = row
    return found


def rate(row: Mapping[str, Any]) -> float:
    """Tokens per second and GPU of a published run."""
    given = row["measured"]["tokens_per_s_per_gpu"]
    return float(given or row["derived"]["tokens_per_s_per_gpu_from_step"])


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page that is made of the results."""
    text = [
        "# What each feature gains\n",
        "Predicted tokens per second per GPU, for nodes of 8 H100-80GB, in bfloat16. Each row adds one feature of emitted "
        "programs to the row "
        "above, and has its own plan. *Change* is the change of the step time from the row above. Only the published figures are "
        "measured. *Gap* is the distance to the lower bound of the search. Layouts: p pipeline, m microbatches, d data, t "
        "tensor, z ZeRO.\n",
    ]
    for request in REQUESTS:
        own = {line["step"]: line for line in lines if (line["model"], line["gpus"]) == (request.model, request.gpus)}
        found = [own[step.name] for step in STEPS if step.name in own]
        if not found:
            continue
        text += [
            f"\n## {request.title} on {request.gpus:,} GPUs, {found[0]['global_batch']:,} sequences of {found[0]['seq']:,}\n",
            "| features | one step | tokens/s per GPU | MFU | change | gap | layout |",
            "|---|---|---|---|---|---|---|",
        ]
        before = None
        for line in found:
            ratio = f"{line['step_time_s'] / before - 1:+.1%}" if before else ""
            text.append(
                f"| {'+ ' if before else ''}{line['step']} | {line['step_time_s']:.3g} s | {line['tokens_per_s_per_gpu']:,.0f} | "
                f"{line['mfu']:.1%} | {ratio} | {line['gap']:.1%} | {line['layout']} |"
            )
            before = line["step_time_s"]
        text.append(
            f"\nAll features together: {found[0]['step_time_s'] / found[-1]['step_time_s']:.2f} times as fast as without."
        )
        if (row := published(request)) is not None:
            ratio = found[-1]["tokens_per_s_per_gpu"] / rate(row)
            text.append(
                f"\nPublished, tuned by hand ({row['source']['title']}, `{row['id']}`): {rate(row):,.0f} tokens/s per GPU; the prediction "
                f"for the automatic plan is {ratio:.2f} times that."
            )
        else:
            text.append("\nThe collected published runs include none of this model on these GPUs in bfloat16.")
    return "\n".join([*text, "\nMade by `make report NAME=features`. Do not edit."]) + "\n"


def layout(plan: Plan) -> str:
    """The plan in a few words: degrees, microbatches, and the ZeRO stages and recomputations with the numbers of their layers."""
    counts: dict[str, int] = {}
    data = plan.to_json()["layers"]
    for layer in data:
        how = f"d{layer['data']} t{layer['tensor']} z{layer['zero']}"
        how += f"/{layer['replicate']}" if layer["replicate"] > 1 else ""
        how += f" {layer['activations']}" if layer["activations"] != "keep" else ""
        counts[how] = counts.get(how, 0) + 1
    most = sorted(counts.items(), key=lambda pair: -pair[1])[:2]
    chunks = f" x {plan.chunks}" if plan.chunks > 1 else ""
    return f"p{plan.pipeline}{chunks} m{plan.microbatches}; " + ", ".join(f"{n} layers {how}" for how, n in most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="plan everything anew; else what the file lacks")
    parser.add_argument("--page", action="store_true", help="make the page anew, plan nothing")
    asked = parser.parse_args()
    lines: list[dict[str, Any]] = []
    if RESULTS.is_file() and not asked.fresh:
        lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for request in () if asked.page else REQUESTS:
        done = [line["step"] for line in lines if (line["model"], line["gpus"]) == (request.model, request.gpus)]
        for step, plan, seq in plans(request, done):
            figures = dataclasses.asdict(plan.prediction)
            lines.append(
                {
                    "model": request.model,
                    "gpus": request.gpus,
                    "step": step.name,
                    "global_batch": plan.global_batch,
                    "seq": seq,
                    "step_time_s": figures["step_time_s"],
                    "tokens_per_s_per_gpu": figures["tokens_per_s_per_device"],
                    "mfu": figures["mfu"],
                    "gap": plan.gap,
                    "layout": layout(plan),
                }
            )
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
            RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    PAGE.write_text(page(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
