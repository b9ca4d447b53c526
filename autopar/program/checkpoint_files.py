"""Manages the folders of checkpoints: ``step-N`` is complete, ``step-N.partial`` is being written or was left incomplete.

A checkpoint has ``checkpoint.json`` (human-readable facts), the tensors' files, and torch's ``.metadata``, which lists the boxes in these
files with their offsets. ``checkpoint.json`` has its own checksum, the checksum of ``.metadata``, and the id of the save, which is in every
file of tensors, too (``box_files``). Unpickling ``.metadata`` creates only torch's metadata records.

One program at a time writes into a folder: it locks the file ``.lock`` there from the first step to the last. A link at this path is
refused, because writing to it would change another file. Every save checks that the file at this path is still the locked one: if it was
replaced, another program could lock the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import platform
import re
import secrets
import shutil
import stat
import time
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .box_files import DamageError, has_table, tables_of

FACTS, METADATA, PARTIAL = "checkpoint.json", ".metadata", ".partial"
FORMAT = 2
_WITHOUT_CHECKSUMS = 1
"""The previous format, which can still be loaded."""
_REPLACED = ".replaced"  # a checkpoint that another one of the same step replaces
_REMOVED = ".removed"  # a checkpoint that is being removed
_STEP = re.compile(rf"step-(\d+)({_REPLACED})?")


class CheckpointError(RuntimeError):
    """Raised if a checkpoint can't be written or read; ``message`` says why, ``hint`` what to do, ``partially_loaded`` whether a load
    failed after it had overwritten a part of the training state."""

    def __init__(self, message: str, hint: str, partially_loaded: bool = False) -> None:
        super().__init__(f"{message}; {hint}")
        self.message, self.hint, self.partially_loaded = message, hint, partially_loaded


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint: its folder, the content of ``checkpoint.json``, torch's metadata of its tensors, and the id of its save
    (``None`` in the format without checksums)."""

    path: Path
    facts: Mapping[str, Any]
    metadata: Metadata
    save: str | None


# -- writing ----------------------------------------------------------------------------------------------------------


def partial_of(folder: Path, steps: int) -> Path:
    """Return the folder to write the checkpoint after ``steps`` steps to."""
    return folder / f"step-{steps}{PARTIAL}"


def final_of(partial: Path) -> Path:
    """Return the path that the folder ``partial`` gets once the checkpoint is complete."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def begin(partial: Path) -> None:
    """Make an empty folder to write to."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def discard(partial: Path) -> None:
    """Remove the files of a failed save, which may have filled the disk."""
    shutil.rmtree(partial, ignore_errors=True)


def finish(partial: Path, facts: Mapping[str, Any], keep: int | None) -> Path:
    """Write the facts, check that the checkpoint is complete, and rename the folder; remove all but the last ``keep`` checkpoints.

    Files and folders are synced to disk before the next of these steps begins.
    """
    with (partial / FACTS).open("w") as file:
        json.dump(_sealed(facts, (partial / METADATA).read_bytes()), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    opened = open_or_reason(partial, files=False)  # the metadata was computed from the files' tables
    if isinstance(opened, str):
        raise CheckpointError(
            f"the checkpoint in {partial} is incomplete: {opened}", "all machines must write to one shared folder"
        )
    sync(partial)
    target = final_of(partial)
    before = target.with_name(f"{target.name}{_REPLACED}")
    if target.exists():
        shutil.rmtree(before, ignore_errors=True)
        target.rename(before)
    partial.rename(target)
    sync(target.parent)
    shutil.rmtree(before, ignore_errors=True)
    if keep is not None:
        _remove_old(target, keep)
    return target


def _remove_old(newest: Path, keep: int) -> None:
    """Remove checkpoints before ``newest`` except the last ``keep - 1``, and incomplete ones."""
    newest_key = _sort_key(newest)
    earlier = [path for path in _steps(newest.parent) if _sort_key(path) < newest_key]
    for path in earlier[keep - 1 :]:
        with contextlib.suppress(OSError):  # rename first: a kill during the removal must not leave a ``step-N``
            path.rename(path.with_name(f"{path.name}{_REMOVED}"))
    for ending in (PARTIAL, _REMOVED):
        for path in newest.parent.glob(f"step-[0-9]*{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading ----------------------------------------------------------------------------------------------------------


def has_any(folder: Path) -> bool:
    """Return whether a folder is a complete checkpoint or contains one."""
    return _is_checkpoint(folder) or bool(_steps(folder))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / FACTS).is_file()


def newest(folder: Path) -> tuple[StoredCheckpoint, str]:
    """Return the checkpoint ``folder``, or the newest complete one in it, and a message about skipped ones.

    Raises ``CheckpointError`` if there is none.
    """
    if _is_checkpoint(folder):
        opened = open_or_reason(folder)
        if isinstance(opened, str):
            raise CheckpointError(f"the checkpoint {folder} is damaged: {opened}", "load an earlier one")
        return opened, ""
    skipped = [f"{path.name} (its save did not finish)" for path in folder.glob(f"step-*{PARTIAL}")]
    for path in _steps(folder):
        opened = open_or_reason(path)
        if isinstance(opened, StoredCheckpoint):
            return opened, f"loading {path}; skipped {', '.join(skipped)}" if skipped else ""
        skipped.append(f"{path.name} ({opened})")
    why = f": {', '.join(skipped)}" if skipped else ""
    raise CheckpointError(f"{folder} has no complete checkpoint{why}", "give the folder that checkpoints were saved to")


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that have their final names, newest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=_sort_key, reverse=True)


def _sort_key(path: Path) -> tuple[int, bool]:
    found = _STEP.fullmatch(path.name)
    assert found is not None
    return int(found[1]), found[2] is None


def open_or_reason(path: Path, files: bool = True) -> StoredCheckpoint | str:
    """Return the checkpoint, or the reason why it is incomplete or damaged. Without ``files`` the tensors' files are not checked."""
    for name in (FACTS, METADATA):
        if not (path / name).is_file():
            return f"it has no {name}"
    try:
        facts = json.loads((path / FACTS).read_text())
        content = (path / METADATA).read_bytes()
        form = facts.get("format")
        if form not in (FORMAT, _WITHOUT_CHECKSUMS):
            return f"its format is {form}, and this program reads {_WITHOUT_CHECKSUMS} and {FORMAT}"
        if form == FORMAT and facts["checksum"] != _checksum(facts):
            return f"its {FACTS} does not match its checksum"
        if form == FORMAT and facts["metadata"] != _size_and_crc32(content):
            return f"its {METADATA} does not have the checksum in {FACTS}"
        metadata = _Unpickler(BytesIO(content)).load()
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except Exception as error:  # noqa: BLE001  whatever is wrong with these files
        return f"its {FACTS} or {METADATA} cannot be read: {error}"
    for name, end in sorted(ends.items()) if files else ():
        file_path = path / name
        if Path(name).name != name:
            return f"its {METADATA} names the file {name} in another folder"
        size = file_path.stat().st_size if file_path.is_file() else None
        if size is None or size < end:
            return f"its file {name} is missing" if size is None else f"its file {name} ends {end - size} bytes early"
        if form == _WITHOUT_CHECKSUMS and has_table(file_path):
            return f"its file {name} has checksums, but its {FACTS} has format {_WITHOUT_CHECKSUMS}, which has none"
    if form == FORMAT and files:
        try:
            tables_of(path, sorted(ends), facts["save"])
        except (DamageError, OSError) as error:
            return f"its file {error}"
    return StoredCheckpoint(path, facts, metadata, facts["save"] if form == FORMAT else None)


def _sealed(facts: Mapping[str, Any], metadata: bytes) -> dict[str, Any]:
    """Return the facts with the checksums of torch's metadata and of themselves."""
    plain: dict[str, Any] = json.loads(json.dumps({**facts, "metadata": _size_and_crc32(metadata)}))
    return plain | {"checksum": _checksum(plain)}


def _size_and_crc32(metadata: bytes) -> dict[str, int]:
    return {"bytes": len(metadata), "crc32": zlib.crc32(metadata)}


def _checksum(facts: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the facts as JSON, without the checksum itself."""
    content = {name: value for name, value in facts.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class _Unpickler(pickle.Unpickler):
    """Unpickles torch's metadata: refuses all classes and functions except metadata records, sizes and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "torch.distributed.checkpoint.metadata": None,
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "torch": ("Size", *(key for key, value in vars(torch).items() if isinstance(value, torch.dtype))),
        }
        if module in allowed and "." not in name:
            found = super().find_class(module, name)
            names = allowed[module]
            if name in names if names is not None else getattr(found, "__module__", None) == module:
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed")


# -- the lock on a folder --------------------------------------------------------------------------------------------

LOCK = ".lock"
PARENT = "AUTOPAR_CLAIM"
"""The environment variable in which a process passes its lock (``FolderLock.inherited``) to the processes that it starts."""

_LOCKED_HINT = "give another folder, or end that training"


class FolderLock:
    """The lock on ``folder`` for writing checkpoints, held until this object is closed or freed. ``token`` identifies it."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n{self.token}\n".encode(), 0)
        self._file = os.fdopen(descriptor, "r+b")  # last: after an error the caller closes the descriptor
        _locks[folder.resolve()] = self

    @property
    def inherited(self) -> str:
        """The value of ``PARENT`` for the processes that this one starts."""
        return f"{self.token} {self.folder.resolve()}"

    def check(self) -> None:
        """Raise ``CheckpointError`` if the lock file was removed or replaced: other programs would lock the new file."""
        if not _is_at(self._file.fileno(), self.folder / LOCK):
            raise _lock_lost(self.folder)

    def close(self, remove: bool = False) -> None:
        """Release the lock; ``remove`` also removes the file."""
        if remove and _is_at(self._file.fileno(), self.folder / LOCK):
            (self.folder / LOCK).unlink()
        _locks.pop(self.folder.resolve(), None)
        self._file.close()


_locks: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()
"""The locks that this process has."""


def lock_folder(folder: Path, timeout_s: float) -> FolderLock:
    """Lock ``folder`` against other programs' checkpoints; it is created if it is missing.

    Wait up to ``timeout_s`` seconds for another program's lock: a training that is being stopped may still be writing. A file system
    without locks counts as locked. Raises ``CheckpointError`` if the folder isn't writable, ``.lock`` is a link, or the lock stays taken.
    """
    deadline = time.monotonic() + timeout_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(8)}"  # try to create a folder, as a save does
        probe.mkdir()
        probe.rmdir()
        while True:
            descriptor = _opened(folder / LOCK)
            try:
                locked = _try_lock(descriptor)
                if locked and _is_at(descriptor, folder / LOCK):
                    return FolderLock(folder, descriptor)
                if not locked and time.monotonic() >= deadline:
                    owner = os.pread(descriptor, 4096, 0).decode(errors="replace").partition("\n")[0]
                    raise CheckpointError(f"another training writes checkpoints into {folder} ({owner})", _LOCKED_HINT)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the file was replaced, or another program has the lock
            if not locked:
                time.sleep(min(0.2, timeout_s))
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror}",
            "give a folder that can be made and written to",
        ) from error


def lock_for_save(folder: Path) -> FolderLock | None:
    """Make sure that a save has the lock: return ``None`` if this process or its parent has it, otherwise a new lock.

    Raises ``CheckpointError`` if another program has the lock, or the lock file was replaced.
    """
    own = _locks.get(folder.resolve())
    if own is not None:
        own.check()
        return None
    token, _, locked_folder = os.environ.get(PARENT, "").partition(" ")
    if locked_folder != str(folder.resolve()):
        return lock_folder(folder, 0.0)
    try:
        descriptor = _opened(folder / LOCK, create=False)
    except FileNotFoundError as error:
        raise _lock_lost(folder) from error
    try:
        if token not in os.pread(descriptor, 4096, 0).decode(errors="replace").split("\n"):
            raise _lock_lost(folder)
    finally:
        os.close(descriptor)
    return None


def _lock_lost(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder / LOCK} was removed or replaced after this training had locked it",
        "another training may write there: give another folder, or start this one again with --resume",
    )


def _opened(path: Path, create: bool = True) -> int:
    """Open a lock file. Raises ``CheckpointError`` if it is a link or not a regular file, because opening it would change the target."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise _not_a_regular_file(path) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise _not_a_regular_file(path)
    return descriptor


def _not_a_regular_file(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a link or not a regular file", "remove it, or give another folder")


def _try_lock(descriptor: int) -> bool:
    """Try to take the lock. Return whether it was taken, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the file at ``path`` is the one open as ``descriptor``; a symlink at ``path`` isn't followed."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


# -- errors -----------------------------------------------------------------------------------------------------------

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explained(error: BaseException, folder: Path, writing: bool, partially_loaded: bool = False) -> CheckpointError:
    """Convert any error to a ``CheckpointError``; ``partially_loaded`` says that a part of the training state may have been overwritten."""
    if isinstance(error, CheckpointError):
        return error
    system = _system_error(error)
    text = f"{type(error).__name__}: {error}".splitlines()[0] if system is None else str(system)
    if not writing:
        hint = "load another one" + (
            " before training continues: some parameters have been replaced" if partially_loaded else ""
        )
        return CheckpointError(f"the checkpoint {folder} could not be read: {text}", hint, partially_loaded)
    kept = "the training state and earlier checkpoints are unchanged"
    if system is not None and system.errno in _FULL:
        return CheckpointError(f"there is no room for a checkpoint in {folder.parent}: {text}", f"{kept}; make room")
    return CheckpointError(f"the checkpoint could not be written to {folder}: {text}", f"{kept}; try another folder")


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the first ``OSError`` among an error and its causes, or ``None``."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
