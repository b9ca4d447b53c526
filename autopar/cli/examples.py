"""The examples at the end of every command's help."""

from __future__ import annotations

import click

EXAMPLES: dict[str, tuple[str, ...]] = {
    "plan": (
        "autopar plan llama3-70b --devices 128x8xH100-80GB",
        "autopar plan config.json --devices cluster.toml --global-batch 512 --pipeline 4 -o plan.json",
        "autopar plan model.py:factory --devices 4 --pin lm_head.zero=3",
    ),
    "explain": (
        "autopar explain plan.json",
        "autopar explain llama3-8b --devices 8xH100-80GB --global-batch 64",
    ),
    "report": ("autopar report plan.json -o report.html", "autopar report plan.json other.json -o both.html --explain"),
    "trace": (
        "autopar trace plan.json -o trace.json",
        "autopar trace plan.json -o both.json --measured step.json",
    ),
    "sweep": (
        "autopar sweep llama3-8b --devices 8..512 --gpu-hour 2.5",
        "autopar sweep gpt2 --devices 8,16 --gpu H100-80GB,A100-80GB --seq 1024 --plot sweep.svg",
    ),
    "emit": (
        "autopar emit model.py:factory --devices 4 -o program",
        "autopar emit llama3-8b --devices 8xH100-80GB --plan plan.json --init own -o program",
    ),
    "run": (
        "autopar run model.py:factory --devices 2 --steps 20",
        "autopar run model.py:factory --devices 8 --checkpoint saved --resume",
    ),
    "launch": ("autopar launch program --slurm train.sbatch -- --checkpoint saved --data data.pt",),
    "bench": ("autopar bench llama --processes 2", "autopar bench --processes 4 -o bench.jsonl --plot bench.svg"),
    "verify": ("autopar verify model.py:factory", "autopar verify llama3-8b --plan plan.json --devices 4"),
    "rehearse": ("autopar rehearse llama3-8b --devices 64xH100-80GB --rank 0 --rank 63",),
    "profile": ("autopar profile", "autopar profile --processes 1 --device cuda -o h100.json"),
    "init": ("autopar init training", 'autopar init training --model llama3-8b --devices "64 H100" --yes'),
    "ui": ("autopar ui", "autopar ui model.py:factory --port 8080"),
    "doctor": ("autopar doctor", "autopar doctor --quick --json"),
    "models": ("autopar models", "autopar models --json"),
    "validate": ("autopar validate measured.jsonl --json",),
    "hardware": ("autopar hardware", "autopar hardware show H100-80GB"),
    "price": (
        "autopar price llama3-70b --devices 8x8xH100-80GB --tensor 8 --pipeline 2 --microbatch 1 --zero 1",
        "autopar price llama3-8b --devices 8xH100-80GB -- --tensor-model-parallel-size 2 --micro-batch-size 1",
    ),
    "compare": ("autopar compare plan.json other.json",),
    "sync": ("autopar sync 7B --devices 64xH100-80GB",),
}


def add_examples(group: click.Group) -> None:
    """Put the examples at the end of each command's help."""
    for name, command in group.commands.items():
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[name])
