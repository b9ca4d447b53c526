"""A byte-level Llama learns the text of Python's standard library, on 4 processes under a plan that autopar chose, then on 1.

The two loss curves are the same curve: a plan changes where the arithmetic happens, never what is computed.

    python examples/train_llama_stdlib.py [--steps 80] [--processes 4] [--out demo]

It is also a factory for the command line: ``autopar plan examples/train_llama_stdlib.py:model --devices 8xH100-80GB``.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cli.render import plan_tables

BATCH, SEQ = 8, 128  # windows in a step, bytes in a window
TEXT_BYTES = 8_000_000  # about a third of the library
TOLERANCE = 1e-3  # of the loss, in float32: sums in another order differ by rounding, which training amplifies


def build_model() -> nn.Module:
    """9.9 M parameters; the vocabulary is the 256 bytes."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=SEQ,
            use_cache=False,
        )
    )


def standard_library() -> torch.Tensor:
    """The sources of this Python's standard library, one after the other in the order of their names, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if not skip & set(path.relative_to(folder).parts):
            text += path.read_bytes()
            if len(text) >= TEXT_BYTES:
                break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def draw_batches(
    text: torch.Tensor, steps: int, global_batch: int = BATCH, seq: int = SEQ
) -> list[dict[str, torch.Tensor]]:
    """Random windows, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(text) - seq, (global_batch,), generator=generator)
        windows = torch.stack([text[s : s + seq] for s in starts]).long()
        batches.append({"input_ids": windows, "labels": windows.clone()})
    return batches


def model(global_batch: int = BATCH, seq: int = SEQ) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The factory: the model and an example of one global batch."""
    return build_model(), draw_batches(standard_library(), 1, global_batch, seq)[0]


def train(
    processes: int, batches: list[dict[str, torch.Tensor]], folder: Path | None
) -> tuple[autopar.Plan, list[float], float]:
    """The plan, the loss of each step, and the seconds that the steps took."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(batches))

        def report(stage: str, text: str) -> None:
            progress.update(task, description=f"{processes} process{'es' if processes > 1 else ''}: {stage}")

        def on_step(step: int, loss: float, record: dict[str, object]) -> None:
            progress.update(
                task, description=f"{processes} process{'es' if processes > 1 else ''}: loss {loss:.3f}", advance=1
            )

        with autopar.compile(
            build_model(), ["cpu"] * processes, batches[0], lr=1e-3, folder=folder, progress=report
        ) as program:
            start = time.perf_counter()
            losses = program.train(batches, on_step=on_step)
            return program.plan, losses, time.perf_counter() - start


def plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, losses), width, color in zip(curves.items(), (4, 1.2), ("lightskyblue", "black"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, label=name, lw=width, color=color)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level Llama on Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    text = standard_library()
    batches = draw_batches(text, args.steps)
    count = sum(parameter.numel() for parameter in build_model().parameters())
    print(
        f"{count / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of Python, {args.steps} steps of {BATCH} x {SEQ} bytes, float32"
    )

    plan, many, many_s = train(args.processes, batches, args.out / "program")
    Console(highlight=False, width=120).print(plan_tables(plan))
    _, one, one_s = train(1, batches, None)

    names = (f"{args.processes} processes", "1 process")
    plot(dict(zip(names, (many, one), strict=True)), args.out / "curves.png")
    difference = max(abs(a - b) for a, b in zip(many, one, strict=True))
    print()
    for name, losses, seconds in zip(names, (many, one), (many_s, one_s), strict=True):
        print(f"{name:<12} loss {losses[0]:.6f} -> {losses[-1]:.6f}   {seconds:6.1f} s")
    print(f"largest difference of the two curves: {difference:.1e}")
    print(f"the curves: {args.out / 'curves.png'}   the program: {args.out / 'program'}")
    if not difference <= TOLERANCE:
        sys.exit(f"the curves differ by more than {TOLERANCE}: the program does not compute what the model does")


if __name__ == "__main__":
    main()
