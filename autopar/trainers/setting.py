"""One run of a trainer as data: parallel degrees, recipe, and facts about how the trainer runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.plan import NARROW_GRADIENTS
from autopar.precision import FLOAT8, FP8
from autopar.techniques import Options
from autopar.techniques.activations import ACTIVATIONS

FACTS = (
    "eager",
    "compiled",
    "overlap off",
    "all-to-all context",
    "DeepSpeed",
    "reserved memory",
    "Megatron",
    "InternEvo",
    "nanotron",
    "16-bit gradients",
    "16-bit moments",
    "overlapped gradients",
    "overlapped tensor",
    "overlapped experts",
    "token dispatch kernels",
    "natural routing",
    "consecutive experts",
    "fused loss",
    "unfused attention",
    "flash attention",
)
"""What may be known of a run besides its degrees; cost models of trainers read these."""

KEPT = frozenset({"16-bit gradients", "16-bit moments", "natural routing", "consecutive experts", "overlapped tensor"})
"""The facts of a run that a faster setting for the same training keeps."""

DEVIATIONS: Mapping[str, Mapping[str, Any]] = {
    FP8.name: {"precision": FLOAT8},
    NARROW_GRADIENTS: {"facts": frozenset({"16-bit gradients"})},
}
"""The fields of settings that deviate from exact training, by name of the deviation (of ``autopar.plan.ALLOWED``)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parallel degrees and training recipe of one run, the same for every block of the model.

    ``data`` is the number of ranks with different samples, ``context`` the degree of context parallelism, ``replicate`` the number of HSDP
    replicas. ``expert`` ranks have different experts; ``folds`` says over which other axes' ranks these lie, ``"tensor"`` and
    ``"context"``, besides data-parallel ranks. ``zero`` is
    the ZeRO stage, ``options`` the techniques of blocks; only the first ``recomputed`` blocks of each stage are recomputed, by default all.
    ``sequence`` shards activations along the sequence between tensor-parallel regions. ``cuts`` are the first layers of
    the stages after the first, by default those of the trainer. ``schedule`` is empty for 1F1B, interleaved with several chunks. ``facts``
    are some of ``FACTS``.
    """

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    chunks: int
    sequence: bool
    zero: int
    options: Options
    precision: str  # "bfloat16", "float16", "float32" or "float8"
    global_batch: int
    microbatch: int
    facts: frozenset[str]
    replicate: int = 1
    folds: frozenset[str] = frozenset()
    schedule: str = ""
    recomputed: int | None = None
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.facts <= set(FACTS), self.facts

    @property
    def activations(self) -> str:
        """What blocks keep for the backward pass, a value of ``techniques.activations``."""
        return self.options[ACTIVATIONS]

    def with_activations(self, value: str, recomputed: int | None = None) -> Setting:
        """Return the setting with another value of ``activations``, in the first ``recomputed`` blocks of each stage or in all."""
        options = self.options.replace(**{ACTIVATIONS.name: value})
        return dataclasses.replace(self, options=options, recomputed=recomputed)

    @property
    def expert_axis(self) -> int:
        """The number of data-parallel ranks over which experts are distributed."""
        folded = (self.tensor if "tensor" in self.folds else 1) * (self.context if "context" in self.folds else 1)
        return self.expert // folded

    @property
    def stages(self) -> int:
        """The number of pipeline stages, with virtual ones."""
        return self.pipeline * (self.chunks if self.pipeline > 1 else 1)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.global_batch // (self.data * self.microbatch)


def deviations_of(s: Setting) -> tuple[str, ...]:
    """Return the names of the deviations that a setting has."""
    has = {"precision": lambda value: s.precision == value, "facts": lambda value: value <= s.facts}
    return tuple(name for name, fields in DEVIATIONS.items() if all(has[key](value) for key, value in fields.items()))
