"""Which program writes checkpoints into a folder: a lock on the file ``.lock`` in it, held from the first step to the last one.

The file may be a link that somebody put there, or be replaced while it is locked: links are refused, and every save compares the file that
is locked with the one that is there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import secrets
import stat
import time
import weakref
from pathlib import Path

from .checkpoint_files import CheckpointError

LOCK = ".lock"
PARENT = "AUTOPAR_CLAIM"
"""The variable of the environment with a claim (``Claim.inherited``) that a process holds for those that it starts."""

_ANOTHER = "give another folder, or end that training"


class Claim:
    """The right to write checkpoints into ``folder``, for as long as this object is there and open. ``token`` tells it from others."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        self._file = os.fdopen(descriptor, "r+b")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n{self.token}\n".encode(), 0)
        _held[folder.resolve()] = self

    @property
    def inherited(self) -> str:
        """What the processes that this one starts find in ``PARENT``."""
        return f"{self.token} {self.folder.resolve()}"

    def check(self) -> None:
        """Raise ``CheckpointError`` if the lock is no longer on the file that other programs would find."""
        if not _is_at(self._file.fileno(), self.folder / LOCK):
            raise _lost(self.folder)

    def close(self, remove: bool = False) -> None:
        """Give the right back; ``remove`` also removes the file."""
        if remove and _is_at(self._file.fileno(), self.folder / LOCK):
            (self.folder / LOCK).unlink()
        _held.pop(self.folder.resolve(), None)
        self._file.close()


_held: weakref.WeakValueDictionary[Path, Claim] = weakref.WeakValueDictionary()
"""The claims of this process."""


def claimed(folder: Path, patience_s: float) -> Claim:
    """Keep other programs from writing checkpoints into ``folder``, which is made if it is missing.

    A training that was cut off may write for a little longer: ``patience_s`` is how long it has. Where the file system has no locks, none
    is taken. Raises ``CheckpointError`` if the folder cannot be written to, if ``.lock`` is a link, or if another program has the claim.
    """
    deadline = time.monotonic() + patience_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(8)}"  # a save makes a folder
        probe.mkdir()
        probe.rmdir()
        while True:
            descriptor = _opened(folder / LOCK)
            try:
                locked = _locked(descriptor)
                if locked and _is_at(descriptor, folder / LOCK):
                    return Claim(folder, descriptor)
                if not locked and time.monotonic() >= deadline:
                    owner = os.pread(descriptor, 4096, 0).decode(errors="replace").partition("\n")[0]
                    raise CheckpointError(f"another training writes checkpoints into {folder} ({owner})", _ANOTHER)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # it was replaced, or is taken
            if not locked:
                time.sleep(min(0.2, patience_s))
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror}",
            "give a folder that can be made and written to",
        ) from error


def claimed_for_save(folder: Path) -> Claim | None:
    """What a save needs: the claim that this process or its parent has, or one for the save alone, which is returned.

    Raises ``CheckpointError`` if another program has it, or the file of the lock is another one by now.
    """
    own = _held.get(folder.resolve())
    if own is not None:
        own.check()
        return None
    token, _, of = os.environ.get(PARENT, "").partition(" ")
    if of != str(folder.resolve()):
        return claimed(folder, 0.0)
    try:
        descriptor = _opened(folder / LOCK, create=False)
    except FileNotFoundError as error:
        raise _lost(folder) from error
    try:
        if token not in os.pread(descriptor, 4096, 0).decode(errors="replace").split("\n"):
            raise _lost(folder)
    finally:
        os.close(descriptor)
    return None


def _lost(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder / LOCK} was removed or replaced after this training had locked it",
        "another training may write there: give another folder, or start this one again with --resume",
    )


def _opened(path: Path, create: bool = True) -> int:
    """Open the file of a lock. Raises ``CheckpointError`` if it is a link or no plain file, because what it stands for would change."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise _no_file(path) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def _no_file(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a link, or no plain file", "remove it, or give another folder")


def _locked(descriptor: int) -> bool:
    """Whether the lock was taken; also where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path leads to an open file."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
