"""Splits einsums into einsums of at most two operands, with a letter for every dim instead of ``...``."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from autopar.ops.operands import argument, shape_of
from passes.clean.nodes import add, aten, calls, replace


def einsum_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``einsum("...i,ij,jk->...k", [x, a, b])`` becomes ``einsum("Ai,ij->Aj", [x, a])`` and ``einsum("jk,Aj->Ak", [b, .])``.

    The order is torch's: the ``path`` of the op, which ``torch.einsum`` computes if opt_einsum is installed, otherwise the first two
    operands until one is left. Each product becomes the last operand of the next einsum.
    """
    for node in calls(gm, aten.einsum.default):
        tensors: list[fx.Node] = list(argument(node, 1, "tensors"))
        *terms, result = letters(argument(node, 0, "equation"), [len(shape_of(tensor)) for tensor in tensors])
        path: Any = node.kwargs.get("path") or (0, 1) * (len(tensors) - 1)
        pairs: Iterator[int] = iter(path)
        while len(tensors) > 2:
            first, second = sorted((next(pairs), next(pairs)))
            b, a = (terms.pop(second), tensors.pop(second)), (terms.pop(first), tensors.pop(first))
            read = {*result, *"".join(terms)}
            term = "".join(letter for letter in dict.fromkeys(a[0] + b[0]) if letter in read)
            terms.append(term)
            tensors.append(add(node, aten.einsum.default, (f"{a[0]},{b[0]}->{term}", [a[1], b[1]])))
        replace(node, add(node, aten.einsum.default, (f"{','.join(terms)}->{result}", tensors)))
    return gm


def letters(equation: str, ranks: Sequence[int]) -> list[str]:
    """Return the terms of the operands (``ranks`` are their numbers of dims) and the result's term, with letters in place of ``...``."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [letter for letter in string.ascii_uppercase + string.ascii_lowercase if letter not in equation]
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    lead = "".join(free[: max((count for term, count in zip(terms, hidden, strict=True) if "..." in term), default=0)])
    if not arrow:
        flat = left.replace(",", "").replace("...", "")
        right = "..." + "".join(sorted(letter for letter in set(flat) if flat.count(letter) == 1))
    found = [term.replace("...", lead[len(lead) - count :]) for term, count in zip(terms, hidden, strict=True)]
    return [*found, right.replace("...", lead)]
