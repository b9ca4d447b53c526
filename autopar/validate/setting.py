"""The trainer that ran a row, the memory that it would have reported, and its cluster."""

from __future__ import annotations

from autopar.devices import Cluster, constants, described
from autopar.trainers import AUTOMODEL, DDP, DEEPSPEED, INTERNEVO, MEGATRON, NANOTRON, TORCHTITAN, Setting, TrainerCosts
from autopar.validate.fields import RowError
from autopar.validate.rows import Hardware


def is_fsdp(s: Setting) -> bool:
    """Return whether PyTorch's FSDP shards the parameters; ZeRO-3 in float16 is assumed to be DeepSpeed's."""
    return s.zero == 3 and s.precision != "float16" and "DeepSpeed" not in s.facts


def trainer_of(s: Setting) -> TrainerCosts:
    """Return the trainer that ran the row: from the row's facts, or else the usual one for its recipe."""
    if "InternEvo" in s.facts:
        return INTERNEVO
    if is_fsdp(s):
        return AUTOMODEL if "Megatron" in s.facts else TORCHTITAN
    if s.precision == "float16" or s.chunks > 1 or "Megatron" in s.facts or s.precision == "float8":
        return MEGATRON
    if "nanotron" in s.facts:
        return NANOTRON
    return DEEPSPEED if "DeepSpeed" in s.facts else DDP


def reported_bytes(s: Setting, memory: int, reserve: float = constants.ALLOCATOR_RESERVE.value) -> float:
    """Return the bytes that the row's tool would have reported for ``memory`` allocated bytes: what the allocator reserves, or ``memory``
    itself."""
    return memory * reserve if "reserved memory" in s.facts else float(memory)


def cluster_of(hardware: Hardware) -> Cluster:
    """Return the row's cluster. Raises ``DeviceError`` for an unknown GPU, ``RowError`` if the devices don't fill whole nodes."""
    per_node = min(hardware.per_node, hardware.devices)
    if hardware.devices % per_node:
        raise RowError(f"n_gpus = {hardware.devices} do not fill nodes of {per_node}")
    return described(hardware.gpu, hardware.devices // per_node, per_node, hardware.network)
