"""Train the program in this folder: ``torchrun --nproc-per-node N train.py --steps 50 --dataset data.pt``.

Yours to edit. Command-line options override the values here: ``train.py --help`` lists them, and ``runtime/training.py`` says what they
do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from autopar.program.optimizers import Scheduler, select  # noqa: F401  recipes select
from autopar.program.trainer import adamw
from autopar.program.training import Recipe
from autopar.program.training import main as train
from autopar.program.watch import run
from autopar.program.world import World

if __name__ == "__main__":
    # to import data sets and optimizers from the working folder; modules beside this file and installed ones come first
    sys.path.append(os.getcwd())

# -- data and checkpoints: yours to edit ------------------------------------------------------------------------------

STEPS = 10  # in total, including those before a resume; --steps
DATASET: str | None = None  # a file, MODULE:FUNCTION, FILE.py:FUNCTION or "synthetic", which None means; --dataset
CHECKPOINT: str | None = None  # a folder for checkpoints; --checkpoint
EVERY = 100  # steps from one checkpoint to the next; --every
KEEP = 2  # the number of newest checkpoints to keep; --keep

# -- the recipe: yours to edit ----------------------------------------------------------------------------------------

REFUSED = ""  # why there is no recipe
LR: float | None = 3e-4  # if --lr is not given; None: the optimizer has its own
MAX_NORM: float | None = None  # of the gradients, if --clip is not given; None: no clipping
SEED = 0  # if --seed is not given
INIT: str | None = None  # if --init is not given; None: initial.safetensors
DRAW_INIT = False  # draw initial values where there are none


def make_optimizer(
    parameters: dict[str, nn.Parameter], lr: float, world: World
) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
    """Return the optimizer, or a list of them, over the model's parameters by name."""
    return adamw(list(parameters.values()), lr, world)


make_scheduler: Scheduler | None = None


# -- the training -----------------------------------------------------------------------------------------------------


def recipe() -> Recipe:
    """Return the settings above as a ``Recipe``."""
    return Recipe(
        folder=Path(__file__).resolve().parent,
        optimizer=make_optimizer,
        scheduler=make_scheduler,
        lr=LR,
        max_norm=MAX_NORM,
        seed=SEED,
        init=INIT,
        draw_init=DRAW_INIT,
        refused=REFUSED,
        steps=STEPS,
        dataset=DATASET,
        checkpoint=CHECKPOINT,
        every=EVERY,
        keep=KEEP,
    )


def main() -> None:
    """Train with these settings."""
    train(recipe())


if __name__ == "__main__":
    run(main)
