"""Loss curves of one model in each precision: ``make report NAME=precision`` trains and writes ``docs/evidence/precision.{jsonl,svg,md}``.

A small decoder learns to predict the bytes of Python's standard library. Every precision starts from the same values and reads the same
batches; ``autopar.compile`` plans and emits each program for one device (a GPU if there is one), and the program trains. Each precision is
a process of its own; on a GPU, which is faster than one process needs, they run at the same time.

A mixture of experts in bfloat16 does the same with gradients and with Adam's moments in float32 and in bfloat16, in four microbatches a
step (``precision-states.{jsonl,svg}``). A wider one is trained in float32, in bfloat16, and with each format of products in 8 bits
(``precision-fp8.{jsonl,svg}``). Rounding alone moves the loss of a mixture by a per cent in one run, because tokens change their experts:
each curve of the mixtures is trained with several seeds. ``--curves precision-fp8`` trains one of the three groups; the page has all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from expert_models import mixtral
from places import EVIDENCE
from torch import Tensor, nn

import autopar
from autopar.bench.models import DecoderBlock, Stack, token_loss
from autopar.errors import UsageError
from autopar.picture import pyplot, save
from autopar.plan import NARROW, NARROW_GRADIENTS, NARROW_MOMENTS
from autopar.precision import FP8, FP8_RECIPES
from autopar.techniques.activations import INT8_ACTIVATIONS as INT8
from autopar.techniques.dispatch import FP8_DISPATCH

WINDOW = 20
"""Steps over which a curve is smoothed: each point is the mean of the last ones."""


@dataclass(frozen=True, slots=True)
class Size:
    """The model's width, layers and sequence length in bytes, and the sequences in a batch."""

    width: int
    layers: int
    length: int
    rows: int

    def build(self) -> nn.Module:
        """The decoder: bytes are its tokens."""
        inner = self.width * 8 // 3 // 64 * 64
        blocks: list[nn.Module] = [DecoderBlock(self.width, 64, inner) for _ in range(self.layers)]
        head = nn.Sequential(nn.RMSNorm(self.width), nn.Linear(self.width, 256, bias=False))
        return Stack(nn.Embedding(256, self.width), blocks, head)

    def build_mixture(self) -> nn.Module:
        """A mixture of four experts, of which two compute each byte."""
        sizes = {"intermediate_size": 2 * self.width, "vocab_size": 256, "num_hidden_layers": self.layers}
        model, _, _ = mixtral(hidden_size=self.width, **sizes)
        return model


SIZES = {"cuda": Size(512, 8, 512, 16), "cpu": Size(128, 3, 128, 8)}
MIXTURE, WIDE_MIXTURE = Size(64, 2, 64, 16), Size(128, 3, 64, 8)


@dataclass(frozen=True, slots=True)
class Way:
    """One curve: its precision, what the plan allows itself, whether it gains or not, how it stores saved activations, and the size of the
    mixture of experts, if it trains one, with its microbatches and its expert parallelism."""

    name: str
    precision: str
    allow: tuple[str, ...] = ()
    saved: str = "exact"
    mixture: Size | None = None
    microbatches: int = 1
    experts_over: int = 1
    """The processes over which experts are distributed."""


REFERENCE = "float32"
WAYS = (
    Way(REFERENCE, "float32"),
    Way("bfloat16", "bfloat16"),
    Way("float16", "float16"),
    Way(FP8.name, "bfloat16", (FP8.name,)),
)

IN_8_BITS = tuple(Way(f"{name}, saved in 8 bits", name, saved="int8") for name in ("float32", "bfloat16"))
"""The curves of ``int8_curves``, besides those of the same precisions."""

STATES_REFERENCE = "float32 states"
STATES = tuple(
    Way(name, "bfloat16", allow, mixture=MIXTURE, microbatches=4)
    for name, allow in (
        (STATES_REFERENCE, ()),
        ("bfloat16 moments", (NARROW_MOMENTS,)),
        ("bfloat16 gradients", (NARROW_GRADIENTS,)),
        ("bfloat16 moments and gradients", NARROW),
    )
)
"""The curves of the mixture."""

FP8_REFERENCE, DISPATCHES = "mixture in float32", "the same with fp8_dispatch"
FP8_WAYS = (
    Way(FP8_REFERENCE, "float32", mixture=WIDE_MIXTURE),
    Way("mixture in bfloat16", "bfloat16", mixture=WIDE_MIXTURE),
    *(Way(f"mixture in {name}", "bfloat16", (name,), mixture=WIDE_MIXTURE) for name in FP8_RECIPES),
    Way("mixture in bfloat16, expert parallelism of 2", "bfloat16", mixture=WIDE_MIXTURE, experts_over=2),
    Way(DISPATCHES, "bfloat16", (FP8_DISPATCH,), mixture=WIDE_MIXTURE, experts_over=2),
)
"""The curves of the mixture that is wide enough for several tiles of 128."""
CURVES = {"precision": WAYS, "precision-states": STATES, "precision-fp8": FP8_WAYS}
SEEDS = 5
"""Runs of each curve of the mixtures, with other initial values and batches."""
EVERY = (*WAYS, *IN_8_BITS, *STATES, *FP8_WAYS)


def text() -> Tensor:
    """The sources of the top level of Python's standard library, in the order of their names, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(size: Size, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step: windows of the text, drawn with one seed."""
    data, generator = text(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - size.length - 1, (size.rows,), generator=generator)
        windows = torch.stack([data[start : start + size.length + 1] for start in starts]).long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(way: Way, steps: int, seed: int = 0) -> dict[str, Any]:
    """One curve, trained in this process."""
    if way.experts_over == 1:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # this process is the program's one rank
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = way.mixture or SIZES[device]
    torch.manual_seed(seed)
    model, data = size.build_mixture() if way.mixture else size.build(), list[Any](batches(size, steps, seed))
    loss_fn = None if way.mixture else token_loss
    options: dict[str, Any] = {
        "precision": way.precision,
        "compile": "none",  # a compilation of every precision would take longer than the training
        "capture_check": False,
        "lr": 3e-4,
        "max_norm": 1.0,
        "time_limit_s": 600,
    }
    if way.saved != "exact":
        options |= {"saved": way.saved, "allow": {INT8}}
    if way.mixture:  # it shifts the labels itself
        data = [{"input_ids": inputs, "labels": inputs} for inputs, _ in data]
        options |= {"microbatches": way.microbatches, "lr": 1e-3}
    if way.experts_over > 1:
        options["expert"] = way.experts_over
    if FP8_DISPATCH in way.allow:
        options |= {"dispatch_format": "fp8", "allow": {FP8_DISPATCH}}
    program = autopar.compile(model, way.experts_over, data[0], loss_fn, **options)
    if way.allow and not options.get("allow"):
        for pin in ("compile", "microbatches"):  # the plan has them
            options.pop(pin, None)
        plan = dataclasses.replace(program.plan, allow=way.allow)
        program = autopar.compile(model, 1, data[0], loss_fn, plan=plan, **options)
    losses = program.train(data)
    return {
        "precision": way.name,
        "seed": seed,
        "losses": losses,
        "loss_scale": program.scaler_state_dict().get("scale"),
        "activations_bytes": program.plan.stages[0].memory.activations,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": size.rows * size.length,
        "text_bytes": len(text()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def train_apart(way: Way, steps: int, seed: int = 0) -> dict[str, Any]:
    """``train`` in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--only", way.name, "--steps", str(steps), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way.name} failed:\n{done.stderr[-4000:]}")
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way.name:10} loss {line['losses'][0]:.4f} -> {line['losses'][-1]:.4f}", file=sys.stderr, flush=True)
    return line


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last ``WINDOW`` losses (of fewer at the beginning), for every step."""
    windows = (losses[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(losses)))
    return [math.fsum(window) / len(window) for window in windows]


def furthest(line: dict[str, Any], reference: dict[str, Any]) -> tuple[int, float]:
    """The step at which the smoothed curve is furthest from the reference's, and by how much there (positive: a larger loss)."""
    pairs = zip(smoothed(line["losses"]), smoothed(reference["losses"]), strict=True)
    differences = [a - b for a, b in pairs]
    step = max(range(len(differences)), key=lambda i: abs(differences[i]))
    return step, differences[step]


def page(lines: list[dict[str, Any]], states: list[dict[str, Any]], fp8: list[dict[str, Any]]) -> str:
    """The page that is made of the results: of the decoder, and of the mixtures."""
    (reference,) = (line for line in lines if line["precision"] == REFERENCE)
    steps = len(reference["losses"])
    last = smoothed(reference["losses"])[-1]
    parts = [
        "# Precision\n",
        f"A decoder of {reference['parameters'] / 1e6:.1f} million parameters learns to predict the bytes of Python's standard library "
        f"({reference['text_bytes'] / 1e6:.1f} MB), {steps} steps",
        f"of {reference['tokens_per_step']:,} bytes, as an emitted program on one device ({reference['device']}, torch "
        f"{reference['torch']}, Python {reference['python']}). All precisions start from the same",
        "values and read the same batches; AdamW, gradients clipped to a norm of 1. In bfloat16 and float16 the parameters' master",
        "copies, the accumulated gradients and Adam's moments are float32; in float16 the loss is scaled dynamically. fp8 "
        "is bfloat16 with the",
        "matmuls of the blocks in 8 bits.\n",
        "![loss by step](precision.svg)\n",
        f"Curves are smoothed by means over {WINDOW} steps. *Largest difference* is to the curve of {REFERENCE}, whose last smoothed "
        f"loss is {last:.4f}.\n",
        "| precision | first loss | last loss | largest difference | at step | share of the loss |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        step, difference = furthest(line, reference)
        share = abs(difference) / smoothed(reference["losses"])[step]
        apart = f"{difference:+.4f} | {step} | {share:.2%}" if line is not reference else "- | - | -"
        parts.append(f"| {line['precision']} | {line['losses'][0]:.4f} | {line['losses'][-1]:.4f} | {apart} |")
    for line in lines:
        if line["loss_scale"] is not None:
            skipped = round(math.log2(65536 / line["loss_scale"]))
            parts.append(
                f"\nThe loss scale of {line['precision']} is {line['loss_scale']:,.0f} in the last step: {skipped} steps were skipped."
            )
    return (
        "\n".join([*parts, states_page(states), fp8_page(fp8), "Made by `make report NAME=precision`. Do not edit."])
        + "\n"
    )


def states_page(lines: list[dict[str, Any]]) -> str:
    """The section on gradients and moments in bfloat16."""
    reference = next(line for line in lines if line["precision"] == STATES_REFERENCE)
    parts = [
        "\n## Gradients and moments in bfloat16\n",
        f"A mixture of four experts with {reference['parameters'] / 1e6:.2f} million parameters, in bfloat16, learns the same text: "
        f"{len(reference['losses'])} steps of {reference['tokens_per_step']:,} bytes",
        f"in four microbatches ({reference['device']}, torch {reference['torch']}, Python {reference['python']}), with AdamW's "
        "`betas=(0.9, 0.999)` and gradients clipped to a norm of 1.",
        "Accumulated gradients and Adam's moments are float32, unless `allow` names them.\n",
        "![loss by step](precision-states.svg)\n",
    ]
    return "\n".join([*parts, *last_losses("states", lines, STATES_REFERENCE)]) + "\n"


def fp8_page(lines: list[dict[str, Any]]) -> str:
    """The section on a mixture of experts with products in 8 bits."""
    reference = next(line for line in lines if line["precision"] == FP8_REFERENCE)
    dispatch = "With fp8_dispatch, experts are distributed over two processes; rows are sent in 8 bits, one scale for each 128 numbers."
    parts = [
        "## A mixture of experts in 8 bits\n",
        f"A mixture of four experts with {reference['parameters'] / 1e6:.1f} million parameters, {WIDE_MIXTURE.width} wide, learns the "
        f"same text: {len(reference['losses'])} steps of {reference['tokens_per_step']:,} bytes",
        f"({reference['device']}, torch {reference['torch']}, Python {reference['python']}). fp8 has one scale for each tensor, and its "
        "experts stay in bfloat16;",
        "fp8_blockwise has scales for tiles of 1 x 128 and blocks of 128 x 128, mxfp8 for tiles of 1 x 32, both also in the experts.",
        *([dispatch] if any(line["precision"] == DISPATCHES for line in lines) else []),
        "\n![loss by step](precision-fp8.svg)\n",
    ]
    return "\n".join([*parts, *last_losses("precision", lines, FP8_REFERENCE)]) + "\n"


def last_losses(title: str, lines: list[dict[str, Any]], against: str) -> list[str]:
    """The rows of a table of the losses at the end of every curve, compared with those of the reference with the same seeds."""
    runs = by_curve(lines)
    several = (
        f"Means of {len(runs[against])} runs with different initial values and batches; ± is the standard error.\n"
    )
    parts = [
        *([several] if len(runs[against]) > 1 else []),
        f"| {title} | last loss | change from float32 | mean of the last {WINDOW} | change from float32 |",
        "|---|---|---|---|---|",
    ]
    for name, own in runs.items():
        cells = [name]
        for window in (1, WINDOW):
            ends = {seed: statistics.fmean(losses[-window:]) for seed, losses in own.items()}
            ratios = [ends[seed] / statistics.fmean(losses[-window:]) - 1 for seed, losses in runs[against].items()]
            error = f" ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.2%}" if len(ratios) > 1 else ""
            apart = "-" if name == against else f"{statistics.fmean(ratios):+.2%}{error}"
            cells += [f"{statistics.fmean(ends.values()):.4f}", apart]
        parts.append(f"| {' | '.join(cells)} |")
    return parts


def by_curve(lines: list[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """The losses of every curve, by its name and the seed of the run (0 where a line has none)."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        found.setdefault(line["precision"], {})[line.get("seed", 0)] = line["losses"]
    return found


def draw(lines: list[dict[str, Any]], path: Path, against: str = REFERENCE) -> None:
    """The smoothed curves, and their differences from that of ``against``: means over all seeds."""
    means = {
        name: smoothed([statistics.fmean(step) for step in zip(*own.values(), strict=True)])
        for name, own in by_curve(lines).items()
    }
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(8, 3))
    for name, curve in means.items():
        left.plot(curve, label=name, linewidth=1)
        right.plot([a - b for a, b in zip(curve, means[against], strict=True)], label=name, linewidth=1)
    left.set_ylabel(f"loss, mean over {WINDOW} steps")
    right.set_ylabel(f"difference from {against}")
    left.legend()
    for panel in (left, right):
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    save(figure, path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--only",
        choices=[way.name for way in EVERY],
        help="print the line of one precision, write nothing",
    )
    parser.add_argument("--seed", type=int, default=0, help="with --only")
    parser.add_argument("--page", action="store_true", help="make the page anew, train nothing")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES), help="the groups to train")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(train(next(way for way in EVERY if way.name == asked.only), asked.steps, asked.seed)))
        return
    for name in asked.curves if not asked.page else ():
        with ThreadPoolExecutor(len(WAYS) if torch.cuda.is_available() else 1) as pool:
            runs = [(way, seed) for seed in range(SEEDS if CURVES[name][0].mixture else 1) for way in CURVES[name]]
            lines = list(pool.map(lambda run: train_apart(run[0], asked.steps, run[1]), runs))
        (EVIDENCE / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [[json.loads(x) for x in (EVIDENCE / f"{name}.jsonl").read_text().splitlines()] for name in CURVES]
    (EVIDENCE / "precision.md").write_text(page(*found))
    try:
        for name, lines, against in zip(CURVES, found, (REFERENCE, STATES_REFERENCE, FP8_REFERENCE), strict=True):
            draw(lines, EVIDENCE / f"{name}.svg", against)
    except UsageError as error:  # a GPU machine may have no matplotlib; --page draws elsewhere
        print(f"no plot: {error.message}", file=sys.stderr)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the process group of a program in this process is not ended
