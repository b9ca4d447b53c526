"""The page of the report of overlap, ``docs/evidence/overlap.md``, from its lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from bench_page import contenders, schedules, verdict
from overlap_cases import FEATURES, Feature
from overlap_trace import communication_share, draw, hidden_share
from places import EVIDENCE

from autopar.timing import paired_ratio

RESULTS, PAGE = EVIDENCE / "overlap.jsonl", EVIDENCE / "overlap.md"
LINK, FEATURE, CLOCK, CONTEST = "link", "feature", "clock", "contest"
"""The parts of the results."""
WITH, WITHOUT = "with", "without"
"""The two emitted programs of a kind of overlap."""

Line = dict[str, Any]

HEAD = """# Communication under computation, measured without a GPU

Between processes of one machine, communication uses the same processors as computation, so overlapping them gains little. Here every
process runs on a *limited node*: a network namespace with a link of a given rate (`tc`, a token bucket). A transfer takes its time on the
link and almost no processor time, as between machines. Each node has one process with one computing thread, which gets an equal share of
three quarters of the machine's processors and no more (`cpu.cfs_quota_us`), so an idle node does not make others faster. gloo's threads
use the rest, without a limit. Programs use gloo, float32 and AdamW.

Programs take turns on the same nodes: in each round every program runs once, in a new random order, with one warm-up step. Times are
medians over rounds; ratios are medians over rounds of the ratio within a round, with a bootstrap 95 % interval. Predictions use
measurements of the same links.
"""

FEATURES_HEAD = """
## With and without each kind of overlap

There are two kinds of programs without overlap. Either a few lines at the end of one file turn the overlap off: then the report fails
unless the losses of all steps are bitwise equal. Or the plan has one different pin, and the program may sum in another order: then losses
differ by rounding. Communication time, and the share of it that is hidden, come from torch's profiler over one more step of each program.
A span of communication includes the wait for the slowest node; in a pipeline it lasts from a send to its receipt.
"""


def read() -> list[Line]:
    """The results so far."""
    return [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def write_page(lines: Sequence[Line]) -> None:
    """The page, and a picture of every kind of overlap."""
    for feature, line in measured_features(lines):
        draw({named(feature, line, name): ranks for name, ranks in line["traces"].items()}, EVIDENCE / picture(feature))
    PAGE.write_text(page(lines))


def page(lines: Sequence[Line]) -> str:
    """``docs/evidence/overlap.md``."""
    parts = [HEAD, _features(lines), _clock(lines), _contests(lines), links(lines), _failures(lines)]
    return "".join(part for part in parts if part) + "\nMade by `make report NAME=overlap`. Do not edit.\n"


def of_part(lines: Sequence[Line], part: str) -> list[Line]:
    """The lines of a part that were measured."""
    return [line for line in lines if line["part"] == part and "error" not in line]


def measured_features(lines: Sequence[Line]) -> list[tuple[Feature, Line]]:
    by_name = {line["name"]: line for line in of_part(lines, FEATURE)}
    return [(feature, by_name[feature.name]) for feature in FEATURES if feature.name in by_name]


def picture(feature: Feature) -> str:
    return f"overlap-{feature.name}.svg"


def named(feature: Feature, line: Line, program: str) -> str:
    """A program's name under its picture."""
    return {WITH: "emitted", WITHOUT: f"without overlap: {feature.without}"}.get(program, f"by hand: {line['by_hand']}")


def ratio(line: Line, program: str) -> tuple[float, tuple[float, float]]:
    """The emitted program's time over that of another, with its interval."""
    return paired_ratio(tuple(line["rounds_s"][WITH]), tuple(line["rounds_s"][program]), line["seed"])


def _ratio(line: Line, program: str) -> str:
    middle, (low, high) = ratio(line, program)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _ms(line: Line, program: str) -> str:
    return f"{1e3 * statistics.median(line['rounds_s'][program]):.0f} ms"


def _features(lines: Sequence[Line]) -> str:
    found = measured_features(lines)
    if not found:
        return ""
    rows = [
        "| overlap | model, link | with | without | with / without | predicted ratio | by hand | with / by hand | communication |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for feature, line in found:
        priced = line["priced_s"]
        cells = [
            f"[{feature.name}](#{feature.name})",
            f"{line['model']}, {line['nodes']} x {line['rate']}",
            _ms(line, WITH),
            _ms(line, WITHOUT),
            _ratio(line, WITHOUT),
            f"{priced[WITH] / priced[WITHOUT]:.2f}",
            f"{_ms(line, line['by_hand'])}: {line['by_hand']}",
            _ratio(line, line["by_hand"]),
            f"{communication_share(line['traces'][WITHOUT]):.0%} of a step, hidden {_hidden(line, WITHOUT)} → {_hidden(line, WITH)}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([FEATURES_HEAD, *rows, *(_feature(feature, line) for feature, line in found), ""])


def _hidden(line: Line, program: str) -> str:
    return f"{hidden_share(line['traces'][program]):.0%}"


def _feature(feature: Feature, line: Line) -> str:
    priced, losses = line["priced_s"], line["losses"]
    steps = f"{line['steps']} timed step{'s' * (line['steps'] > 1)}"
    return f"""
### {feature.name}

{feature.about}. Without: {feature.without}. {feature.note}

![spans of computation and communication]({picture(feature)})

- {line["rounds"]} rounds of {steps}, at a load average of {line["load"]}.
- The predicted step time is {1e3 * priced[WITH]:.0f} ms with and {1e3 * priced[WITHOUT]:.0f} ms without the overlap.
- The losses of {losses["steps"]} steps {_differ(losses["without_difference"])} the program without overlap, and
  {_differ(losses["by_hand_difference"])} the program by hand ({line["by_hand"]}).
{_change(feature)}"""


def _differ(difference: float) -> str:
    return (
        f"differ by at most a share of {difference:.1g} from those of"
        if difference
        else "are bitwise equal to those of"
    )


def _change(feature: Feature) -> str:
    """How the program without overlap differs."""
    if feature.pins_without:
        return f"- The plan without overlap pins {' and '.join(f'`{k}={v}`' for k, v in feature.pins_without.items())}."
    return "\n".join(
        f"- These lines at the end of `{name}` turn the overlap off:\n\n```python\n{patch.rstrip()}\n```"
        for name, patch in feature.patch.items()
    )


def _clock(lines: Sequence[Line]) -> str:
    found = of_part(lines, CLOCK)
    if not found:
        return ""
    layers, times = found[0]["layers"], found[0]["times_s"]
    compute_s = layers * (times["forward"] + times["backward"])
    rows = [
        "| all-gather, reduce-scatter of a layer | one root per layer | one root, prefetch 1 layer | one root, prefetch 2 "
        "layers | lower bound |",
        "|---|---|---|---|---|",
    ]
    for line in found:
        t, seconds = line["times_s"], line["step_s"]
        cells = [f"{t['gather']:g} s, {t['reduce']:g} s"]
        cells += [f"{seconds[name]:g} s" for name in ("own roots", "a layer ahead", "two layers ahead")]
        communicate_s = layers * (2 * t["gather"] + t["reduce"])
        cells.append(f"{max(compute_s + t['gather'] + t['reduce'], communicate_s):g} s")
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    return f"""
## FSDP on a device with streams

Simulated: torch's FSDP2 runs on gloo, while a simulated clock replaces the device's streams and events; the host takes no time. ZeRO 3 on
two ranks, with {layers} layers of {times["forward"]:g} s forward and {times["backward"]:g} s backward. The lower bound is the computation
plus the first all-gather and the last reduce-scatter, or all communication, if that is longer.

{table}
"""


def _contests(lines: Sequence[Line]) -> str:
    found = of_part(lines, CONTEST)
    if not found:
        return ""
    text = f"""
## Automatic programs against hand-written ones with the same overlap

The automatic program has the plan for these nodes. The hand-written programs use all nodes: DDP with buckets of 25 MB (its default) and
of 4 MB; nested FSDP2 with prefetch of one block, with and without resharding after the forward pass; tensor parallelism by
`parallelize_module`; pipelines with torch's {schedules([line["result"] for line in found])}, up to four microbatches per node, and at
least one block per stage. The best by hand is picked by its measured times. After the first round, programs more than twice as slow as
the best are dropped.
"""
    for nodes in sorted({line["nodes"] for line in found}):
        chosen = [line for line in found if line["nodes"] == nodes]
        rows = ["| model | link | automatic plan | automatic | best by hand | ratio |", "|---|---|---|---|---|---|"]
        for line in chosen:
            result = line["result"]
            low, high = result["ratio_interval"]
            cells = [
                result["name"],
                line["rate"],
                plan_words(result["plan"]),
                f"{1e3 * result['automatic_s']:.0f} ms",
                f"{1e3 * result['best_hand_tuned_s']:.0f} ms: {result['best_hand_tuned']}",
                f"{result['ratio']:.2f} ({low:.2f} to {high:.2f})",
            ]
            rows.append(f"| {' | '.join(cells)} |")
        text += f"\n### {nodes} nodes\n\n{verdict([line['result'] for line in chosen])}\n\n" + "\n".join(rows) + "\n"
        for line in chosen:
            text += f"\n#### {line['result']['name']} on {nodes} nodes, at a load average of {line['load']}\n\n{contenders(line['result'])}"
    return text


def plan_words(plan: Line) -> str:
    """A plan of a contest's result in a few words."""
    axes = " x ".join(f"{axis['name']} {axis['size']}" for axis in plan["mesh"] if axis["size"] > 1)
    stages = f"{plan['pipeline']} stages, {plan['schedule']}" if plan["pipeline"] > 1 else ""
    roles = sorted({role for layer in plan["layers"] for role in layer["roles"]} - {"idle"})
    zero = sorted({layer["zero"] for layer in plan["layers"]})
    words = [axes, stages, " and ".join(roles) if axes else "", f"ZeRO {'/'.join(map(str, zero))}" * any(zero)]
    count = plan["microbatches"]
    return ", ".join([word for word in words if word] + [f"{count} microbatch{'es' * (count > 1)}"])


def links(lines: Sequence[Line]) -> str:
    """The table of links, as they were measured."""
    found = of_part(lines, LINK)
    if not found:
        return ""
    rows = [
        "| nodes, rate | 256 bytes | 4 MiB | all-reduce of 4 MiB | slow-down of computation by hidden communication |",
        "|---|---|---|---|---|",
    ]
    for line in found:
        figures = line["calibration"]["figures"]

        def wire(variant: str, size: int, figures: list[Line] = figures, nodes: int = line["nodes"]) -> float:
            members = 2 if variant == "p2p" else nodes
            return next(
                f["median"]
                for f in figures
                if (f["name"], f["variant"], f["size"].get("members"), f["size"].get("bytes"))
                == ("wire", variant, members, size)
            )

        share = next(f["median"] for f in figures if f["name"] == "overlap")
        long_s = wire("p2p", 1 << 22)
        cells = [
            line["name"],
            f"{1e6 * wire('p2p', 1 << 8):.0f} us",
            f"{1e3 * long_s:.0f} ms, {8e-6 * (1 << 22) / long_s:.0f} Mbit/s",
            f"{1e3 * wire('all_reduce', 1 << 22):.0f} ms",
            f"{share:.0%} of the hidden time",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n## The links, as `autopar profile` measures them\n\n" + "\n".join(rows) + "\n"


def _failures(lines: Sequence[Line]) -> str:
    failed = [line for line in lines if "error" in line]
    rows = [f"- {line['part']} {line['name']}: {line['error'].partition(chr(10))[0]}" for line in failed]
    return "\n## Not measured\n\n" + "\n".join(rows) + "\n" if rows else ""
