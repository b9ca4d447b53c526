"""Converts flags of Megatron-LM and torchtitan to autopar's pins and sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import UsageError
from autopar.pins import PINS
from autopar.techniques import LAYER

MICROBATCH, SEQUENCE = "microbatch", "sequence"
"""Names of two values that aren't pins: the number of sequences per microbatch, and whether to use Megatron-LM's sequence parallelism."""


def _integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a whole number from 1", "degrees and sizes are whole numbers")
    return int(text)


def _zero_stage(text: str) -> int:
    """Return the ZeRO stage of torchtitan's shard degree: 3 above one, because torchtitan shards parameters, gradients and states."""
    return 3 if _integer(text) > 1 else 0


# Maps a flag to the name of a pin or of another value, and to that value: a function of the flag's text, or a constant for a flag without
# text. A technique reads the texts of all its flags together.
FLAGS: dict[str, tuple[str, Callable[[str], Any] | int | str | bool]] = {
    "--tensor-model-parallel-size": ("tensor", _integer),
    "--pipeline-model-parallel-size": ("pipeline", _integer),
    "--context-parallel-size": ("ring", _integer),
    "--expert-model-parallel-size": ("expert", _integer),
    "--micro-batch-size": (MICROBATCH, _integer),
    "--global-batch-size": ("global_batch", _integer),
    "--seq-length": ("seq", _integer),
    "--sequence-parallel": (SEQUENCE, True),
    "--use-distributed-optimizer": ("zero", 1),
    "--num-virtual-stages-per-pipeline-rank": ("chunks", _integer),
    "--bf16": ("precision", "bfloat16"),
    "--fp16": ("precision", "float16"),
    "--parallelism.tensor_parallel_degree": ("tensor", _integer),
    "--parallelism.pipeline_parallel_degree": ("pipeline", _integer),
    "--parallelism.context_parallel_degree": ("ring", _integer),
    "--parallelism.expert_parallel_degree": ("expert", _integer),
    "--parallelism.data_parallel_shard_degree": ("zero", _zero_stage),
    "--parallelism.data_parallel_replicate_degree": ("replicate", _integer),
    "--training.local_batch_size": (MICROBATCH, _integer),
    "--training.global_batch_size": ("global_batch", _integer),
    "--training.seq_len": ("seq", _integer),
    **{flag: (flag, str) for technique in LAYER for flag in technique.flags},
}


def read_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Parse ``--flag value`` and ``--flag=value``; return the pins as ``KEY=VALUE``, and the other values by name.

    Raises ``UsageError`` for an unknown flag, and for a missing or invalid value, a value of a flag that has none, and
    flags that contradict each other.
    """
    values: dict[str, Any] = {}
    queue = list(words)
    while queue:
        flag, equals, text = queue.pop(0).partition("=")
        if flag not in FLAGS:
            raise UsageError(f"{flag!r} is not a supported flag", f"these are: {', '.join(FLAGS)}")
        name, value = FLAGS[flag]
        if callable(value):
            if not equals and not queue:
                raise UsageError(f"{flag} has no value", f"write {flag} followed by its value")
            try:
                value = value(text if equals else queue.pop(0))
            except UsageError as error:
                raise UsageError(f"{flag}: {error.message}", error.hint) from None
        elif equals:
            raise UsageError(f"{flag} takes no value, not even {text!r}", f"write {flag} alone, or leave it out")
        if values.setdefault(name, value) != value:
            raise UsageError(
                f"{flag} means {name}={value}, and an earlier flag {name}={values[name]}", "give one of them"
            )
    for technique in LAYER:
        chosen = technique.of_flags({flag: values.pop(flag) for flag in technique.flags if flag in values})
        values |= {} if chosen is None else {technique.name: chosen}
    if values.get("zero") == 0:  # torchtitan's replicas without shards are plain data parallelism
        values.pop("replicate", None)
    return [f"{name}={values.pop(name)}" for name in PINS if name in values], values
