"""DeepSpeed: ZeRO, configured by a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def _number(text: str) -> int | None:
    return None if text == "auto" else whole_number(text)


def _device(text: str) -> str:
    return text


_FLAGS = {
    "zero_optimization.stage": Flag("zero", _stage),
    "zero_optimization.offload_optimizer.device": Flag("states", _device),
    "zero_optimization.offload_param.device": Flag("parameters", _device),
    "train_micro_batch_size_per_gpu": Flag("microbatch", _number),
    "train_batch_size": Flag("global_batch", _number),
    "gradient_accumulation_steps": Flag("accumulation", _number),
    "bf16.enabled": Flag("precision", "bfloat16"),
    "fp16.enabled": Flag("precision", "float16"),
}


class DeepSpeed(Trainer):
    evidence = "deepspeed"
    name = "deepspeed"
    title = "DeepSpeed ZeRO"
    checked = "deepspeed 0.19.0"
    space = Space(zero=(0, 1, 2, 3))
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
                "let your module return its loss alone: gradients are divided by gradient_accumulation_steps at every output"
            )
        if s.precision == "float8":
            notes.append("products in 8 bits are not written: bfloat16 is")
        return Exported({"ds_config.json": json.dumps(data, indent=2) + "\n"}, tuple(notes))

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        if not any(
            option.name.partition(".")[0] in ("zero_optimization", "train_micro_batch_size_per_gpu")
            for option in options
        ):
            return None
        found = read_flags(options, _FLAGS, lambda name: name)
        if found is None:
            return None
        values, notes = dict(found.values), [*found.notes]
        for name in ("states", "parameters"):
            where = values.pop(name, "none")
            if where not in ("none", "None"):
                notes.append(f"{name} offloaded to {where}: priced as if they stayed on the device")
        steps = values.pop("accumulation", None)
        if "microbatch" in values and steps and "global_batch" not in values:
            values["global_batch"] = values["microbatch"] * steps * devices
        if "microbatch" not in values and steps and "global_batch" in values:
            values["microbatch"] = max(1, values["global_batch"] // (steps * devices))
        notes.append("activation checkpointing is decided in your script: none is assumed")
        values |= {"activations": KEEP}
        values.setdefault("precision", "float32")
        return Reading(values, frozenset(self.facts), tuple(notes), found.options)
