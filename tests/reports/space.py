"""Whether a pin beats the plan that no pin constrains: ``python tests/reports space`` (``make report NAME=space``).

Requests are planned without a pin, and again with each pin that the model admits. No pinned plan may be faster by more than 1 %, and
none may be below the bound that the plan without a pin claims: a bound that leaves out what a pin can say is no bound for its user.
Requests that were once found to break this come first; then come requests drawn at random, from batches far below the number of devices to
far above, 1 to 100,000 GPUs, odd counts of nodes, 4 to 1,000 layers, short and long sequences, and experts.

One JSON line a request and pin; the page is made from them. Lines carry a fingerprint of the code: a run does what the file lacks for this
code. Every request has a process of its own, whose peak memory is that of all its plans; ``--jobs 2`` runs two at a time. Time limits count
processor seconds of the process. Other work on the machine still makes each of them do less, and a plan found shortly before the limit may
change. ``--requests 0-9`` does some of the requests only, ``--page`` writes the page from the lines and plans nothing.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from places import EVIDENCE
from results import Line, Results, options, quiet
from rich.progress import track

from autopar.cli.load import SizeOptions, load_model
from autopar.devices import Cluster, parse
from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.study import shared_pricers
from autopar.planning import find_plan
from autopar.search import SearchOptions
from autopar.shard import annotate

RESULTS = EVIDENCE / "space.jsonl"
MORE = 0.01
"""The share of a step by which a pinned plan may be faster: the gap at which a search stops."""
DRAWN = 52
SECONDS = 20.0

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2**20,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A model of the zoo, or LLAMA with other numbers of layers and of hidden features; devices, tokens of a sequence and sequences."""

    model: str
    devices: str
    seq: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model} on {self.devices}, {self.batch:,} sequences of {self.seq:,}"


FOUND = (
    Request("llama3-405b", "512x8xH100-80GB", 8192, 32),
    Request("llama3-70b", "128x8xH100-80GB", 8192, 64),
    Request("llama3-8b", "64x8xH100-80GB", 8192, 64),
    Request("llama 32 x 4096", "384x8xH100-80GB", 4096, 3072),
    Request("qwen3-30b-a3b", "64x8xH100-80GB", 4096, 256),
    Request("llama 32 x 4096", "127x8xH100-80GB", 4096, 1024),
    Request("llama3-8b", "8xH100-80GB", 2**20, 1),
    Request("llama3-8b", "1x8xH100-80GB", 131072, 1),
)


def requests() -> list[Request]:
    """Those that were found, and ``DRAWN`` at random."""
    rng, found = random.Random(0), list(FOUND)
    kinds = ("H100-80GB", "A100-80GB", "A100-40GB")
    while len(found) < len(FOUND) + DRAWN:
        nodes = rng.choice((1, 1, 2, 3, 4, 7, 8, 12, 16, 24, 31, 32, 64, 100, 128, 250, 512, 1024, 3125, 12500))
        each = rng.choice((8, 8, 8, 4)) if nodes > 1 else rng.choice((1, 2, 4, 8, 8))
        devices, seq = nodes * each, rng.choice((512, 1024, 2048, 4096, 4096, 8192, 8192, 32768, 131072))
        batch = max(1, int(devices * rng.choice((0.06, 0.25, 0.5, 1, 1, 2, 4, 16))))
        if batch * seq > 2**28:
            continue
        layers = rng.choice((4, 8, 16, 32, 32, 48, 80, 126, 250, 1000))
        shape = rng.choice((f"llama {layers} x {rng.choice((1024, 2048, 4096, 8192))}", "zoo"))
        model = rng.choice(("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b")) if shape == "zoo" else shape
        found.append(Request(model, f"{nodes}x{each}x{rng.choice(kinds)}", seq, batch))
    return found


def pins(cluster: Cluster) -> list[dict[str, Any]]:
    """The pins that every request on ``cluster`` is planned with."""
    nodes = cluster.count // cluster.gpus_per_node
    return [
        {},
        {"ring": 2},
        {"ring": 8},
        {"ulysses": 2},
        {"ulysses": 8},
        {"tensor": 8},
        {"pipeline": 1},
        {"pipeline": 16},
        {"schedule": "interleaved-1f1b"},
        {"zero": 3},
        {"replicate": 2},
        {"replicate": max(nodes // 8, 4)},
        {"activations": "full"},
        {"tensor": 1},
        {"pipeline": 4},
        {"microbatches": 1},
        {"expert": 8},
    ]


def run_all(request: Request, kept: set[str], most: int | None) -> list[Line]:
    """``run`` in a process of its own."""
    quiet()
    time.monotonic = time.process_time  # the clock of the search's time limits
    return list(run(request, kept, most))


def run(request: Request, kept: set[str], most: int | None = None) -> Iterator[Line]:
    """The lines of one request that ``kept`` lacks: without a pin, then with each of the first ``most``."""
    wanted = [pin for pin in pins(parse(request.devices))[:most] if _written(pin) not in kept]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        model = request.model
        if model.startswith("llama "):
            layers, width = (int(number) for number in model.removeprefix("llama ").split(" x "))
            heads = {"num_attention_heads": width // 128, "num_key_value_heads": width // 128}
            sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 11 * width // 4}
            model = str(Path(folder) / "config.json")
            Path(model).write_text(json.dumps(LLAMA | heads | sizes))
        workload = load_model(model, SizeOptions(request.seq, request.batch, None))
        graph = annotate(workload.capture())
    cluster, pricer_of = parse(request.devices), shared_pricers()
    for pin in wanted:
        line: Line = {"request": str(request), "pin": _written(pin)}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        try:
            asked = SearchOptions(pin=pin, time_limit_s=SECONDS)
            plan = find_plan(graph, cluster, asked, pricer=pricer_of(graph, cluster), may_be_idle=not pin)
            line |= {"step_time_s": plan.prediction.step_time_s, "bound_s": plan.bound_s, "gap": plan.gap}
            line |= {"devices": plan.device_count, "plan": str(plan)}
        except InfeasibleError as error:
            line |= {"infeasible": error.message}
        except AutoparError as error:
            line |= {"refused": error.message}
        used = resource.getrusage(resource.RUSAGE_SELF)
        yield line | {"user_s": round(used.ru_utime - before, 2), "process_bytes": used.ru_maxrss * 1024}


def _written(pin: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pin.items())


def judged(lines: list[Line]) -> list[dict[str, Any]]:
    """Each request with its default plan, its best pin, and the pins that break what the default claims."""
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(line["request"] for line in lines):
        of = {line["pin"]: line for line in lines if line["request"] == name}
        free = of.pop("", {})
        planned = {pin: line["step_time_s"] for pin, line in of.items() if "step_time_s" in line}
        own, bound = free.get("step_time_s", float("inf")), free.get("bound_s", 0.0)
        best = min(planned, key=lambda pin: planned[pin], default="")
        found.append(
            {
                "request": name,
                "default": free,
                "pins": len(planned),
                "best": best,
                "best_s": planned.get(best),
                "faster": {pin: 1 - s / own for pin, s in planned.items() if s < own * (1 - MORE)},
                "below": [pin for pin, s in planned.items() if s < bound * (1 - 1e-9)],
                "user_s": max(line["user_s"] for line in (free, *of.values()) if line),
            }
        )
    return found


def page(lines: list[Line]) -> str:
    """The page that is made of the lines."""
    found = judged(lines)
    broken = [each for each in found if each["faster"]]
    below = [each for each in found if each["below"]]
    planned = [line["user_s"] for line in lines if "step_time_s" in line]
    others = [line["user_s"] for line in lines if "step_time_s" not in line]
    largest = max((line.get("process_bytes", 0) for line in lines), default=0)
    text = [
        "# Pinned plans against the default plan\n",
        "A pin restricts the search, so a pinned plan that is faster than the default plan (without pins), or below its lower bound, is an",
        f"error of the search. For {len(found)} requests, {sum(each['pins'] for each in found)} plans with one pin each were searched. In",
        f"{len(broken)} requests a pinned plan is faster than the default by more than {MORE:.0%}; in {len(below)} requests "
        "a pinned plan is below the",
        f"bound. The slowest of {len(planned)} plans took {max(planned, default=0.0):.1f} s of processor time; the slowest "
        f"of {len(others)} refusals (nothing",
        f"fits, or the pin is impossible) took {max(others, default=0.0):.1f} s. The process that made all plans of a "
        "request needed at most",
        f"{largest / 1e9:.2f} GB. *Faster* is a share of the default's step time.\n",
        "| request | default step | gap | best pin | its step | faster | below the bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in sorted(found, key=lambda each: -max(each["faster"].values(), default=0.0)):
        free = each["default"]
        own = f"{free['step_time_s']:.4g} s | {free['gap']:.2%}" if "step_time_s" in free else "nothing fits | -"
        best = f"`{each['best']}` | {each['best_s']:.4g} s" if each["best"] else "- | -"
        faster = ", ".join(f"`{pin}` {share:.1%}" for pin, share in sorted(each["faster"].items(), key=lambda p: -p[1]))
        text.append(f"| {each['request']} | {own} | {best} | {faster or '-'} | {', '.join(each['below']) or '-'} |")
    return "\n".join([*text, "", "Made by `make report NAME=space`. Do not edit."]) + "\n"


def main() -> int:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--requests", metavar="I-J", help="these requests only, by number")
    parser.add_argument("--first", type=int, metavar="N", help="the plan without a pin and the first N - 1 pins only")
    parser.add_argument("--page", action="store_true", help="write the page from the lines, and plan nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="requests at a time")
    args = parser.parse_args()
    results, every = Results(args.results, ("request", "pin"), lambda line: True), requests()
    if not args.page:
        first, _, last = (args.requests or f"0-{len(every) - 1}").partition("-")
        kept = results.kept(args)
        wanted = every[int(first) : int(last or first) + 1]
        done = {str(request): {pin for name, pin in kept if name == str(request)} for request in wanted}
        with ProcessPoolExecutor(args.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
            running = [pool.submit(run_all, request, done[str(request)], args.first) for request in wanted]
            for finished in track(as_completed(running), description="requests", total=len(running)):
                for line in finished.result():
                    results.append(line)
    names = {str(request): number for number, request in enumerate(every)}
    order = sorted(results.read(), key=lambda case: names.get(case[0], len(names)))
    lines = results.tidy(case for case in order if case[0] in names)
    args.results.with_suffix(".md").write_text(page(lines))
    wrong = [each for each in judged(lines) if each["faster"] or each["below"]]
    sys.stdout.write(
        f"{len(lines)} plans, {len(wrong)} requests in which a pin breaks what the default claims: {args.results}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
