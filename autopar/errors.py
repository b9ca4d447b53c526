"""The tree of errors for users.

::

    AutoparError                 exit status 1; a sentence, and usually a hint
    ├── UsageError               exit status 2; the request itself is wrong
    │   ├── DeviceError          the description of the devices
    │   ├── ModelError           the model's name, file or factory
    │   ├── BatchError           the batch, or how it fits the graph
    │   └── RuleError            a sharding rule that does not parse or does not hold
    ├── CaptureError             the model cannot be exported
    ├── InfeasibleError          no plan fits the devices
    ├── ProgramError             an emitted folder that cannot be loaded or is ill-typed
    ├── CheckpointError          a checkpoint that cannot be written or read
    ├── NonFiniteLossError       a loss that is NaN or infinite
    └── LaunchError              a process that died, a port that is in use

A message says what is wrong, with names and values, and why; ``hint`` says what to do. Broken invariants of autopar are assertions, not
members of this tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SuggestedChange(Protocol):
    """A change that makes a request feasible: a description, and the new values."""

    @property
    def text(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class AutoparError(Exception):
    """The base class. ``message`` is one or two sentences; the optional ``hint`` says what to do."""

    exit_status = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(AutoparError):
    """The request itself is wrong; the command line ends with status 2."""

    exit_status = 2


class DeviceError(UsageError):
    """The description of the devices is wrong: a count, a GPU name, a cluster file."""


class ModelError(UsageError):
    """The model cannot be found or built: a name, a file, a factory."""


class BatchError(UsageError):
    """The batch, or a requested batch size or sequence length, is invalid or does not fit the model or the program."""


class RuleError(UsageError):
    """A sharding rule does not parse, or its execution on shards disagrees with the unsharded op."""


class CaptureError(AutoparError):
    """The model can't be captured: ``torch.export`` or autopar refused it, or the captured graph does not compute what the model computes.

    The message names the source line, if one is at fault.
    """


OPAQUE_HINT = "wrap the module in autopar.opaque(module), which runs it as one op, replicated on every rank"
"""The hint of a ``CaptureError`` for code in a module."""


class InfeasibleError(AutoparError):
    """No plan fits. The message names the stage (with its layers and bytes) or the layer that does not fit; the hint suggests a change.

    ``changes`` are alternative changes of the request with which a search finds a plan that fits.
    """

    def __init__(self, message: str, hint: str | None = None, changes: Sequence[SuggestedChange] = ()) -> None:
        super().__init__(message, hint)
        self.changes = tuple(changes)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"or: {change.text}" for change in self.changes)])


class ProgramError(AutoparError):
    """An emitted program cannot be loaded, or does not type-check."""


class CheckpointError(AutoparError):
    """A checkpoint can't be written or read (full disk, damaged file, another model); the training state is unchanged."""


class NonFiniteLossError(AutoparError):
    """A loss is NaN or infinite; the message names the step and the first such value. The parameters were not updated."""


class LaunchError(AutoparError):
    """Processes could not be started, or one of them died. ``cause`` is ``OUT_OF_MEMORY``, ``HANG``, or empty for any other cause."""

    def __init__(self, message: str, hint: str | None = None, cause: str = "") -> None:
        super().__init__(message, hint)
        self.cause = cause


OUT_OF_MEMORY, HANG = "out of memory", "hang"
