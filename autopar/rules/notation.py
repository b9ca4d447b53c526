"""The notation of sharding rules: one einsum-like line per op.

A line names the dims of every tensor operand (optional ones come last) and of the result, and so defines how one mesh axis may shard the
op::

    * k, n k, +n -> * n                      aten.linear
    m k, k n -> m n ; linear 0 1             aten.mm
    v d, * -> * d ; v = masked_embedding     aten.embedding
    b (g=2 r=4) l e!, b g s! e!, b g s! v! -> b (g r) l v!

========= ==========================================================================================================
``a``     a dim, named by a letter or a word. An axis that shards it shards it in all tensors; if the result lacks it, it is summed over
``*``     any number of dims; those of several operands are aligned from the right, as in broadcasting
``a!``    a dim that may not be sharded (one mark fixes the letter everywhere)
``a~``    a dim that could be sharded with a halo exchange, which no kernel does yet: like ``a!``
``(a b)`` a product of dims, outermost first; only the outermost letter of size above one may be sharded. ``a=3`` gives a size
``1``     a dim without a letter: never sharded. A dim of size one never has a letter, whatever the line says: it is broadcast
``+n``    an operand that is added to the result: if the result is a partial sum, the operand must be one, too
``; v = kernel`` or ``; v = kernel -> I``  sharding ``v`` replaces the op by this kernel (result without ``v``: ``P``, or the given type)
``; t+e = kernel``  sharding both letters on one axis, each tensor along the letter that it has, replaces the op by this kernel
``; linear 0 1`` the op is linear in operand 0, and in operand 1 (in each together with ``+`` operands); ``; linear 0+1`` in both jointly
========= ==========================================================================================================
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.types import P, SpmdType

_TOKEN = re.compile(r"\s*(?:(?P<atom>[A-Za-z]\w*)(?:=(?P<size>\d+))?(?P<mark>[!~]?)|(?P<sign>[()*1]))")


@dataclass(frozen=True, slots=True)
class Atom:
    """One occurrence of a letter in a line; ``size`` if the line states it; ``fixed``: the letter may not be sharded."""

    letter: str
    size: int | None = None
    fixed: bool = False


Dim = tuple[Atom, ...]
"""The factors of a dim, outermost first; empty for a dim without a letter."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The dims of an operand or of the result; ``star`` is the index in ``dims`` where those of ``*`` are inserted, if any."""

    dims: tuple[Dim, ...]
    star: int | None = None
    additive: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that replaces the op if certain letters are sharded, and the result's type if the result lacks these letters."""

    name: str
    result: SpmdType = P


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed rule. ``kernels``: pairs of letter (or ``"t+e"``) and kernel; the op is linear in each group of operands in ``linear``."""

    text: str
    operands: tuple[Operand, ...]
    result: Operand
    kernels: tuple[tuple[str, Kernel], ...] = ()
    linear: tuple[frozenset[int], ...] = ()


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Line:
    """Parse a line. Raises ``RuleError``, which quotes the invalid part."""
    body, *clauses = (part.strip() for part in text.split(";"))
    left, arrow, right = body.partition("->")
    if not arrow:
        raise RuleError(f"the rule {text!r} has no '->'", hint="write 'operands -> result', as in '* k, n k -> * n'")
    operands = tuple(_parse_operand(part, text) for part in left.split(",")) if left.strip() else ()
    kernels: list[tuple[str, Kernel]] = []
    linear: tuple[frozenset[int], ...] = ()
    for clause in clauses:
        if clause.startswith("linear"):
            linear = _parse_linear(clause, operands, text)
        elif match := re.fullmatch(r"(\w+(?:\+\w+)?)\s*=\s*(\w+)(?:\s*->\s*(\S+))?", clause):
            kernels.append((match[1], Kernel(match[2], SpmdType.parse(match[3]) if match[3] else P)))
        else:
            raise RuleError(
                f"the rule {text!r} has the clause {clause!r}, which gives neither a kernel nor linear operands",
                hint="a clause is 'letter = kernel', 'letter = kernel -> type', 'linear 0 1' or 'linear 0+1'",
            )
    return Line(text, operands, _parse_operand(right, text), tuple(kernels), linear)


def _parse_linear(clause: str, operands: tuple[Operand, ...], text: str) -> tuple[frozenset[int], ...]:
    groups = clause.split()[1:]
    if not all(re.fullmatch(r"\d+(\+\d+)*", group) for group in groups):
        raise RuleError(
            f"the rule {text!r} has the clause {clause!r}; clauses refer to operands by number, as in 'linear 0 1'"
        )
    additive = {i for i, operand in enumerate(operands) if operand.additive}
    return tuple(frozenset(int(i) for i in group.split("+")) | additive for group in groups)


def _parse_operand(part: str, text: str) -> Operand:
    part = part.strip()
    additive = part.startswith("+")
    part = part.removeprefix("+")
    dims: list[Dim] = []
    star: int | None = None
    product: list[Atom] | None = None
    position = 0
    while part[position:].strip():
        match = _TOKEN.match(part, position)
        if match is None:
            raise RuleError(f"the rule {text!r} does not parse at {part[position:].strip()!r}")
        position = match.end()
        if match["atom"]:
            atom = Atom(match["atom"], int(match["size"]) if match["size"] else None, bool(match["mark"]))
            if product is None:
                dims.append((atom,))
            else:
                product.append(atom)
            continue
        sign = match["sign"]
        if sign == "(" and product is None:
            product = []
        elif sign == ")" and product is not None:
            dims.append(tuple(product))
            product = None
        elif sign == "1" and product is None:
            dims.append(())
        elif sign == "*" and product is None and star is None:
            star = len(dims)
        else:
            raise RuleError(f"the rule {text!r} has a misplaced {sign!r} in {part!r}")
    if product is not None:
        raise RuleError(f"the rule {text!r} has an unclosed '(' in {part!r}")
    return Operand(tuple(dims), star, additive)
