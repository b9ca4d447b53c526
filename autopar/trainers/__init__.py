"""Other trainers: what each can run, what that costs, and its configuration files, written and read.

A file for each trainer (``megatron``; ``fsdp`` for torchtitan and Accelerate; ``deepspeed``; ``nanotron``, also for DDP, InternEvo
and NeMo AutoModel) holds a ``Trainer``. ``model`` has the cost model that all of them configure, ``choose`` finds the fastest setting.
"""

from autopar.trainers.deepspeed import DeepSpeed
from autopar.trainers.fsdp import Accelerate, Torchtitan
from autopar.trainers.megatron import Megatron
from autopar.trainers.model import OtherTrainer
from autopar.trainers.nanotron import AutoModel, Ddp, InternEvo, Nanotron
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import Exported, Reading, Trainer, TrainerCosts

MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE = Megatron(), Torchtitan(), DeepSpeed(), Accelerate()
DDP, NANOTRON, INTERNEVO, AUTOMODEL = Ddp(), Nanotron(), InternEvo(), AutoModel()

TRAINERS: dict[str, Trainer] = {each.name: each for each in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}
"""The trainers for which plans are made, by name."""

__all__ = [
    "ACCELERATE",
    "AUTOMODEL",
    "DDP",
    "DEEPSPEED",
    "INTERNEVO",
    "MEGATRON",
    "NANOTRON",
    "TORCHTITAN",
    "TRAINERS",
    "Exported",
    "OtherTrainer",
    "Reading",
    "Setting",
    "Trainer",
    "TrainerCosts",
]
