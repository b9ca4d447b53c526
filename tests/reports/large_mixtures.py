"""Plans of the largest open mixtures of experts: ``make report NAME=large-mixtures`` writes ``docs/evidence/large-mixtures.{jsonl,md}``.

Each line is a process of its own, ``autopar plan`` on a model of the zoo in its published configuration, from the first import to the
plan. DeepSeek-V3 is also planned with the pins of its published layout.
"""

from __future__ import annotations

from typing import Any

from places import EVIDENCE
from planning import machine_words, measure, resumed

PUBLISHED = ("--pipeline", "16", "--expert", "64", "--zero", "1", "--tensor", "1")
"""DeepSeek-V3's layout: arXiv:2412.19437, section 3.2."""

CASES: tuple[dict[str, Any], ...] = (
    {"model": "deepseek-v3", "devices": "256x8xH800", "batch": 2048, "pins": ()},
    {"model": "deepseek-v3", "devices": "256x8xH800", "batch": 2048, "pins": PUBLISHED},
    {"model": "deepseek-v3", "devices": "256x8xH800", "batch": 15360, "pins": ()},
    {"model": "deepseek-v3", "devices": "256x8xH800", "batch": 15360, "pins": PUBLISHED},
    {"model": "kimi-k2", "devices": "512x8xH800", "batch": 4096, "pins": ()},
    {"model": "qwen3-235b-a22b", "devices": "64x8xH100", "batch": 1024, "pins": ()},
    {"model": "gpt-oss-120b", "devices": "8x8xH100", "batch": 256, "pins": ()},
)
TOKENS = 4096  # of a sequence


def work(case: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the line of a case."""
    request = [case["model"], "--devices", case["devices"], "--seq", str(TOKENS), "--global-batch", str(case["batch"])]
    return case | measure([*request, *case["pins"]], limit_s)


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of the lines."""
    parts = [
        "# Large mixtures of experts\n",
        f"`autopar plan` with its default time limit of 20 s for the search, for sequences of {TOKENS:,} tokens, each plan "
        "in a new process.",
        "Times are user time from the first import to the plan, capture included. The gap is the largest share of the step time that",
        f"another searched plan could save. {machine_words(lines)}\n",
        "| model | devices | sequences | pins | step | gap | processor | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        pins = " ".join(line["pins"]) or "-"
        rest = line.get("error", "")[:80] + " | - | - | -"
        if "gap" in line:
            memory = f"{line['planning_memory_bytes'] / 1e6:,.0f} MB"
            rest = f"{line['step_time_s']:.2f} s | {line['gap']:.1%} | {line['user_s']:.1f} s | {memory}"
        parts.append(f"| {line['model']} | {line['devices']} | {line['batch']:,} | {pins} | {rest} |")
    return "\n".join([*parts, "", "Made by `make report NAME=large-mixtures`. Do not edit."]) + "\n"


def main() -> None:
    lines = resumed(
        EVIDENCE / "large-mixtures.jsonl",
        [case | {"pins": list(case["pins"])} for case in CASES],
        lambda case, limit_s: work(dict(case), limit_s),
        __doc__,
        600.0,
    )
    (EVIDENCE / "large-mixtures.md").write_text(page(lines))


if __name__ == "__main__":
    main()
