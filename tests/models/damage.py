"""Damaged checkpoints: what disks, interrupted copies and mixed-up folders make of one, drawn from a seed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from autopar.program.box_files import _FOOTER, has_table

Damage = Callable[[Path, Path, random.Random], str]
"""Changes the checkpoint in a folder, by what another checkpoint of the same model has; says what was changed."""


def damaged(step: Path, other: Path, kind: str, seed: int) -> str:
    """Damage the checkpoint ``step`` in place; ``other`` is another checkpoint of the same program. Says what was done."""
    return KINDS[kind](step, other, random.Random(f"{kind} {seed}"))


def as_format_1(step: Path, facts_alone: bool = False) -> Path:
    """Make a checkpoint of the format without checksums, as it was written before."""
    facts = json.loads((step / "checkpoint.json").read_text())
    for name in ("save", "metadata", "checksum"):
        del facts[name]
    (step / "checkpoint.json").write_text(json.dumps({**facts, "format": 1}, indent=1) + "\n")
    for file in () if facts_alone else _files(step):
        content = file.read_bytes()
        _, begin, _, _ = _FOOTER.unpack(content[-_FOOTER.size :])
        file.write_bytes(content[:begin])
        assert not has_table(file)
    return step


def _files(step: Path) -> list[Path]:
    return sorted(step.glob("*.distcp"))


def _flip(path: Path, rng: random.Random, low: int = 0, high: int | None = None) -> str:
    content = bytearray(path.read_bytes())
    at = rng.randrange(low, len(content) if high is None else high)
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"bit of byte {at} of {path.name}"


def _flip_values(step: Path, other: Path, rng: random.Random) -> str:
    """In the bytes of the boxes."""
    file = rng.choice(_files(step))
    _, begin, _, _ = _FOOTER.unpack(file.read_bytes()[-_FOOTER.size :])
    return _flip(file, rng, 0, begin)


def _flip_table(step: Path, other: Path, rng: random.Random) -> str:
    file = rng.choice(_files(step))
    _, begin, _, _ = _FOOTER.unpack(file.read_bytes()[-_FOOTER.size :])
    return _flip(file, rng, begin)


def _flip_metadata(step: Path, other: Path, rng: random.Random) -> str:
    return _flip(step / ".metadata", rng)


def _flip_facts(step: Path, other: Path, rng: random.Random) -> str:
    """Of a character that means something: spaces between JSON's values do not."""
    content = (step / "checkpoint.json").read_bytes()
    places = [at for at, byte in enumerate(content) if byte not in b" \n"]
    return _flip(step / "checkpoint.json", rng, at := rng.choice(places), at + 1)


def _truncate(step: Path, other: Path, rng: random.Random) -> str:
    file = rng.choice([*_files(step), step / ".metadata", step / "checkpoint.json"])
    left = rng.randrange(file.stat().st_size - 1)  # without its last line break JSON is whole
    file.write_bytes(file.read_bytes()[:left])
    return f"{file.name} has its first {left} bytes"


def _zeros(step: Path, other: Path, rng: random.Random) -> str:
    """What a machine that loses power leaves of a file whose length is on the disk."""
    file = rng.choice([*_files(step), step / ".metadata"])
    content = file.read_bytes()
    begin = rng.randrange(len(content) // 2)
    file.write_bytes(content[:begin] + bytes(len(content) - begin))
    return f"{file.name} has zeros from {begin} on"


def _extended(step: Path, other: Path, rng: random.Random) -> str:
    file = rng.choice(_files(step))
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 200)))
    return f"{file.name} has more bytes"


def _missing(step: Path, other: Path, rng: random.Random) -> str:
    file = rng.choice([*_files(step), step / ".metadata", step / "checkpoint.json"])
    file.unlink()
    return f"{file.name} is missing"


def _of_another_step(step: Path, other: Path, rng: random.Random) -> str:
    file = rng.choice([*_files(step), step / ".metadata", step / "checkpoint.json"])
    shutil.copy(other / file.name, file)
    return f"{file.name} is of another step"


def _swapped_files(step: Path, other: Path, rng: random.Random) -> str:
    one, two = rng.sample(_files(step), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return f"{one.name} and {two.name} are swapped"


def _renamed(step: Path, other: Path, rng: random.Random) -> str:
    file = rng.choice(_files(step))
    file.rename(step / f"__{rng.randrange(2, 9)}_0.distcp")
    return f"{file.name} has another name"


def _swapped_boxes(step: Path, other: Path, rng: random.Random) -> str:
    """The values of two boxes of one size, with all else as it was."""
    file = rng.choice(_files(step))
    content = bytearray(file.read_bytes())
    _, begin, length, _ = _FOOTER.unpack(content[-_FOOTER.size :])
    regions = json.loads(content[begin : begin + length])["regions"]
    sizes: dict[int, list[int]] = {}
    for first, size, *_ in regions:
        sizes.setdefault(size, []).append(first)
    size, firsts = rng.choice([(size, firsts) for size, firsts in sizes.items() if len(firsts) > 1])
    one, two = rng.sample(firsts, 2)
    content[one : one + size], content[two : two + size] = content[two : two + size], content[one : one + size]
    file.write_bytes(content)
    return f"boxes at {one} and {two} of {file.name} are swapped"


def _other_boxes(step: Path, other: Path, rng: random.Random) -> str:
    """A file's boxes are those of another step, its table is its own."""
    file = rng.choice(_files(step))
    content, theirs = file.read_bytes(), (other / file.name).read_bytes()
    _, begin, _, _ = _FOOTER.unpack(content[-_FOOTER.size :])
    file.write_bytes(theirs[:begin] + content[begin:])
    return f"the boxes of {file.name} are of another step"


KINDS: dict[str, Damage] = {
    "a bit of values": _flip_values,
    "a bit of a table": _flip_table,
    "a bit of the metadata": _flip_metadata,
    "a bit of the facts": _flip_facts,
    "truncated": _truncate,
    "zeros": _zeros,
    "longer": _extended,
    "missing": _missing,
    "of another step": _of_another_step,
    "swapped files": _swapped_files,
    "renamed": _renamed,
    "swapped boxes": _swapped_boxes,
    "other boxes": _other_boxes,
}
