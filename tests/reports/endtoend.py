"""The plans that matter, from the command line to the printed plan: ``make report NAME=endtoend`` writes ``docs/endtoend.{jsonl,md}``.

Each case is a process of its own, imports and capture included. The seconds of the wall are what a user waits, on a machine that does
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from places import EVIDENCE
from planning import machine_words, measure, resumed

GAP = 0.01
MEMORY_BYTES = 2 * 10**9

CASES: tuple[tuple[str, tuple[str, ...], float], ...] = (  # what, the request, within how many seconds
    ("Llama-3-8B", ("llama3-8b", "--devices", "8x8xH100-80GB"), 5.0),
    ("Llama-3-70B", ("llama3-70b", "--devices", "128x8xH100-80GB"), 12.0),
    ("GPT-1T", ("gpt-1t", "--devices", "512x8xH100-80GB"), 12.0),
    ("Llama-3-405B", ("llama3-405b", "--devices", "2048x8xH100-80GB"), 25.0),
    ("Mixtral 8x7B", ("mixtral-8x7b", "--devices", "64x8xH100-80GB"), 12.0),
    (
        "128 layers of 8 kinds",
        ("tests/models/kinds.py:kinds", "--devices", "2048x8xH100-80GB", "--pin", "pipeline=8"),
        60.0,
    ),
)


def page(lines: list[dict[str, Any]]) -> str:
    """The page that is made of the results."""
    parts = [
        "# From the command line to the plan\n",
        "Time and memory of `autopar plan`, each in a new process: imports, capture, cost model and search.",
        f"{machine_words(lines)}\n",
        "With default settings, which also search interleaved pipelines (several chunks of layers on each device):\n",
        *_table([line for line in lines if not line["plain"]]),
        "\nThe same requests with `--pin chunks=1`, one chunk on each device, where the bound is tighter and the plan may be slower:\n",
        *_table([line for line in lines if line["plain"]]),
        f"\n*Target* is the wall time; the targets for the gap and the memory are {GAP:.0%} and {MEMORY_BYTES / 1e9:.0f} GB. "
        "Bold figures miss their target.\n\nMade by `make report NAME=endtoend`. Do not edit.",
    ]
    return "\n".join(parts) + "\n"


def _table(lines: list[dict[str, Any]]) -> list[str]:
    found = [
        "| model | request | wall | processor | target | peak memory | gap | one step | chunks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        (name, request, wanted) = next(case for case in CASES if case[0] == line["case"])
        wall = _marked(f"{line['wall_s']:.1f} s", line["wall_s"] > wanted)
        cells = [name, f"`autopar plan {' '.join(request)}`", wall, f"{line['user_s']:.1f} s", f"{wanted:.0f} s"]
        if "gap" in line:
            peak = line["planning_memory_bytes"]
            cells += [
                _marked(f"{peak / 1e6:,.0f} MB", peak > MEMORY_BYTES),
                _marked(f"{line['gap']:.2%}", line["gap"] > GAP),
                f"{line['step_time_s']:.2f} s",
                str(line["chunks"]),
            ]
        else:
            cells += ["-", line["error"][:80], "-", "-"]
        found.append(f"| {' | '.join(cells)} |")
    return found


def _marked(text: str, over: bool) -> str:
    return f"**{text}**" if over else text


def main() -> None:
    requests = {name: request for name, request, _ in CASES}

    def one(case: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        return {
            **case,
            **measure((*requests[case["case"]], *(["--pin", "chunks=1"] if case["plain"] else [])), limit_s),
        }

    cases = [{"case": name, "plain": plain} for plain in (False, True) for name in requests]
    lines = resumed(EVIDENCE / "endtoend.jsonl", cases, one, __doc__, 600.0)
    (EVIDENCE / "endtoend.md").write_text(page(lines))


if __name__ == "__main__":
    main()
