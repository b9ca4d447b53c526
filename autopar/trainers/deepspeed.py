"""DeepSpeed: ZeRO, configured by a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.techniques.activations import FULL, KEEP
from autopar.trainers import figures
from autopar.trainers.flags import read_flags
from autopar.trainers.options import Option
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import Exported, Flag, Reading, Space, Trainer, whole_number


def _stage(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise UsageError(f"{text!r} is not a ZeRO stage", "there are stages 0 to 3")
    return int(text)


_FLAGS = {
    "zero_optimization.stage": Flag("zero", _stage),
    "zero_optimization.offload_optimizer.device": Flag("states", str),
    "zero_optimization.offload_param.device": Flag("parameters", str),
    "train_micro_batch_size_per_gpu": Flag("microbatch", whole_number),
    "train_batch_size": Flag("global_batch", whole_number),
    "gradient_accumulation_steps": Flag("accumulation", whole_number),
    "bf16.enabled": Flag("precision", "bfloat16"),
    "bfloat16.enabled": Flag("precision", "bfloat16"),
    "fp16.enabled": Flag("precision", "float16"),
}


class DeepSpeed(Trainer):
    evidence = "deepspeed"
    name = "deepspeed"
    title = "DeepSpeed ZeRO"
    space = Space(zero=(0, 1, 2, 3))
    flags = _FLAGS
    facts = frozenset({"DeepSpeed", "flash attention"})

    def gradient_bytes(self, s: Setting) -> float:
        return figures.DEEPSPEED_GRADIENT_BYTES.value

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        data: dict[str, Any] = {
            "train_batch_size": s.global_batch,
            "train_micro_batch_size_per_gpu": s.microbatch,
            "gradient_accumulation_steps": s.microbatches,
            "zero_optimization": {
                "stage": s.zero,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
            },
        }
        switches = {"bfloat16": "bf16", "float16": "fp16", "float8": "bf16"}
        if s.precision in switches:
            data[switches[s.precision]] = {"enabled": True}
        notes = [
            f"sequences of {graph.tokens // graph.batch_size} tokens; the optimizer and its learning rate are yours"
        ]
        if s.activations == FULL:
            notes.append("for the plan's memory call model.gradient_checkpointing_enable() in your script")
        if s.microbatches > 1:
            notes.append(
                "let your module return only its loss: gradients are divided by gradient_accumulation_steps at every output"
            )
        if s.precision == "float8":
            notes.append("products in 8 bits are not written: bfloat16 is")
        return Exported({"ds_config.json": json.dumps(data, indent=2) + "\n"}, tuple(notes))

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        found = read_flags(options, self.flags, self.key)
        if found is None:
            return None
        values, notes = dict(found.values), [*found.notes]
        for name in ("states", "parameters"):
            where = values.pop(name, "none")
            if where not in ("none", "None"):
                notes.append(f"{name} offloaded to {where}: priced as if they stayed on the device")
        left_open = [option.name for option in options if str(option.value).lower() == "auto"]
        if left_open:
            notes.append(f"{', '.join(left_open)} is decided by your script")
        values |= _batch(values, devices, left_open)
        values.pop("accumulation", None)
        notes.append("activation checkpointing is decided in your script: none is assumed")
        values |= {"activations": KEEP}
        if not any(name.endswith(".enabled") for name in left_open):
            values.setdefault("precision", "float32")
        return Reading(values, frozenset(self.facts), tuple(notes))


def _batch(values: Mapping[str, Any], devices: int, left_open: Sequence[str]) -> dict[str, int]:
    """Return batch and microbatch as ``DeepSpeedConfig`` completes them: the batch is the microbatch times the steps of accumulation times
    the devices, of which one may be missing; of two that are missing, accumulation is one step. Sizes that are left open stay so."""
    batch, micro, steps = (values.get(name) for name in ("global_batch", "microbatch", "accumulation"))
    if batch and micro and steps and batch != micro * steps * devices:
        raise UsageError(
            f"train_batch_size = {batch} is not {micro} x {steps} x {devices}: train_micro_batch_size_per_gpu x "
            "gradient_accumulation_steps x devices",
            "change one of them, or --devices",
        )
    if steps is None and "gradient_accumulation_steps" not in left_open and not (batch and micro):
        steps = 1
    if batch and not micro and steps:
        micro, odd = divmod(batch, steps * devices)
        if odd or not micro:
            raise UsageError(
                f"train_batch_size = {batch} does not divide into {steps} steps on {devices} devices",
                "change one of them",
            )
    if micro and not batch and steps and "train_batch_size" not in left_open:
        batch = micro * steps * devices
    return {name: n for name, n in (("global_batch", batch), ("microbatch", micro)) if n}
