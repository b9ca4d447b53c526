"""The page of ``exports.py``, from its lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autopar.trainers import TRAINERS

Line = dict[str, Any]

DEGREES = ("data", "replicate", "tensor", "context", "pipeline", "chunks", "expert", "zero", "microbatch")


def page(lines: Sequence[Line]) -> str:
    plans = [line for line in lines if line["part"] == "plans"]
    runs = [line for line in lines if line["part"] == "runs"]
    faults = [line for line in lines if line["part"] == "faults"]
    made = [line for line in plans if "no_plan" not in line]
    versions = ", ".join(f"{name} {version}" for name, version in lines[0]["versions"].items())
    return f"""# Configurations exported for other trainers

{good(made)} of {len(made)} exported plans are accepted by the trainers themselves, and {good(runs)} of {len(runs)} small trainings under
exported configurations have the losses of one device.

Versions: {versions}.

## Parsed by the trainers

For each trainer, the fastest settings for ten pairs of model and cluster, and one with pinned decisions, are exported and then read by the
trainer's own code. A parser that accepts is not enough: every degree, size and switch that it read, and the stages of a pipeline, are
compared with the setting.

| trainer | accepted | checked with |
|---|---|---|
{"".join(map(by_trainer, group(made)))}
{"".join(f"- {text}{chr(10)}" for text in LIMITS)}
| model, devices | {" | ".join(trainer.title for trainer in TRAINERS.values())} |
|---|{"---|" * len(TRAINERS)}
{table(plans)} {good(faults)} of {len(faults)} injected errors in exported files are detected: a wrong degree, a wrong stage boundary, a
misspelt name, a missing switch.

Empty cells have no plan:

{reasons(plans)}
## Run on a CPU

Two processes train a small Llama in float32 for three steps. Each step's loss is compared with plain PyTorch on one device, with the same
weights and sequences. AdamW's epsilon is large, so that a wrong scale of gradients changes the losses.

| trainer | pinned | largest difference in loss | |
|---|---|---|---|
{"".join(map(run_row, runs))}
What a CPU needed besides the exported configuration:

- **Accelerate** uses plain data parallelism on CPUs, whatever its configuration says. The script claims to be on GPUs.
- **DeepSpeed** needs nothing. A module that returns logits together with the loss, as transformers' models do, trains with gradients that
  are too small: DeepSpeed 0.19.0 divides them by `gradient_accumulation_steps` at every output. The exported notes warn of that.
- **torchtitan** requires a CUDA device if torch sees no accelerator. The script substitutes the CPU, and skips what only GPUs have (memory
  statistics, a barrier by device). Its models use plain attention, because FlexAttention has no backward pass on CPUs, and
  `--parallelism.spmd_backend partial_dtensor`, because FSDP of torch 2.13 does not read the types that the default needs. FSDP's reductions
  are sums, because gloo cannot scale them, and the pipeline splits microbatches as later versions of torch do.
- **Megatron-LM** does not start on a CPU: `initialize_megatron` fails with "Megatron requires CUDA."

`make report NAME=exports` installs the trainers in a new environment and repeats all of this; `--megatron-lm FOLDER` names a clone of
Megatron-LM, whose parser is in no package. The [lines](exports.jsonl) have every setting.
"""


LIMITS = (
    "**torchtitan**: `ConfigManager` reads the flags, and the exported function sets the same fields. The model is built on the meta "
    "device, and split into stages, sharded and scheduled for rank 0 on a process group that sends nothing. Models that torchtitan lacks "
    "are built from the blocks of one that it has.",
    "**Megatron-Core**: the flags are fields of its configuration classes, and the layout's stages have the setting's blocks. `parse_args` "
    "and `validate_args` of Megatron-LM read them together with the flags of the model; the function that queries the GPU's compute "
    "capability is replaced. Transformer Engine is not installed, so `--no-rope-fusion` is added.",
    "**DeepSpeed**: `DeepSpeedConfig` for the number of ranks.",
    "**Accelerate**: the arguments of `accelerate launch`, and the plug-ins that it builds from the environment variables that it sets.",
)


def good(lines: Sequence[Line]) -> int:
    return sum("refused" not in line for line in lines)


def group(lines: Sequence[Line]) -> list[list[Line]]:
    return [[line for line in lines if line["trainer"] == name] for name in TRAINERS]


def by_trainer(lines: Sequence[Line]) -> str:
    checks = Counter(check for line in lines for check in line.get("accepted", ()) if not check.startswith("rank 0 of"))
    shown = [check for check in checks if not check.startswith("ConfigManager,")]
    shown += ["ConfigManager", "rank 0 on the meta device"] if lines[0]["trainer"] == "torchtitan" else []
    return f"| {TRAINERS[lines[0]['trainer']].title} | {good(lines)} of {len(lines)} | {', '.join(sorted(shown))} |\n"


def table(plans: Sequence[Line]) -> str:
    cells = {(line["model"], line["devices"], line["trainer"]): cell(line) for line in plans}
    rows = dict.fromkeys((line["model"], line["devices"]) for line in plans)
    return "".join(f"| {m}, {d} | {' | '.join(cells[m, d, name] for name in TRAINERS)} |\n" for m, d in rows)


def cell(line: Line) -> str:
    if "no_plan" in line:
        return ""
    s = line["wanted"]
    words = [f"{name} {s[name]}" for name in DEGREES if s[name] != 1 or name == "zero"]
    words += [] if s["activations"] == "keep" else [f"{s['activations']} recomputation"]
    return f"**refused**: {line['refused']}" if "refused" in line else ", ".join(words)


def reasons(plans: Sequence[Line]) -> str:
    return "".join(f"- {line['model']}, {line['devices']}: {line['no_plan']}\n" for line in plans if "no_plan" in line)


def run_row(line: Line) -> str:
    outcome = line.get("refused", "as on one device")
    difference = f"{line['difference']:.1e}" if "difference" in line else ""
    return f"| {TRAINERS[line['trainer']].title} | {line['devices']} | {difference} | {outcome} |\n"
