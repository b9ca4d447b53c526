"""Cost models of other trainers: they price a plan as Megatron-LM, FSDP or DeepSpeed would run it."""

from autopar.trainers.model import OtherTrainer

__all__ = ["OtherTrainer"]
