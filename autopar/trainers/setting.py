"""One run of a trainer as data: parallel degrees, recipe, and facts about how the trainer runs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.techniques.activations import KEEP

FACTS = (
    "eager",
    "compiled",
    "overlap off",
    "all-to-all context",
    "DeepSpeed",
    "device memory",
    "reserved memory",
    "Megatron",
    "16-bit gradients",
    "overlapped gradients",
    "overlapped tensor",
    "fused loss",
    "unfused attention",
    "flash attention",
)
"""What may be known of a run besides its degrees; cost models of trainers read these."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parallel degrees and training recipe of one run, the same for every block of the model.

    ``data`` is the number of ranks with different samples, ``context`` the degree of context parallelism, ``replicate`` the number of HSDP
    replicas. ``expert`` ranks have different experts; ``fold`` (``plan.FOLDS``) says over which other degrees' ranks these lie. ``zero`` is
    the ZeRO stage, ``activations`` a value of ``techniques.activations``, which applies to the first ``recomputed`` blocks of each stage,
    by default to all. ``sequence`` shards activations along the sequence between tensor-parallel regions. ``cuts`` are the first layers of
    the stages after the first, by default those of the trainer. ``facts`` are some of ``FACTS``.
    """

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    chunks: int
    sequence: bool
    zero: int
    activations: str
    precision: str  # "bfloat16", "float16", "float32" or "float8"
    global_batch: int
    microbatch: int
    facts: frozenset[str]
    replicate: int = 1
    fold: str = "none"
    recomputed: int | None = None
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.facts <= set(FACTS), self.facts
        assert self.recomputed is None or self.activations != KEEP, self.activations

    @property
    def stages(self) -> int:
        """The number of pipeline stages, with virtual ones."""
        return self.pipeline * (self.chunks if self.pipeline > 1 else 1)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.global_batch // (self.data * self.microbatch)
