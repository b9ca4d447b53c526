"""Trainers of published runs, for which no plans are made: DDP with a float32 sum, nanotron, InternEvo, NeMo AutoModel."""

from __future__ import annotations

from typing import Any

from autopar.devices import Cluster
from autopar.trainers import figures
from autopar.trainers.fsdp import FullyShardedCosts
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import TrainerCosts
from autopar.types import Collective


class Ddp(TrainerCosts):
    """PyTorch's DDP, and a float32 sum of gradients over microbatches: the trainer of rows that name none."""

    evidence = name = "ddp"

    def gradient_bytes(self, s: Setting) -> float:
        return (figures.DDP_GRADIENT_BYTES if s.data > 1 else figures.SUMMED_GRADIENT_BYTES).value

    def terms(self, s: Setting) -> dict[str, Any]:
        return {"regather": True, "fresh_bytes": int(figures.FRESH_GRADIENT_BYTES.value)}


class Nanotron(Ddp):
    """Gradients are reduced in float32. Without ZeRO, hooks of DDP reduce them during the last microbatch's backward. Under ZeRO 1 there is
    no DDP: an all-reduce of all gradients follows the last backward, and the gather of parameters has two copies of them (``make_ddp`` and
    ``sync_gradients_across_dp`` in src/nanotron/trainer.py, ``_all_gather_params`` in optim/zero.py of huggingface/nanotron v0.5). A column
    linear's input gradients are reduced during the product of its weight gradients (parallel/tensor_parallel/functional.py).

    Gradients take DDP's bucket under ZeRO 1, too: no code says so, but without it the memory of its published runs is underestimated."""

    evidence = name = "nanotron"
    reports_first_stage = True

    def overlap_data(self, s: Setting) -> int:
        return int(not s.zero and "overlap off" not in s.facts)

    def overlap_tensor(self, s: Setting) -> float:
        return 0.0 if "overlap off" in s.facts else float(figures.TENSOR_OVERLAP.value)

    def terms(self, s: Setting) -> dict[str, Any]:
        return super().terms(s) | {
            "reduces_sums": True,
            "stage1_reduction": Collective.ALL_REDUCE,
            "starts_early": "overlap off" not in s.facts,
            "loss_copies": int(figures.FLOAT32_LOSS_COPIES.value),
            "gather_bytes": int(figures.GATHERED_COPIES_BYTES.value),
        }


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
