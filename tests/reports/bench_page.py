"""The pages of the benchmark, from its results: ``docs/evidence/bench.md``, and the table in the README between ``<!-- bench -->`` marks.

``make report NAME=bench`` measures (``docs/evidence/bench-2.jsonl``, ``docs/evidence/bench-4.jsonl``) and then runs this.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from typing import Any

from places import EVIDENCE, ROOT

from autopar.bench.contest import AUTOMATIC
from autopar.bench.report import plot

README = ROOT / "README.md"
PAGE = EVIDENCE / "bench.md"
PROCESSES = [count for count in (2, 4) if (EVIDENCE / f"bench-{count}.jsonl").is_file()]

HEAD = """# Automatic programs against hand-tuned ones, measured

Every model is trained by the program that autopar chose and by programs written by hand with PyTorch's own modules: DDP, FSDP2,
`parallelize_module`, pipelines under torch's {schedules}, and on four processes combinations of two of these, each with several microbatch
sizes. All run in the same gloo processes on the same batches, in float32 with AdamW, one thread per process. In every round each program
runs once, in a new random order. After the first round, programs more than twice as slow as the best are dropped. The best by hand is
picked by its measured times, after the runs. Two processes have a core each, and are the result; four processes share the two cores.
"""

RATIOS = """Times are medians over rounds (fastest to slowest round). The ratio is the median of automatic / best by hand in the same round,
with a bootstrap 95 % interval; it is not the quotient of the two medians. Where the interval contains 1, the rounds show no difference.
"""

SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved-1f1b": "interleaved 1F1B",
    "zero-bubble": "zero bubble",
    "zbv": "ZBV",
}


def lines(processes: int) -> list[dict[str, Any]]:
    """The results on so many processes."""
    return [json.loads(text) for text in (EVIDENCE / f"bench-{processes}.jsonl").read_text().splitlines()]


def verdict(found: list[dict[str, Any]]) -> str:
    """The ratios of all models in one sentence."""
    ratios = [line["ratio"] for line in found]
    middle, worst = statistics.median(ratios), max(ratios)
    return f"Automatic over best by hand: {middle:.2f} in the median of {len(ratios)} models, {worst:.2f} at worst."


def schedules(found: Iterable[dict[str, Any]]) -> str:
    """The schedules of the pipelines by hand that were measured; a recipe that names none is one of 1F1B."""
    measured = {c["recipe"].get("schedule", "1f1b") for line in found for c in line["contenders"] if c["recipe"]}
    words = [text for name, text in SCHEDULES.items() if name in measured]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def contenders(line: dict[str, Any]) -> str:
    """Every program of one contest that ran, fastest first."""
    rows = ["| program | ms a step | fastest to slowest round | rounds | predicted |", "|---|---|---|---|---|"]
    running = [c for c in line["contenders"] if c["rounds_s"]]
    for one in sorted(running, key=lambda c: statistics.median(c["rounds_s"])):
        times = [1e3 * seconds for seconds in one["rounds_s"]]
        predicted = "-" if one["predicted_s"] is None else f"{1e3 * one['predicted_s']:.0f}"
        spread = f"{min(times):.0f} to {max(times):.0f}"
        rows.append(f"| {one['name']} | {statistics.median(times):.0f} | {spread} | {len(times)} | {predicted} |")
    failed = [c["name"] for c in line["contenders"] if not c["rounds_s"]]
    return "\n".join(rows) + "\n" + (f"\nDid not run: {', '.join(failed)}.\n" if failed else "")


def markdown(lines: Iterable[dict[str, Any]]) -> str:
    """The README's table, from the objects of ``Result.to_json``, with what its numbers are."""
    rows = [
        "| model | processes | automatic | best by hand | ratio (95 % interval) | automatic faster in |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        rounds_s = {c["name"]: c["rounds_s"] for c in line["contenders"]}
        ours, best = rounds_s[AUTOMATIC], rounds_s[line["best_hand_tuned"]]
        low, high = line["ratio_interval"]
        faster = sum(one < other for one, other in zip(ours, best, strict=True))
        rows.append(
            f"| {line['name']} | {line['processes']} | {_milliseconds(ours)} "
            f"| {_milliseconds(best)}: {line['best_hand_tuned']}, of {line['candidates']} "
            f"| {line['ratio']:.2f} ({low:.2f} to {high:.2f}) | {faster} of {len(ours)} rounds |"
        )
    return "\n".join(rows) + "\n\n" + RATIOS


def _milliseconds(rounds_s: list[float]) -> str:
    low, middle, high = (1e3 * seconds for seconds in (min(rounds_s), statistics.median(rounds_s), max(rounds_s)))
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def page() -> str:
    """``docs/evidence/bench.md``."""
    text = HEAD.format(schedules=schedules(line for processes in PROCESSES for line in lines(processes)))
    for processes in PROCESSES:
        found = lines(processes)
        text += f"\n## {processes} processes\n\n{verdict(found)}\n\n{markdown(found)}\n![measured step times](bench-{processes}.svg)\n"
        for line in found:
            text += f"\n### {line['name']} on {processes} processes\n\n{contenders(line)}"
    return text + "\nMade by `make report NAME=bench`. Do not edit.\n"


def readme(text: str) -> str:
    """The README's ``text`` with the table of two processes in its place."""
    table = f"<!-- bench -->\n{markdown(lines(2))}<!-- end bench -->"
    changed, count = re.subn(r"<!-- bench -->\n.*?<!-- end bench -->", lambda _: table, text, flags=re.DOTALL)
    assert count == 1, "the README has no place for the benchmark's table"
    return changed


def main() -> None:
    for processes in PROCESSES:
        plot(lines(processes), EVIDENCE / f"bench-{processes}.svg")
    PAGE.write_text(page())
    README.write_text(readme(README.read_text()))


if __name__ == "__main__":
    main()
