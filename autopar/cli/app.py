"""The commands and their options. Nothing heavy is imported before a command runs: ``--help`` answers at once."""

from __future__ import annotations

from typing import Any

import click

import autopar
from autopar.cli.examples import add_examples
from autopar.cli.options import (
    DEVICES_HELP,
    MODEL_HELP,
    again_options,
    allow_option,
    calibration_option,
    capture_check_option,
    init_option,
    joined,
    model_options,
    pin_option,
    pin_options,
    plan_file_option,
    plan_output_option,
    precision_option,
    size_options,
    type_check_option,
)
from autopar.pins import ANY, PINS


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autopar.__version__, prog_name="autopar")
def cli() -> None:
    """Turns a single-device PyTorch model into the distributed training program an expert would have written for it.

    Start with `autopar plan llama3-70b --devices 128x8xH100-80GB`, or with `autopar ui`, a page that plans. `autopar doctor` says whether
    this machine works, and `autopar init` writes a first script.
    """


@cli.command(
    short_help="Find the best plan for a model.",
    help="Find the best plan for MODEL on the devices, and say why it is good." + MODEL_HELP,
)
@model_options
@pin_options
@capture_check_option
@plan_output_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(**request: Any) -> None:
    from autopar.cli.commands import plan_command

    plan_command(**request)


@cli.command(
    short_help="Say why a plan was chosen.",
    help="Say why the plan in the file PLAN (of `autopar plan -o FILE`), or the best plan for MODEL, was chosen: what limits it, "
    "what more memory, bandwidth or batch would save, the best plan of other kinds, and the ten best alternatives. Options that are "
    "left out have the values that the plan was made with." + MODEL_HELP,
)
@click.argument("target", metavar="PLAN|MODEL")
@joined(*size_options, allow_option)
@pin_options
@click.option("--model", "model", metavar="MODEL", help="The model of PLAN, where the plan does not name it.")
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as one JSON object.")
def explain(**request: Any) -> None:
    from autopar.cli.explain import explain_command

    explain_command(**request)


@cli.command(
    short_help="Write a plan as a page with its timeline.",
    help="Write the plan in the file PLAN (of `autopar plan -o FILE`), or two plans side by side, as one HTML page that loads nothing: "
    "timeline, memory through the step, layers, communication, sources of all figures. The page's details need the model: the plan says "
    "which, or --model does.",
)
@click.argument("plan", metavar="PLAN")
@click.argument("other", metavar="[OTHER]", required=False)
@click.option("-o", "--output", required=True, metavar="FILE", help="The page, such as report.html.")
@click.option(
    "--plot", "plot_file", metavar="FILE", help="Also draw timeline and memory for a paper (.png, .svg or .pdf)."
)
@click.option(
    "--explain", is_flag=True, help="Also search alternatives and what would help, as `autopar explain` does: minutes."
)
@again_options
@click.option("--json", "as_json", is_flag=True, help="Print the page's path as a JSON object.")
def report(**request: Any) -> None:
    from autopar.cli.report import report_command

    report_command(**request)


@cli.command(
    short_help="Write a plan's predicted step for Perfetto.",
    help="Write the predicted step of the plan in the file PLAN (of `autopar plan -o FILE`) in Chrome's trace-event format, which "
    "https://ui.perfetto.dev opens: a process for each pipeline rank, with its actions, its sends and its memory.",
)
@click.argument("plan", metavar="PLAN")
@click.option("-o", "--output", required=True, metavar="FILE", help="The trace, such as trace.json.")
@click.option(
    "--measured",
    metavar="FILE",
    help="A trace of the plan's program (`train.py --trace FILE`): it goes below the prediction, and the seconds of actions are compared.",
)
@again_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print the trace's path, and the seconds of actions, as one JSON object."
)
def trace(**request: Any) -> None:
    from autopar.cli.report import trace_command

    trace_command(**request)


@cli.command(
    short_help="Plan a model over a range of devices, lengths, batches and GPUs.",
    help="Plan MODEL on every combination of the numbers of devices, sequence lengths, batches and GPU kinds, and print time, tokens/s, "
    "MFU and (with --gpu-hour) the cost of a billion tokens. Ranges are 8, 8,16,24 or 8..1024, which doubles."
    + MODEL_HELP,
)
@click.argument("model")
@click.option("--devices", required=True, metavar="RANGE", help="How many GPUs, such as 8..1024.")
@click.option(
    "--gpu", default="H100-80GB", show_default=True, metavar="KINDS", help="GPU kinds, with commas between them."
)
@click.option("--seq", metavar="RANGE", help="Tokens in a sequence of the batch.")
@click.option("--global-batch", metavar="RANGE", help="Sequences (or images) in a batch of one step.")
@precision_option
@click.option(
    "--gpu-hour",
    multiple=True,
    metavar="PRICE",
    help="The price of one GPU for an hour: 2.5, or H100-80GB=2.5 for one kind. May be repeated.",
)
@pin_options
@click.option("--plot", "plot_file", metavar="FILE", help="Also draw the figures (.png, .svg or .pdf).")
@click.option("--json", "as_json", is_flag=True, help="Print the cells as one JSON object.")
def sweep(**request: Any) -> None:
    from autopar.cli.sweep import sweep_command

    sweep_command(**request)


@cli.command(
    short_help="Write the distributed program for a model into a folder.",
    help="Write the distributed program for MODEL into a folder." + MODEL_HELP,
)
@model_options
@pin_options
@plan_file_option
@capture_check_option
@type_check_option
@init_option
@click.option("-o", "--output", required=True, metavar="DIR", help="Where the program goes.")
@click.option("--json", "as_json", is_flag=True, help="Print the folder, and how it starts, as one JSON object.")
def emit(**request: Any) -> None:
    from autopar.cli.commands import emit_command

    emit_command(**request)


@cli.command(
    short_help="Train a model on this machine.",
    help="Train MODEL for some steps on this machine's devices, and print the loss of each." + MODEL_HELP,
)
@model_options
@pin_options
@plan_file_option
@capture_check_option
@type_check_option
@init_option
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, metavar="N", help="How many steps.")
@click.option(
    "--lr", type=click.FloatRange(0), default=3e-4, show_default=True, metavar="RATE", help="Learning rate of AdamW."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="The seed of the parameters and the batch.",
)
@click.option("-o", "--output", metavar="DIR", help="Keep the program in this folder.")
@click.option("--checkpoint", metavar="DIR", help="Write checkpoints into this folder.")
@click.option(
    "--every", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Steps between checkpoints."
)
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, metavar="K", help="How many checkpoints stay."
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, if there is one, up to --steps in all.")
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    help="Train on that many nodes with --devices each, and go on with those that are left, under a plan for them, from the newest "
    "checkpoint. The same command runs on every node.",
)
@click.option(
    "--meet",
    default="localhost:29400",
    show_default=True,
    metavar="HOST:PORT",
    help="Where the nodes of --elastic meet; HOST is one of them, and must stay.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="How often --elastic starts again after a failure.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each step.")
def run(checkpoint: str | None, every: int, keep: int, resume: bool, **request: Any) -> None:
    from autopar.cli.commands import Checkpoints, run_command

    elastic = {name: request.pop(name) for name in ("elastic", "meet", "restarts")}
    if elastic["elastic"] is not None:
        from autopar.cli.elastic import elastic_command
        from autopar.run.elastic import Nodes

        options = {name: request.pop(name) for name in ("steps", "lr", "seed")}
        del request["as_json"]  # train.py prints nothing else
        options |= {"checkpoint": checkpoint, "every": every, "keep": keep}
        elastic_command(Nodes.read(*elastic.values()), request, request.pop("output"), options)
    run_command(checkpoints=Checkpoints(checkpoint, every, keep, resume), **request)


@cli.command(
    short_help="Write the batch file that starts a program under SLURM.",
    help="Write a batch file for sbatch that starts the program in FOLDER, which `autopar emit` wrote, on the nodes of its plan. Before "
    "the time limit the ranks save a checkpoint, and the job is queued again and goes on. OPTIONS are those of the program's train.py, "
    "after --, and must have --checkpoint DIR.",
)
@click.argument("folder")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--slurm", required=True, metavar="FILE", help="Where the batch file goes.")
@click.option("--time", default="24:00:00", show_default=True, metavar="H:M:S", help="The time limit of one job.")
@click.option(
    "--save-before",
    type=click.IntRange(1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long before the time limit to save: more than a step and a checkpoint take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the file's path as a JSON object.")
def launch(**request: Any) -> None:
    from autopar.cli.launch import launch_command

    launch_command(**request)


@cli.command(
    short_help="Measure automatic plans against hand-tuned ones on this machine.",
    help="Train the benchmark's models (llama, wide-mlp, long-sequence, deep-gpt, large-vocabulary; default: all) on local processes: the "
    "automatic program and hand-written ones of PyTorch's own parts, in turns, and compare the measured step times.",
)
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--processes", type=click.IntRange(2), default=2, show_default=True, metavar="N", help="Local processes.")
@click.option(
    "--rounds",
    type=click.IntRange(2),
    default=7,
    show_default=True,
    metavar="N",
    help="How often each program is measured.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Timed steps of each round."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="The seed of the order in which programs run."
)
@calibration_option
@click.option("-o", "--output", metavar="FILE", help="Also write one JSON object a line here.")
@click.option("--plot", "plot_file", metavar="FILE", help="Also draw the step times (.png, .svg or .pdf).")
@click.option(
    "--published",
    metavar="FILE",
    help="Measure nothing: read measured layouts from FILE (JSON Lines, docs/evidence/validation.md), and print how much slower the "
    "automatic layout of each cell is than the best one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def bench(
    names: tuple[str, ...], output: str | None, plot_file: str | None, published: str | None, as_json: bool, **how: Any
) -> None:
    from autopar.cli.bench import Measurement, bench_command, published_command

    if published is not None:
        published_command(published, as_json)
    else:
        bench_command(names, Measurement(**how), output, plot_file, as_json)


@cli.command(
    short_help="Check that parallel programs compute what the model computes.",
    help="Compare MODEL's distributed programs with PyTorch on one device: the loss and every gradient, in float64, in local "
    "processes. Zoo models and config.json are shrunk, a factory's model is taken as it is. Exits with 0 only when all are exact."
    + MODEL_HELP,
)
@click.argument("model")
@click.option(
    "--devices", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="How many local processes."
)
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="Check this plan only; one for more devices is shrunk to N, and type-checked at its own size.",
)
@click.option("--seq", type=int, metavar="N", help="Tokens in a sequence of the batch.")
@click.option("--global-batch", type=int, metavar="N", help="Sequences (or images) in a batch of one step.")
@click.option(
    "--memory-limit",
    default="8GB",
    show_default=True,
    metavar="SIZE",
    help="The memory of this machine that the comparison may use.",
)
@allow_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def verify(**request: Any) -> None:
    from autopar.cli.verify import verify_command

    verify_command(**request)


@cli.command(
    short_help="Run ranks of a plan alone on one device, and compare memory and time with the prediction.",
    help="Run ranks of the program for MODEL alone on one device, before anyone books the others: the real stage modules at the real "
    "local shapes, with collectives that return at once. The command prints peak memory and the time of a step "
    "without communication as measured and as predicted. Times compare where the device is of the kind that was planned for."
    + MODEL_HELP,
)
@model_options
@pin_options
@plan_file_option
@capture_check_option
@type_check_option
@click.option(
    "--rank",
    "ranks",
    type=int,
    multiple=True,
    metavar="N",
    help="A rank; may be repeated. Default: the first of every stage.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: the GPU if there is one.")
@click.option(
    "--steps", type=click.IntRange(1), default=5, show_default=True, metavar="N", help="How many steps to time."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each rank.")
def rehearse(**request: Any) -> None:
    from autopar.cli.rehearse import rehearse_command

    rehearse_command(**request)


@cli.command(
    short_help="Measure this machine, so that plans for it are priced by measurements.",
    help="Measure this machine in under two minutes: products, attention, passes over memory, the start of an op, the optimizer, and "
    "collectives by size, with 2 and with 4 processes at work. The command writes a file by which plans for this "
    "machine's devices are priced.",
)
@click.option("--processes", default="2,4", show_default=True, metavar="N,...", help="Numbers of local processes.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: GPUs if there is one for each process.")
@click.option("-o", "--output", metavar="FILE", help="Where the calibration goes; by default where plans look for it.")
@click.option("--json", "as_json", is_flag=True, help="Print the calibration as one JSON object.")
def profile(**request: Any) -> None:
    from autopar.cli.profile import profile_command

    profile_command(**request)


@cli.command(
    short_help="Write a cluster file and a script for your model.",
    help="Ask three questions (which model, which devices, how large a batch), and write cluster.toml and train.py into DIR (default: "
    "here): a script of some lines that calls `autopar.compile` and trains. Nothing is replaced. With --yes, or where options answer, "
    "nothing is asked." + MODEL_HELP,
)
@click.argument("folder", metavar="[DIR]", default=".")
@click.option("--model", metavar="MODEL", help="The model.")
@click.option("--devices", metavar="SPEC", help="8xH100-80GB, '64 H100', 4, 'this machine', or a cluster.toml.")
@click.option("--global-batch", "--batch", type=int, metavar="N", help="Sequences (or images) in a batch of one step.")
@click.option("--seq", type=int, metavar="N", help="Tokens in a sequence of the batch.")
@click.option(
    "--yes", is_flag=True, help="Ask nothing: this machine, and the model's own batch, where no option says otherwise."
)
@click.option("--json", "as_json", is_flag=True, help="Print the files as one JSON object.")
def init(**request: Any) -> None:
    from autopar.cli.init import init_command

    init_command(**request)


@cli.command(
    short_help="Open a local page to plan in.",
    help="Serve a page on 127.0.0.1 until Ctrl-C: choose a model or paste a config.json, choose devices, pin decisions; see the plan, its "
    "report, its program, and what a pin costs. The address that is printed has a token, without which nothing is answered. MODELs of "
    "your own (file.py:factory) are offered beside the built-in ones.",
)
@click.argument("model", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="The port; 0, the default, is any free one."
)
@click.option("--browser", is_flag=True, help="Open the page in this machine's browser.")
def ui(**request: Any) -> None:
    from autopar.cli.ui import ui_command

    ui_command(**request)


@cli.command(
    short_help="Say what is installed and works here.",
    help="Look at this machine: packages, compiler, memory, ports, GPUs and their kinds, the calibration; and try what programs need: "
    "processes that meet and sum (gloo, NCCL), torch.compile. Each finding says what to do. Exits with 1 if something is broken that every "
    "run needs.",
)
@click.option("--quick", is_flag=True, help="Leave out what starts processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def doctor(quick: bool, as_json: bool) -> None:
    from autopar.cli.doctor import doctor_command

    doctor_command(quick, as_json)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as one JSON array.")
def models(as_json: bool) -> None:
    """List the built-in zoo."""
    from autopar.cli.models import models_command

    models_command(as_json)


@cli.command(short_help="Compare predictions with published measurements.")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print scores, predictions and refusals as one JSON object.")
def validate(file: str, as_json: bool) -> None:
    """Price every row of FILE, a JSON Lines file of measured training runs, and print how well the predictions agree.

    Rows that cannot be priced are listed with the reason. docs/evidence/validation.md says which fields a row has.
    """
    from autopar.cli.validation import validate_command

    validate_command(file, as_json)


@cli.command(short_help="Show the known devices and where their figures come from.")
@click.argument("action", required=False, metavar="[show]")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def hardware(action: str | None, name: str | None, as_json: bool) -> None:
    """List the kinds of device that are known; `autopar hardware show H100-80GB` prints every figure of one with its source."""
    from autopar.cli.machines import hardware_command

    hardware_command(action, name, as_json)


@cli.command(
    short_help="Predict time and memory of a plan that you write down.",
    help="Predict time and memory of a plan for MODEL that you write down: degrees as options, --plan FILE, or the flags of Megatron-LM "
    "or torchtitan after `--`. Data parallelism takes the devices that are left." + MODEL_HELP,
    context_settings={"ignore_unknown_options": False},
)
@model_options
@joined(*(pin_option(PINS[name], "{}", (ANY,)) for name in ("pipeline", "tensor")))
@click.option("--sequence", is_flag=True, help="Cut activations between tensor-parallel regions along the sequence.")
@click.option("--context", type=click.IntRange(1), metavar="N", help="The degree of ring attention.")
@joined(*(pin_option(PINS[name], "{}", (ANY,)) for name in ("expert", "zero", "microbatches")))
@click.option("--microbatch", type=click.IntRange(1), metavar="N", help="Sequences in a microbatch of one device.")
@joined(
    *(
        pin_option(PINS[name], "{}", (ANY,))
        for name in ("schedule", "chunks", "sync", "recompute", "segment", "offload", "saved", "overlap", "compile")
    )
)
@click.option("--timeline", is_flag=True, help="Also show the memory of each device at each action of a step.")
@plan_file_option
@plan_output_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def price(**request: Any) -> None:
    from autopar.cli.pricing import price_command

    price_command(**request)


@cli.command(short_help="Show two plans side by side.")
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(first: str, second: str, as_json: bool) -> None:
    """Show two plans side by side: FIRST and SECOND are files of `autopar plan -o FILE` or `autopar price -o FILE`."""
    from autopar.cli.pricing import compare_command

    compare_command(first, second, as_json)


@cli.command(short_help="Show what synchronizing replicas costs, by algorithm.")
@click.argument("parameters")
@click.option("--devices", required=True, metavar="SPEC", help=DEVICES_HELP)
@click.option(
    "--precision", default="bfloat16", show_default=True, metavar="NAME", help="bfloat16, float16, float32 or float64."
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="K",
    help="Steps between averages of local-steps:K.",
)
@calibration_option
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def sync(**request: Any) -> None:
    """Show traffic and time of each way to synchronize replicas (`--sync`) of a model with PARAMETERS (7B, 350M, 7e9), a replica on each
    device: by a server that takes one rank after another, on a ring, by recursive halving and doubling, and as plans price it."""
    from autopar.cli.sync import sync_command

    sync_command(**request)


add_examples(cli)
