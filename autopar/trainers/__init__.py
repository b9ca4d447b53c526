"""Models of other trainers than the programs that autopar emits: prices of a plan as Megatron-LM, FSDP or DeepSpeed would run it."""

from autopar.trainers.model import OtherTrainer

__all__ = ["OtherTrainer"]
