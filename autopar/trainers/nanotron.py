"""Trainers of published runs, for which no plans are made: nanotron and InternEvo, with their copies of gradients, and NeMo AutoModel."""

from __future__ import annotations

from typing import Any

from autopar.devices import Cluster
from autopar.trainers import figures
from autopar.trainers.fsdp import FullyShardedCosts
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import TrainerCosts


class Nanotron(TrainerCosts):
    evidence = name = "nanotron"

    def gradient_bytes(self, s: Setting) -> float:
        return (figures.DDP_GRADIENT_BYTES if s.data > 1 else figures.SUMMED_GRADIENT_BYTES).value

    def terms(self, s: Setting) -> dict[str, Any]:
        return {"regather": True, "fresh_bytes": int(figures.FRESH_GRADIENT_BYTES.value)}


class InternEvo(TrainerCosts):
    evidence = name = "internevo"

    def gradient_bytes(self, s: Setting) -> float:
        return figures.INTERNEVO_GRADIENT_BYTES.value

    def terms(self, s: Setting) -> dict[str, Any]:
        return super().terms(s) | {"step_bytes": int(figures.INTERNEVO_STEP_BYTES.value)}


class AutoModel(FullyShardedCosts):
    """FSDP2 with the kernels of Transformer Engine."""

    name = "automodel"

    def devices(self, cluster: Cluster) -> Cluster:
        return cluster.with_vendor_attention()

    def fuses(self, s: Setting) -> bool:
        return True
