"""Planning time against layers and devices: ``make report NAME=growth`` measures and writes ``docs/growth.{jsonl,svg,md}``.

Each point is a process of its own, ``autopar plan`` on a configuration in the shape of Llama-3-8B with another number of layers, from
the first import to the plan. What is drawn is the processor's time: that of the wall is kept beside it, and is what else ran on the
machine as well.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from places import EVIDENCE
from planning import machine_words, measure, resumed

from autopar.picture import pyplot, save

LAYERS = (32, 64, 128, 256)
DEVICES = (8, 64, 512, 4096, 16_384, 65_536)
FIXED_LAYERS, FIXED_DEVICES = 32, 1024
PEER_DEVICES = 64
ROWS = 1024  # of the global batch, on every point
SEARCH_S = 600  # of the wall, for one search: what else the machine does cuts none short
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip

PEERS = (  # who, what, how long, where it is said
    (
        "meta-pytorch/autoparallel", "Llama 8B: op placements on a given mesh; no pipeline, no degrees",
        "46.8 s: trace 13.4, build 15.5, solve 17.5", "https://github.com/meta-pytorch/autoparallel/pull/521",
    ),
    (
        "the same, writing the program", "32 layers of Llama-3-8B, the two largest parts of applying a solution",
        "8.7 s and 5.0 s", "https://github.com/meta-pytorch/autoparallel/pull/358",
    ),
    (
        "alpa", "GPT-39B, compilation and profiling of stages", "about 40 minutes", "https://arxiv.org/abs/2201.12023",
    ),
)  # fmt: skip


def points() -> list[tuple[int, int]]:
    """(layers, devices) of every point, each once."""
    found = [(layers, FIXED_DEVICES) for layers in LAYERS] + [(FIXED_LAYERS, devices) for devices in DEVICES]
    return list(dict.fromkeys(found))


def point(layers: int, devices: int, limit_s: float) -> dict[str, Any]:
    """One point."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        request = [str(path), "--devices", f"{devices // 8}x8xH100-80GB", "--seq", "8192", "--global-batch", str(ROWS)]
        request += ["--time-limit", str(SEARCH_S)]
        return {"layers": layers, "devices": devices} | measure(request, limit_s)


def page(lines: list[dict[str, Any]]) -> str:
    """The page that is made of the results."""
    parts = [
        "# How planning time grows\n",
        "`autopar plan` for Llama-3-8B and variants with more layers, on nodes of 8 H100, with a global batch of",
        f"{ROWS:,} sequences of 8,192 tokens. Each plan is made in a new process on one core. Times are user time, imports and capture",
        "included. The search stops at a gap of 1 %.",
        f"{machine_words(lines)}\n",
        "![planning time](growth.svg)\n",
    ]
    for title, wanted in (
        (f"Layers, on {FIXED_DEVICES:,} GPUs", [x for x in lines if x["devices"] == FIXED_DEVICES]),
        (f"GPUs, {FIXED_LAYERS} layers", [x for x in lines if x["layers"] == FIXED_LAYERS]),
    ):
        parts += [
            f"## {title}\n",
            "| layers | GPUs | processor | gap | peak memory |",
            "|---|---|---|---|---|",
        ]
        for x in sorted(wanted, key=lambda x: (x["layers"], x["devices"])):
            rest = (
                f"{x['gap']:.2%} | {x['planning_memory_bytes'] / 1e6:,.0f} MB"
                if "gap" in x
                else f"{x['error'][:80]} | -"
            )
            parts.append(f"| {x['layers']} | {x['devices']:,} | {x['user_s']:.1f} s | {rest} |")
        parts.append("")
    same = [x for x in lines if (x["layers"], x["devices"]) == (FIXED_LAYERS, PEER_DEVICES) and "gap" in x]
    parts += [
        "## Other planners\n",
        "Planning times that the authors of other planners report. Machines and problems differ, so the times are not "
        "comparable directly.\n",
        "| planner | problem | time | source |",
        "|---|---|---|---|",
        *(
            f"| autopar | Llama-3-8B on {PEER_DEVICES} GPUs: everything, from the first import to the plan | {x['user_s']:.1f} s | above |"
            for x in same
        ),
        *(f"| {who} | {what} | {took} | <{source}> |" for who, what, took, source in PEERS),
        "",
    ]
    return "\n".join([*parts, "Made by `make report NAME=growth`. Do not edit."]) + "\n"


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Processor seconds, one panel against layers and one against devices."""
    figure, panels = pyplot().subplots(1, 2, figsize=(8, 3), sharey=True)
    for panel, name, other, fixed in zip(
        panels, ("layers", "devices"), ("devices", "layers"), (FIXED_DEVICES, FIXED_LAYERS), strict=True
    ):
        some = sorted((x for x in lines if x[other] == fixed), key=lambda x: x[name])
        panel.plot([x[name] for x in some], [x["user_s"] for x in some], marker="o", markersize=3)
        panel.set_xscale("log", base=2)
        panel.set_xlabel(f"{name} ({fixed:,} {other})")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds of processor time")
    save(figure, path, metadata={"Date": None})


def main() -> None:
    lines = resumed(
        EVIDENCE / "growth.jsonl",
        [{"layers": layers, "devices": devices} for layers, devices in points()],
        lambda case, limit_s: point(case["layers"], case["devices"], limit_s),
        __doc__,
        900.0,
    )
    draw(lines, EVIDENCE / "growth.svg")
    (EVIDENCE / "growth.md").write_text(page(lines))


if __name__ == "__main__":
    main()
