"""What a trainer can run, how it runs it, and how its configuration is written and read."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.techniques.activations import FULL, GRANULARITIES, KEEP
from autopar.trainers import figures
from autopar.trainers.model import OtherTrainer
from autopar.trainers.options import Option
from autopar.trainers.setting import Setting


@dataclass(frozen=True)
class Space:
    """The settings that a trainer can run, the same for all blocks.

    ``zero`` are its ZeRO stages, ``activations`` its values of ``techniques.activations``, from least to most recomputation;
    ``some_blocks``: the last of them may apply to the first blocks of each stage only. ``tensor``, ``pipeline``, ``context``, ``expert``,
    ``replicate``: it has this kind of parallelism (``replicate``: HSDP). ``sequence``: tensor parallelism shards the sequence, too.
    ``folds``: over which other axes' ranks experts may lie (``Setting.folds``). ``chunks``: interleaved 1F1B; ``any_rounds``: also for
    numbers of microbatches that torch's schedule refuses (``schedules.refusal``). ``uneven``: stages may have different numbers of blocks.
    ``deviations``: the deviations from exact training that it has, names of ``setting.DEVIATIONS``.
    """

    zero: tuple[int, ...]
    activations: tuple[str, ...] = (KEEP, FULL)
    some_blocks: bool = False
    tensor: bool = False
    sequence: bool = True
    pipeline: bool = False
    context: bool = False
    expert: bool = False
    folds: tuple[frozenset[str], ...] = (frozenset(),)
    chunks: bool = False
    any_rounds: bool = False
    replicate: bool = False
    uneven: bool = False
    deviations: tuple[str, ...] = ()


FACT = "fact"
"""The name of a flag that sets one of ``setting.FACTS``."""


@dataclass(frozen=True)
class Flag:
    """A flag: the value that it sets (a field of ``Setting``, or one that the trainer's ``read`` resolves), and how its text is read.

    ``read`` is a function of the text, or the value of a flag without text.
    """

    name: str
    read: Callable[[str], Any] | int | str | bool


@dataclass(frozen=True)
class Reading:
    """What a configuration says: ``values`` by name (fields of ``Setting``, and ``seq``), ``facts``, and ``notes`` on what was not read."""

    values: Mapping[str, Any] = field(default_factory=dict)
    facts: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported:
    """A setting in a trainer's own words: ``files`` by name, and ``notes`` on what they can't say."""

    files: Mapping[str, str]
    notes: tuple[str, ...]


class TrainerCosts:
    """How a trainer runs a setting, for prices. ``evidence`` names the published runs with which its prices were compared
    (``errors.toml``)."""

    name: ClassVar[str]
    evidence: ClassVar[str]
    reports_first_stage: ClassVar[bool] = False
    """Whether the memory in its published runs is that of the first rank, which is in the first stage."""

    def devices(self, cluster: Cluster) -> Cluster:
        """Return the devices as the trainer's kernels see them."""
        return cluster

    def model(self, s: Setting, cluster: Cluster) -> OtherTrainer:
        """Return the cost model of a run."""
        fp16_era = s.precision == "float16"
        before_flash = cluster.gpu.name.startswith(("V100", "A100")) and s.zero < 3
        return OtherTrainer(
            fused=self.fuses(s),
            flash="flash attention" in s.facts or not (fp16_era or before_flash or "unfused attention" in s.facts),
            gathers_by_parameter=fp16_era,
            gradient_bytes=int(
                figures.RECIPE_GRADIENT_BYTES.value if "16-bit gradients" in s.facts else self.gradient_bytes(s)
            ),
            overlap_data=self.overlap_data(s),
            overlap_tensor=self.overlap_tensor(s),
            overlap_experts=self.overlap_experts(s),
            dispatches="token dispatch kernels" in s.facts,
            permutation_passes=figures.PERMUTATION_PASSES.value,
            consecutive_experts="consecutive experts" in s.facts,
            fused_experts=self.fuses_experts(s, cluster),
            **self.terms(s),
        )

    def fuses(self, s: Setting) -> bool:
        """Return whether chains of pointwise ops run as one kernel."""
        return "eager" not in s.facts and ("compiled" in s.facts or s.precision == "float8")

    def gradient_bytes(self, s: Setting) -> float:
        """Return the bytes that are kept for one parameter's gradient, including copies."""
        return 4

    def overlap_data(self, s: Setting) -> int:
        """Return the number of microbatches that hide data-parallel collectives under ZeRO 0 and 1."""
        if s.precision == "float16":
            return int(s.pipeline == 1)
        if "overlap off" in s.facts or "overlapped gradients" not in s.facts:
            return 0
        return s.pipeline  # the pipeline's cool-down hides communication, too

    def overlap_tensor(self, s: Setting) -> float:
        """Return the fraction of tensor-parallel communication that is hidden."""
        return float("overlapped tensor" in s.facts and "overlap off" not in s.facts and s.precision != "float16")

    def overlap_experts(self, s: Setting) -> float:
        """Return the fraction of passes whose exchanges of tokens with their experts run under another microbatch's computation."""
        return 0.0

    def fuses_experts(self, s: Setting, cluster: Cluster) -> bool:
        """Return whether an expert is one kernel."""
        return False

    def terms(self, s: Setting) -> dict[str, Any]:
        """Return the other arguments of ``OtherTrainer``."""
        return {"regather": True}

    def root_zero(self, s: Setting) -> int | None:
        """Return the ZeRO stage of the first and the last layer, if it differs from that of blocks."""
        return None


class Trainer(TrainerCosts, abc.ABC):
    """A trainer for which plans are made. ``facts`` holds what is known of runs under exported configurations, ``flags`` what ``read``
    reads, by ``key`` of an option's name."""

    title: ClassVar[str]
    space: ClassVar[Space]
    facts: ClassVar[frozenset[str]]
    flags: ClassVar[Mapping[str, Flag]]

    def key(self, name: str) -> str:
        """Return the key of an option in ``flags``."""
        return name

    def facts_of(self, tensor: int, expert: int) -> frozenset[str]:
        """Return what is known of runs under exported configurations with these tensor- and expert-parallel degrees."""
        return self.facts

    @abc.abstractmethod
    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        """Return the configuration files of a setting."""

    @abc.abstractmethod
    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        """Return what a configuration for a model of ``blocks`` blocks (0: not known yet) on ``devices`` devices says; ``None`` if it is
        not one of this trainer's.

        Raises ``UsageError`` for values that are invalid or contradict each other.
        """


def granularity_word(activations: str) -> str:
    """Return a trainer's word for a value of ``techniques.activations``: none, selective or full."""
    return next(word for word, value in GRANULARITIES.items() if value == activations)


def whole_number(text: str) -> int:
    """Return the number. Raises ``UsageError`` for text that is not a whole number from 1."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 2**53):
        raise UsageError(f"{text!r} is not a positive integer", "degrees and sizes are positive integers")
    return int(text)


def switch(text: str) -> bool:
    """Return whether the text, or a flag without text, switches on."""
    return text.lower() in ("", "true", "1", "yes", "on")
