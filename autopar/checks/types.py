"""Type-checks an emitted program (``autopar.program.type_check``); errors are ``ProgramError``."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from autopar.errors import ProgramError
from autopar.program.type_check import IllTypedError, Progress, check, check_in_subprocess


def check_program(folder: str | Path, progress: Progress | None = None) -> int:
    """Type-check every stage of the program in ``folder``, and return the number of stages.

    If the calling process has a default process group, or ``torchrun`` started it to have one, the check runs in a separate process.
    Otherwise ``progress`` is called for each stage.

    Raises ``ProgramError`` with the checker's own message, the stage, the axis and the line, or with the reason why a file cannot be read
    or run.
    """
    path = Path(folder).resolve()
    try:
        if dist.is_initialized() or "RANK" in os.environ:
            return check_in_subprocess(path)
        return check(path, progress or (lambda text: None))
    except IllTypedError as error:
        raise ProgramError(error.message, error.hint or None) from error
