"""The commands and their options. Nothing heavy is imported before a command runs: ``--help`` answers at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import click

import autopar
from autopar.cli.options import (
    DEVICES_HELP,
    MODEL_HELP,
    WholeNumber,
    again_options,
    allow_option,
    calibration_option,
    capture_check_option,
    count_option,
    init_option,
    joined,
    json_option,
    model_of_plan_option,
    model_options,
    pin_option,
    pin_options,
    plan_file_option,
    plan_output_option,
    precision_option,
    program_options,
    size_options,
)
from autopar.pins import OWNERS, PINS
from autopar.techniques.technique import ANY


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autopar.__version__, prog_name="autopar")
def cli() -> None:
    """Turns a single-device PyTorch model into the distributed training program an expert would have written for it.

    Start with `autopar plan llama3-70b --devices 128x8xH100-80GB`, or with `autopar ui`, a page that plans. `autopar doctor` says whether
    this machine works, and `autopar init` writes a first script.
    """


def command(
    name: str, module: str, short_help: str, help: str, examples: tuple[str, ...], *options: Callable[[Any], Any]
) -> None:
    """Add a command that calls ``NAME_command`` of that module of ``autopar.cli`` with its options; the module is imported then."""

    def run(**request: Any) -> None:
        getattr(importlib.import_module(f"autopar.cli.{module}"), f"{name}_command")(**request)

    epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
    cli.command(name, short_help=short_help, help=help, epilog=epilog)(joined(*options)(run))


command(
    "plan",
    "commands",
    "Find the best plan for a model.",
    "Find the best plan for MODEL on the devices, and say why it is good." + MODEL_HELP,
    (
        "autopar plan llama3-70b --devices 128x8xH100-80GB",
        "autopar plan config.json --devices cluster.toml --global-batch 512 --pipeline 4 -o plan.json",
        "autopar plan model.py:factory --devices 4 --pin lm_head.zero=3",
    ),
    model_options,
    pin_options,
    capture_check_option,
    plan_output_option,
    json_option("Print the plan as one JSON object."),
)

command(
    "explain",
    "explain",
    "Say why a plan was chosen.",
    "Say why the plan in the file PLAN (of `autopar plan -o FILE`), or the best plan for MODEL, was chosen: what limits it, "
    "what more memory, bandwidth or batch would save, the best plan of other kinds, and the ten best alternatives. An option that you "
    "leave out has the value with which the plan was made." + MODEL_HELP,
    ("autopar explain plan.json", "autopar explain llama3-8b --devices 8xH100-80GB --global-batch 64"),
    click.argument("target", metavar="PLAN|MODEL"),
    *size_options,
    allow_option,
    pin_options,
    model_of_plan_option,
    json_option("Print the explanation as one JSON object."),
)

command(
    "report",
    "report",
    "Write a plan as a page with its timeline.",
    "Write the plan in the file PLAN (of `autopar plan -o FILE`), or two plans side by side, as one self-contained HTML "
    "page: timeline, memory through the step, layers, communication, and the source of every figure. The details need the model: the "
    "plan names it, or --model does.",
    ("autopar report plan.json -o report.html", "autopar report plan.json other.json -o both.html --explain"),
    click.argument("plan", metavar="PLAN"),
    click.argument("other", metavar="[OTHER]", required=False),
    click.option("-o", "--output", required=True, metavar="FILE", help="The file to write, such as report.html."),
    click.option(
        "--plot",
        "plot_file",
        metavar="FILE",
        help="Also draw the timeline and the memory as a figure (.png, .svg or .pdf).",
    ),
    click.option(
        "--explain",
        is_flag=True,
        help="Also search for alternatives and for changes that help, as `autopar explain` does. This takes minutes.",
    ),
    again_options,
    json_option("Print the page's path as a JSON object."),
)

command(
    "trace",
    "report",
    "Write a plan's predicted step for Perfetto.",
    "Write the predicted step of the plan in the file PLAN (of `autopar plan -o FILE`) in Chrome's trace-event format, which "
    "https://ui.perfetto.dev opens: a process for each pipeline rank, with its actions, its sends and its memory.",
    ("autopar trace plan.json -o trace.json", "autopar trace plan.json -o both.json --measured step.json"),
    click.argument("plan", metavar="PLAN"),
    click.option("-o", "--output", required=True, metavar="FILE", help="The file to write, such as trace.json."),
    click.option(
        "--measured",
        metavar="FILE",
        help="A trace that the plan's program recorded (`train.py --trace FILE`). It is shown below the prediction, and the command "
        "compares the seconds of each action.",
    ),
    again_options,
    json_option("Print the trace's path and the seconds of each action as one JSON object."),
)

command(
    "sweep",
    "sweep",
    "Plan a model over a range of devices, lengths, batches and GPUs.",
    "Plan MODEL on every combination of the numbers of devices, sequence lengths, batches and GPU kinds, and print time, tokens/s, "
    "MFU and (with --gpu-hour) the cost of a billion tokens. A range is one number (8), a list (8,16,24), or 8..1024, which doubles from 8 "
    "to 1024." + MODEL_HELP,
    (
        "autopar sweep llama3-8b --devices 8..512 --gpu-hour 2.5",
        "autopar sweep gpt2 --devices 8,16 --gpu H100-80GB,A100-80GB --seq 1024 --plot sweep.svg",
    ),
    click.argument("model"),
    click.option("--devices", required=True, metavar="RANGE", help="Numbers of GPUs, such as 8..1024."),
    click.option(
        "--gpu", default="H100-80GB", show_default=True, metavar="KINDS", help="GPU kinds, separated by commas."
    ),
    click.option("--seq", metavar="RANGE", help="Tokens in a sequence of the batch."),
    click.option("--global-batch", metavar="RANGE", help="Sequences (or images) in a batch of one step."),
    precision_option,
    click.option(
        "--gpu-hour",
        multiple=True,
        metavar="PRICE",
        help="Price of one GPU hour: 2.5 for every kind, or H100-80GB=2.5 for one kind. May be repeated.",
    ),
    pin_options,
    click.option("--plot", "plot_file", metavar="FILE", help="Also draw the figures (.png, .svg or .pdf)."),
    json_option("Print every combination as one JSON object."),
)

command(
    "emit",
    "commands",
    "Write the distributed program for a model into a folder.",
    "Write the distributed program for MODEL into a folder." + MODEL_HELP,
    (
        "autopar emit model.py:factory --devices 4 -o program",
        "autopar emit llama3-8b --devices 8xH100-80GB --plan plan.json --init own -o program",
    ),
    program_options,
    init_option,
    click.option("-o", "--output", required=True, metavar="DIR", help="The folder to write."),
    json_option("Print the folder and its start command as one JSON object."),
)

command(
    "run",
    "run",
    "Train a model on this machine.",
    "Train MODEL on this machine's devices, and print the loss of every step." + MODEL_HELP,
    (
        "autopar run model.py:factory --devices 2 --steps 20",
        "autopar run model.py:factory --devices 8 --checkpoint saved --resume",
    ),
    program_options,
    init_option,
    count_option("--steps", 10, "Number of steps."),
    click.option(
        "--lr",
        type=click.FloatRange(0),
        default=3e-4,
        show_default=True,
        metavar="RATE",
        help="Learning rate of AdamW.",
    ),
    click.option(
        "--seed",
        type=WholeNumber(0, 2**63 - 1),
        default=0,
        show_default=True,
        metavar="N",
        help="Random seed of the initial parameters and of the batch.",
    ),
    click.option("-o", "--output", metavar="DIR", help="Write the program into this folder, and leave it there."),
    click.option("--checkpoint", metavar="DIR", help="Write checkpoints into this folder."),
    count_option("--every", 100, "Steps between checkpoints."),
    count_option("--keep", 2, "Number of newest checkpoints to keep.", metavar="K"),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue from the newest checkpoint, if there is one, until --steps steps are done in total.",
    ),
    click.option(
        "--elastic",
        metavar="MIN:MAX",
        help="Train on MIN to MAX nodes with --devices each. When a node fails, the remaining nodes make a plan for their number and "
        "continue from the newest checkpoint. Start the same command on every node.",
    ),
    click.option(
        "--meet",
        default="localhost:29400",
        show_default=True,
        metavar="HOST:PORT",
        help="Rendezvous address for --elastic. HOST is one of the nodes, and must not fail.",
    ),
    count_option("--restarts", 10, "How many times --elastic restarts after a failure.", least=0),
    json_option("Print one JSON object for each step."),
)

command(
    "launch",
    "launch",
    "Write the batch file that starts a program under SLURM.",
    "Write a batch file for sbatch that starts the program in FOLDER (written by `autopar emit`) on the nodes of its plan. Before the "
    "time limit, the ranks save a checkpoint, the job is queued again, and training continues. OPTIONS, after --, are options of the "
    "program's train.py and must include --checkpoint DIR.",
    ("autopar launch program --slurm train.sbatch -- --checkpoint saved --dataset data.pt",),
    click.argument("folder"),
    click.argument("options", nargs=-1, type=click.UNPROCESSED),
    click.option("--slurm", required=True, metavar="FILE", help="The batch file to write."),
    click.option("--time", default="24:00:00", show_default=True, metavar="H:M:S", help="The time limit of one job."),
    count_option(
        "--save-before",
        300,
        "Seconds before the time limit at which ranks save: more than one step and one checkpoint take.",
        metavar="SECONDS",
    ),
    json_option("Print the file's path as a JSON object."),
)

command(
    "bench",
    "bench",
    "Measure automatic plans against hand-tuned ones on this machine.",
    "Train the benchmark's models (llama, wide-mlp, long-sequence, deep-gpt, large-vocabulary; default: all) in local processes, with "
    "the automatic program and with programs written by hand from PyTorch's own parallel modules, in turns, and compare the measured step "
    "times.",
    ("autopar bench llama --processes 2", "autopar bench --processes 4 -o bench.jsonl --plot bench.svg"),
    click.argument("names", nargs=-1, metavar="[MODEL]..."),
    count_option("--processes", 2, "Number of local processes.", least=2),
    count_option("--rounds", 7, "How many times each program is measured.", least=2),
    count_option("--steps", 3, "Timed steps in each round."),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Random seed of the order in which programs run.",
    ),
    calibration_option,
    click.option("-o", "--output", metavar="FILE", help="Also write the results here, one JSON object a line."),
    click.option("--plot", "plot_file", metavar="FILE", help="Also draw the step times (.png, .svg or .pdf)."),
    click.option(
        "--published",
        metavar="FILE",
        help="Measure nothing. Read layouts and their measured times from FILE (JSON Lines, as docs/evidence/validation.md describes), and "
        "print for each cell how much slower the automatic layout was than the best layout.",
    ),
    json_option("Print the results as one JSON object."),
)

command(
    "verify",
    "verify",
    "Check that parallel programs compute what the model computes.",
    "Compare MODEL's distributed programs with PyTorch on one device: the loss and every gradient, in float64, in local "
    "processes. A model of the zoo or of a config.json is shrunk first; a factory's model is used as it is. The exit status is 0 only "
    "if every program is exact." + MODEL_HELP,
    (
        "autopar verify model.py:factory",
        "autopar verify llama3-8b --plan plan.json --devices 4",
        "autopar verify llama3-405b --plan plan.json --collectives",
    ),
    click.argument("model"),
    click.option(
        "--devices",
        type=WholeNumber(1, 64),
        default=2,
        show_default=True,
        metavar="N",
        help="Number of devices, each a local process.",
    ),
    click.option(
        "--plan",
        "plan_file",
        metavar="FILE",
        help="Check this plan only. A plan for more than N devices is shrunk to N, and type-checked at its full size; with "
        "--collectives it is checked as it is.",
    ),
    click.option("--seq", type=int, metavar="N", help="Tokens in a sequence of the batch."),
    click.option("--global-batch", type=int, metavar="N", help="Sequences (or images) in a batch of one step."),
    click.option(
        "--memory-limit",
        default="8GB",
        show_default=True,
        metavar="SIZE",
        help="How much of this machine's memory the comparison may use.",
    ),
    click.option(
        "--collectives",
        is_flag=True,
        help="Check what NCCL would do instead: record every rank without communication, and look for ranks that issue different "
        "collectives, deadlocks, results that are read too early, and buffers that are written while they are sent. Of a large plan the "
        "distinct ranks are recorded at the plan's own sizes.",
    ),
    allow_option,
    json_option("Print the result as one JSON object."),
)

command(
    "rehearse",
    "rehearse",
    "Run single ranks of a plan on one device, and compare memory and time with the prediction.",
    "Run single ranks of MODEL's program, one at a time, on one device, before you book all devices: the real stage modules with the "
    "real local shapes, and collectives that return at once. The command prints peak memory and the time of a step without communication, "
    "as measured and as predicted. Times are comparable only if the device is of the plan's kind." + MODEL_HELP,
    ("autopar rehearse llama3-8b --devices 64xH100-80GB --rank 0 --rank 63",),
    program_options,
    click.option(
        "--rank",
        "ranks",
        type=int,
        multiple=True,
        metavar="N",
        help="A rank to run; may be repeated. Default: the first rank of every stage.",
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), help="Where the ranks run. Default: the GPU if there is one."
    ),
    count_option("--steps", 5, "Number of timed steps."),
    json_option("Print one JSON object for each rank."),
)

command(
    "profile",
    "profile",
    "Measure this machine, so that its plans are priced with measured times.",
    "Measure this machine in under two minutes: matrix products, attention, memory bandwidth, launch time of an op, the optimizer, and "
    "collectives of several sizes, with 2 and with 4 processes. The command writes a calibration file, from which plans for this "
    "machine's devices are priced.",
    ("autopar profile", "autopar profile --processes 1 --device cuda -o h100.json"),
    click.option(
        "--processes",
        default="2,4",
        show_default=True,
        metavar="N,...",
        help="Numbers of local processes to measure with.",
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        help="What to measure. Default: GPUs if there is one for each process.",
    ),
    click.option(
        "-o", "--output", metavar="FILE", help="The calibration file to write. Default: the file that planning reads."
    ),
    json_option("Print the calibration as one JSON object."),
)

command(
    "init",
    "init",
    "Write a cluster file and a script for your model.",
    "Ask for the model, the devices and the batch, and write cluster.toml and a short training script, train.py, into DIR (default: "
    "the current folder). Existing files are never overwritten. --yes asks nothing, and an option that is given is not asked for."
    + MODEL_HELP,
    ("autopar init training", 'autopar init training --model llama3-8b --devices "64 H100" --yes'),
    click.argument("folder", metavar="[DIR]", default="."),
    click.option("--model", metavar="MODEL", help="The model."),
    click.option("--devices", metavar="SPEC", help="8xH100-80GB, '64 H100', 4, 'this machine', or a cluster.toml."),
    click.option(
        "--global-batch", "--batch", type=int, metavar="N", help="Sequences (or images) in a batch of one step."
    ),
    click.option("--seq", type=int, metavar="N", help="Tokens in a sequence of the batch."),
    click.option(
        "--yes", is_flag=True, help="Ask nothing. Without other options, use this machine and the model's own batch."
    ),
    json_option("Print the files as one JSON object."),
)

command(
    "ui",
    "ui",
    "Open a local page to plan in.",
    "Serve a page on 127.0.0.1 until Ctrl-C. On the page you choose a model or paste a config.json, choose devices and pin decisions; it "
    "shows the plan, its report, its program, and the cost of each pin. The printed address has a token, and the server refuses requests "
    "without it. Each MODEL (file.py:factory) is offered beside the built-in models.",
    ("autopar ui", "autopar ui model.py:factory --port 8080"),
    click.argument("model", nargs=-1, metavar="[MODEL]..."),
    click.option(
        "--port",
        type=WholeNumber(0, 65535),
        default=0,
        metavar="N",
        help="TCP port. 0, the default, takes any free port.",
    ),
    click.option("--browser", is_flag=True, help="Open the page in this machine's browser."),
)

command(
    "doctor",
    "doctor",
    "Check what is installed and works on this machine.",
    "Check this machine: packages, compiler, memory, ports, GPUs and their kinds, the calibration file. Then try what programs need: an "
    "all-reduce between processes (gloo, NCCL), and torch.compile. Each problem has a hint. The exit status is 1 if something that every "
    "run needs is broken.",
    ("autopar doctor", "autopar doctor --quick --json"),
    click.option("--quick", is_flag=True, help="Skip the checks that start processes."),
    json_option("Print the findings as one JSON object."),
)

command(
    "models",
    "models",
    "List the built-in zoo.",
    "List the built-in zoo.",
    ("autopar models", "autopar models --json"),
    json_option("Print the list as one JSON array."),
)

command(
    "validate",
    "validation",
    "Compare predictions with published measurements.",
    "Predict every row of FILE, a JSON Lines file of measured training runs, and print how well the predictions agree. Rows that have no "
    "prediction are listed with the reason. docs/evidence/validation.md describes the fields of a row.",
    ("autopar validate measured.jsonl --json",),
    click.argument("file", metavar="FILE"),
    json_option("Print scores, predictions and refusals as one JSON object."),
)

command(
    "hardware",
    "machines",
    "Show the known devices and where their figures come from.",
    "List the kinds of device that are known; `autopar hardware show H100-80GB` prints every figure of one with its source.",
    ("autopar hardware", "autopar hardware show H100-80GB"),
    click.argument("action", required=False, metavar="[show]"),
    click.argument("name", required=False, metavar="[NAME]"),
    json_option("Print the result as JSON."),
)

command(
    "price",
    "pricing",
    "Predict time and memory of a plan that you give.",
    "Predict time and memory of a plan for MODEL that you give: as degrees in options, as --plan FILE, or as flags of Megatron-LM or "
    "torchtitan after `--`. Data parallelism uses the remaining devices." + MODEL_HELP,
    (
        "autopar price llama3-70b --devices 8x8xH100-80GB --tensor 8 --pipeline 2 --microbatch 1 --zero 1",
        "autopar price llama3-8b --devices 8xH100-80GB -- --tensor-model-parallel-size 2 --micro-batch-size 1",
    ),
    model_options,
    *(pin_option(PINS[name], "{}", (ANY,)) for name in ("pipeline", "tensor")),
    click.option(
        "--sequence",
        is_flag=True,
        help="Shard activations between tensor-parallel regions along the sequence (Megatron-LM's sequence parallelism).",
    ),
    click.option("--context", type=WholeNumber(1), metavar="N", help="The degree of ring attention."),
    *(pin_option(PINS[name], "{}", (ANY,)) for name in ("expert", "zero", "microbatches")),
    click.option("--microbatch", type=WholeNumber(1), metavar="N", help="Sequences in one microbatch on one device."),
    *(pin_option(PINS[name], "{}", (ANY,)) for name in ("schedule", "chunks", *OWNERS)),
    click.option(
        "--timeline", is_flag=True, help="Also show the memory of every device through the actions of one step."
    ),
    plan_file_option,
    plan_output_option,
    json_option("Print the plan as one JSON object."),
    click.argument("flags", nargs=-1, type=click.UNPROCESSED),
)

command(
    "compare",
    "pricing",
    "Show two plans side by side.",
    "Show two plans side by side: FIRST and SECOND are files of `autopar plan -o FILE` or `autopar price -o FILE`.",
    ("autopar compare plan.json other.json",),
    click.argument("first"),
    click.argument("second"),
    json_option("Print the result as JSON."),
)

command(
    "sync",
    "sync",
    "Show what synchronizing replicas costs, by algorithm.",
    "Show traffic and time of every way to synchronize the replicas (`--sync`) of a model with PARAMETERS parameters (7B, 350M, 7e9), one "
    "replica on each device: through a parameter server that serves the ranks in turn, on a ring, by recursive halving and doubling, and "
    "as plans price it.",
    ("autopar sync 7B --devices 64xH100-80GB",),
    click.argument("parameters"),
    click.option("--devices", required=True, metavar="SPEC", help=DEVICES_HELP),
    click.option(
        "--precision",
        default="bfloat16",
        show_default=True,
        metavar="NAME",
        help="bfloat16, float16, float32 or float64.",
    ),
    count_option("--steps", 8, "Steps between averages of local-steps:K.", metavar="K"),
    calibration_option,
    json_option("Print the rows as JSON."),
)
