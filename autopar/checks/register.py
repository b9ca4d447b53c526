"""Registers a user's sharding rule for an op, checked by execution."""

from __future__ import annotations

import re
from typing import Any

import torch

from autopar.checks.rules import RuleReport, Sample, check
from autopar.errors import RuleError
from autopar.rules.notation import Operand, parse
from autopar.rules.table import TABLE

_SIZES = (6, 12)
"""Sizes of letters in a generated call, in turn: divisible by 2 and 3; swapping letters of different sizes changes a shape."""


def register_rule(op: str, line: str, *arguments: Any, **keywords: Any) -> RuleReport:
    """Add a sharding rule for ``op`` (``"mylib::op"`` or ``"mylib::op.overload"``), after executing it on 2 and 3 shards.

    ``line`` is in the notation of ``autopar.rules.notation``, one operand per tensor argument. The op is called with float64 operands
    generated from the line (sizes 6 and 12); pass ``arguments`` (and ``keywords``) if it needs numbers, integers or other sizes. Shardings
    of dims that aren't divisible by 2 (or 3) are not executed on 2 (or 3) shards. The rule applies to all overloads of the op, which must
    be in ``torch.ops``, and support backward if its result requires a gradient.

    Returns a report of the executions. Raises ``RuleError`` and leaves the table unchanged if the op is unknown, the line is invalid, the
    call fails, or a shard's result or gradient differs from the unsharded op's.
    """
    parsed = parse(line)
    target = _target(op)
    key = op.partition(".")[0].replace("::", ".")
    sample = Sample(target, arguments or _operands(parsed.operands), keywords)
    previous = TABLE.get(key)
    TABLE[key] = line
    try:
        return check(sample)
    except RuntimeError as error:
        _restore(key, previous)
        raise RuleError(
            f"{op}: the call that checks its rule failed: {error}", hint="pass the arguments to call it with"
        ) from error
    except BaseException:
        _restore(key, previous)
        raise


def _restore(key: str, previous: Any) -> None:
    if previous is None:
        del TABLE[key]
    else:
        TABLE[key] = previous


def _target(op: str) -> Any:
    match = re.fullmatch(r"(\w+)::(\w+)(?:\.(\w+))?", op)
    if match is None:
        raise RuleError(f"{op!r} is not the name of an op", hint="write 'namespace::op', as torch.ops has it")
    try:
        return getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3] or "default")
    except AttributeError as error:
        raise RuleError(f"torch.ops has no {op!r}", hint="import the library that defines it first") from error


def _operands(operands: tuple[Operand, ...]) -> tuple[torch.Tensor, ...]:
    """Return float64 tensors with the shapes of a line's operands, drawn from a normal distribution; ``*`` becomes one dim."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[str, int] = {"*": 6}
    for operand in operands:
        for dim in operand.dims:
            for atom in dim:
                sizes.setdefault(atom.letter, atom.size or _SIZES[len(sizes) % len(_SIZES)])
    tensors = []
    for operand in operands:
        shape = [_extent(dim, sizes) for dim in operand.dims]
        if operand.star is not None:
            shape.insert(operand.star, sizes["*"])
        tensors.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return tuple(tensors)


def _extent(dim: tuple[Any, ...], sizes: dict[str, int]) -> int:
    extent = 1
    for atom in dim:
        extent *= sizes[atom.letter]
    return extent
