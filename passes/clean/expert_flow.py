"""Recognises the flow of data of a mixture of experts around the experts themselves.

Every form of it sorts the router's choices by expert (a permutation ``perm`` of the ``t * k`` choices), picks the row of each choice's
token (``perm // k``), and weights what the experts make of the rows with the choices' weights. Then each token's results are summed:

* transformers restores the order of the choices by the inverse permutation, and sums over a token's choices;
* torchtitan adds the rows to their tokens by a ``scatter_add``, or restores the order of the choices and multiplies by the weights in a
  batched product.

Each step is followed back to the permutation, so that what is recognised is equal to the mixture for every batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.operands import args_of, argument, arguments, dtype_of, shape_of
from passes.clean.nodes import add, aten, replace

_RESHAPES = (aten.reshape.default, aten.view.default, aten.unsqueeze.default)
_CASTS = (aten.to.dtype, aten.type_as.default)
ENDS = (aten.sum.dim_IntList, aten.bmm.default, aten.scatter_add.default, aten.index_add.default)


@dataclass(frozen=True, slots=True)
class Region:
    """The parts of a mixture: its tokens, the router's choices and their weights (``[t, k]``, or reshaped), the picked rows, the body's
    result, the choices sorted by expert, and the nodes that count the rows of each expert."""

    x: fx.Node
    index: fx.Node
    weights: fx.Node
    rows: frozenset[fx.Node]  # equal nodes
    result: fx.Node
    ids: frozenset[fx.Node]  # equal nodes
    counts: tuple[fx.Node, ...]  # equal nodes, before the cumulative sum
    weights_first: bool = False  # ``rows`` are the picked rows, weighted

    @property
    def experts(self) -> int:
        return shape_of(self.counts[0])[0]


@dataclass(frozen=True, slots=True)
class _End:
    """How the results are summed: ``value`` has a row for each choice in the order ``perm``, which ``weights`` weight (``None``: they are
    already weighted) before the ``choices`` of each of the ``tokens`` are summed."""

    perm: fx.Node
    value: fx.Node
    tokens: int
    choices: int
    weights: fx.Node | None = None


def find_region(node: fx.Node) -> Region | None:
    """Return the mixture whose results are summed by ``node``, one of ``ENDS``; else ``None``."""
    end = _added(node) if node.target in ENDS[2:] else _multiplied(node) if node.target is ENDS[1] else _summed(node)
    if end is None:
        return None
    if end.weights is not None:
        return _completed(node, end, end.weights, end.value)
    product = _uncast(end.value)
    result, weights = _weighted(product, end)
    if result is not None:
        return _completed(node, end, weights, result)
    return _completed(node, end, None, product) if isinstance(product, fx.Node) else None


def _weighted(product: object, end: _End) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the rows and the choices' weights if ``product`` is ``rows * weights[perm]``; else ``None`` twice."""
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return None, None
    for rows, factor in (args_of(product)[:2], args_of(product)[1::-1]):
        if not isinstance(factor, fx.Node) or shape_of(factor) != (end.tokens * end.choices, 1):
            continue
        picked = _as_call(_uncast(_flattened(factor)), aten.index.Tensor)
        if picked is not None and _only_index(picked) is end.perm and isinstance(rows, fx.Node):
            return rows, args_of(picked)[0]
    return None, None


def put_in_place(node: fx.Node, new: fx.Node) -> None:
    """Let ``new``, the mixture of tokens ``[t, h]``, replace ``node``, which summed its results."""
    if node.target in ENDS[2:]:
        new = add(node, aten.add.Tensor, (args_of(node)[0], new))
    elif node.target is aten.bmm.default:
        new = add(node, aten.unsqueeze.default, (new, 1))
    if dtype_of(new) != dtype_of(node):  # the cast back to the tokens' dtype is part of the op
        (node,) = node.users
    replace(node, new)


# -- the end of the flow -----------------------------------------------------------------------------------------------


def _summed(node: fx.Node) -> _End | None:
    """``sum(restored, 1)`` or ``sum(restored * weights, 1)``, with the restored rows as ``[t, k, h]``."""
    if list(argument(node, 1, "dim") or ()) != [1] or argument(node, 2, "keepdim", False):
        return None
    per_token = _uncast(args_of(node)[0])
    if not isinstance(per_token, fx.Node) or len(shape_of(per_token)) != 3:
        return None
    product = _as_call(per_token, aten.mul.Tensor)
    if product is None:
        return _restored(per_token)
    for restored, weights in (args_of(product)[:2], args_of(product)[1::-1]):
        if isinstance(weights, fx.Node) and shape_of(weights) == (*shape_of(per_token)[:2], 1):
            return _restored(restored, weights)
    return None


def _multiplied(node: fx.Node) -> _End | None:
    """``bmm(weights, restored)``, of ``[t, 1, k]`` and ``[t, k, h]``."""
    weights, restored = args_of(node)
    return _restored(restored, weights) if shape_of(weights)[1] == 1 else None


def _restored(per_token: fx.Node, weights: fx.Node | None = None) -> _End | None:
    """Return the end whose rows are put back into the order of the choices: ``value[inverse]``, or ``empty[perm] = value``."""
    tokens, choices, width = shape_of(per_token)
    rows = _flattened(_uncast(per_token))
    if not isinstance(rows, fx.Node) or shape_of(rows) != (tokens * choices, width):
        return None
    if rows.target is aten.index.Tensor:
        value, perm = args_of(rows)[0], _inverted(_only_index(rows))
    elif rows.target is aten.index_put.default and len(rows.args) < 4 and not rows.kwargs:
        value, perm = args_of(rows)[2], _only_index(rows)
    else:
        return None
    if perm is None or shape_of(perm) != (tokens * choices,) or shape_of(value) != shape_of(rows):
        return None
    return _End(perm, value, tokens, choices, weights)


def _inverted(inverse: fx.Node | None) -> fx.Node | None:
    """Return the permutation whose inverse this is: ``inverse[perm] = arange(n)``, or ``argsort(perm)``."""
    written = _as_call(inverse, aten.index_put.default)
    if written is None:
        return _sorted_by(inverse)
    perm = _only_index(written)
    whole = perm is not None and len(shape_of(perm)) == 1 and shape_of(written) == shape_of(perm)
    return perm if whole and perm is not None and _is_arange(args_of(written)[2], shape_of(perm)[0]) else None


def _added(node: fx.Node) -> _End | None:
    """``scatter_add(base, 0, token, value)`` or ``index_add(base, 0, token, value)``."""
    base, dim, places, value = args_of(node)[:4]
    if dim != 0 or len(node.args) > 4 or node.kwargs or len(shape_of(base)) != 2:
        return None
    scattered = node.target is aten.scatter_add.default
    if shape_of(value)[1:] != shape_of(base)[1:] or (scattered and shape_of(places) != shape_of(value)):
        return None
    token = _token(places, expanded=scattered)
    rows, tokens = shape_of(value)[0], shape_of(base)[0]
    if token is None or rows % tokens or args_of(token)[1] != rows // tokens or shape_of(token) != (rows,):
        return None
    perm = args_of(token)[0]
    return _End(perm, value, tokens, rows // tokens) if isinstance(perm, fx.Node) else None


def _token(node: object, *, expanded: bool) -> fx.Node | None:
    """Return ``perm // k`` if ``node`` is that; with ``expanded``, if ``node`` repeats it along a row's width."""
    if expanded:
        node = _as_call(node, aten.expand.default)
        node = node and args_of(node)[0]
        if not isinstance(node, fx.Node) or shape_of(node)[1:] != (1,):
            return None
    node = _flattened(node)
    if not isinstance(node, fx.Node) or op_name(node) not in ("aten.floor_divide", "aten.div"):
        return None
    # of numbers that are not negative
    whole = op_name(node) == "aten.floor_divide" or arguments(node).get("rounding_mode") in ("trunc", "floor")
    return node if whole and isinstance(args_of(node)[1], int) else None


# -- from the permutation to the rest ------------------------------------------------------------------------------------


def _completed(node: fx.Node, end: _End, weights: fx.Node | None, result: fx.Node) -> Region | None:
    """Return the region, completed from the permutation that sorts the choices; ``None`` if it is no mixture."""
    chosen = (end.tokens, end.choices)
    index, rows = _shaped(_sorted_by(end.perm), chosen), _picked(end)
    if index is None or not rows:
        return None
    x, weights_first = args_of(rows[0])[0], weights is None
    rows = [n for n in rows if args_of(n)[0] is x]
    if weights_first:
        weighted = [(user, *_weighted(user, end)) for n in rows for user in _readers(n, *_CASTS)]
        weights = next((w for _, picked, w in weighted if picked is not None), None)
        rows = [n for n, picked, w in weighted if _uncast(picked) in rows and w is weights]
        rows = [cast for n in rows for cast in (n, *n.users) if cast is n or cast.target in _CASTS]
        rows = [n for n in rows if dtype_of(n) == dtype_of(x)]
    weights = _shaped(weights, chosen)
    same = _same_values(index, end.perm)
    counts = tuple(user for n in same for user in n.users if op_name(user) == "aten.histc" and _counts_all(user))
    counts += tuple(_sums_of_choices(index))
    if weights is None or not rows or len({shape_of(n) for n in counts}) != 1:
        return None
    if len(shape_of(x)) != 2 or shape_of(x)[0] != end.tokens or not _keeps_dtype(node, x):
        return None
    if shape_of(end.value)[1:] != shape_of(x)[1:]:
        return None
    ids = frozenset(n for n in same if _is_sorted(n, end.perm))
    return Region(x, index, weights, frozenset(rows), result, ids, counts, weights_first)


def _keeps_dtype(node: fx.Node, x: fx.Node) -> bool:
    """Return whether the sum has the tokens' dtype, or its only reader casts it to that."""
    if dtype_of(node) == dtype_of(x):
        return True
    cast = list(node.users)
    return (
        node.target not in ENDS[2:]
        and len(cast) == 1
        and op_name(cast[0]) == "aten.to"
        and dtype_of(cast[0]) == dtype_of(x)
    )


def _picked(end: _End) -> list[fx.Node]:
    """Return the nodes that pick the row of each choice's token, in the order of the permutation: ``x[perm // k]`` or a gather."""
    found = []
    for token in end.perm.users:
        if _token(token, expanded=False) is not token or args_of(token)[1] != end.choices:
            continue
        found += [user for user in _readers(token, aten.expand.default, *_RESHAPES) if _picks(user, token)]
    return found


def _picks(node: fx.Node, token: fx.Node) -> bool:
    """Return whether the node is ``x[token]`` for a matrix ``x``."""
    if node.target is aten.index.Tensor:
        return _only_index(node) is token and len(shape_of(node)) == 2
    if node.target not in (aten.index_select.default, aten.gather.default) or args_of(node)[1] != 0:
        return False
    if node.target is aten.index_select.default:
        return args_of(node)[2] is token
    whole = len(node.args) == 3 and shape_of(node)[1:] == shape_of(args_of(node)[0])[1:]
    return whole and _token(args_of(node)[2], expanded=True) is token


def _readers(node: fx.Node, *through: Callable[..., object]) -> Iterator[fx.Node]:
    """Yield the readers of a node, and of calls of ``through`` on it."""
    for user in node.users:
        yield user
        if user.target in through:
            yield from _readers(user, *through)


def _same_values(index: fx.Node, perm: fx.Node) -> list[fx.Node]:
    """Return the choices and the nodes with the same numbers: flattened, sorted or cast."""
    found, sort = [index], args_of(perm)[0]
    for node in found:
        found += [
            user
            for user in node.users
            if user not in found
            and (user is sort or user.target in _RESHAPES or _is_sorted(user, perm) or _is_cast_number(user))
        ]
    return found


def _is_cast_number(node: fx.Node) -> bool:
    return facts(node).kind is OpKind.CAST and dtype_of(node) != torch.bool


def _is_sorted(node: fx.Node, perm: fx.Node) -> bool:
    """Return whether the node has the choices in the order of the permutation: the other result of the sort, or ``choices[perm]``."""
    if node.target is operator.getitem and perm.target is operator.getitem:
        return args_of(node) == (args_of(perm)[0], 0)
    if node.target is not aten.index.Tensor or _only_index(node) is not perm:
        return False
    return not dtype_of(node).is_floating_point and _flattened(args_of(node)[0]) is _flattened(_sorted_by(perm))


def _sorted_by(perm: object) -> fx.Node | None:
    """Return what a permutation sorts, in ascending order."""
    order = _as_call(perm, operator.getitem)
    if order is not None:
        sort = _as_call(args_of(order)[0], aten.sort.default, aten.sort.stable) if args_of(order)[1] == 1 else None
    else:
        sort = _as_call(perm, aten.argsort.default, aten.argsort.stable)
    if sort is None or arguments(sort).get("descending") or len(shape_of(args_of(sort)[0])) != 1:
        return None
    source: fx.Node = args_of(sort)[0]
    return source


# -- small questions -----------------------------------------------------------------------------------------------------


def _as_call(node: object, *targets: Callable[..., object]) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.target in targets else None


def _flattened(node: object) -> object:
    """Return what a node was before it was reshaped."""
    while isinstance(node, fx.Node) and node.target in _RESHAPES:
        node = args_of(node)[0]
    return node


def _shaped(node: object, sizes: tuple[int, int]) -> fx.Node | None:
    """Return what a node was when it had these sizes, before it was reshaped, or the node itself; ``None`` if it has other elements."""
    source = node
    while isinstance(source, fx.Node) and source.target in _RESHAPES and shape_of(source) != sizes:
        source = args_of(source)[0]
    if isinstance(source, fx.Node) and shape_of(source) == sizes:
        return source
    return node if isinstance(node, fx.Node) and prod(shape_of(node)) == prod(sizes) else None


def _uncast(node: object) -> object:
    """Return what a node was before a cast between floating dtypes: it only rounds."""
    while isinstance(node, fx.Node) and facts(node).kind is OpKind.CAST and dtype_of(node).is_floating_point:
        source = args_of(node)[0]
        if not dtype_of(source).is_floating_point:
            break
        node = source
    return node


def _only_index(node: fx.Node) -> fx.Node | None:
    """Return the index ``i`` if ``node`` reads or writes ``x[i]``; ``None`` if it has several indices or a mask."""
    indices = args_of(node)[1]
    found = indices[0] if len(indices) == 1 else None
    return found if isinstance(found, fx.Node) and dtype_of(found) != torch.bool else None


def _is_arange(node: object, extent: int) -> bool:
    """Return whether ``node`` is ``arange(extent)``, in any form of its arguments."""
    if not isinstance(node, fx.Node) or op_name(node) != "aten.arange":
        return False
    return [a for a in node.args if isinstance(a, int)] in ([extent], [0, extent], [0, extent, 1])


def _counts_all(node: fx.Node) -> bool:
    """Return whether a histogram of integers has a bin for each of 0, 1, ..., bins - 1."""
    bins, low, high = (argument(node, i + 1, name) for i, name in enumerate(("bins", "min", "max")))
    return low == 0 and high in (bins - 1, bins)


def _sums_of_choices(index: fx.Node) -> Iterator[fx.Node]:
    """Yield the sums over tokens of ``zeros.scatter(1, index, 1)``, where ``index`` are the choices of a top-k: no token has one twice."""
    if chosen_among(index) is None:
        return
    for node in index.users:
        zeros, *rest = args_of(node)[:4] if node.target is aten.scatter.value else (None,)
        if not isinstance(zeros, fx.Node) or rest != [1, index, 1] or op_name(zeros) != "aten.zeros":
            continue
        for user in _readers(node, *_CASTS):
            if user.target is aten.sum.dim_IntList and list(args_of(user)[1]) == [0] and len(shape_of(user)) == 1:
                yield user


def chosen_among(index: fx.Node) -> int | None:
    """Return how many entries of the last dim the choices ``index`` of a top-k were made among; ``None`` if ``index`` has none. Each choice
    is a number below it, and no row has one twice."""
    if index.target is not operator.getitem or args_of(index)[0].target is not aten.topk.default:
        return None
    scores, last = args_of(args_of(index)[0])[0], len(shape_of(index)) - 1
    if args_of(index)[1] != 1 or argument(args_of(index)[0], 2, "dim", -1) not in (-1, last):
        return None
    return shape_of(scores)[last]


def counts_behind(offsets: object) -> fx.Node | None:
    """Return the counts whose cumulative sum the offsets of a grouped product are."""
    total = _through_casts(offsets)
    if not isinstance(total, fx.Node) or op_name(total) != "aten.cumsum" or argument(total, 1, "dim") not in (0, -1):
        return None
    found = _through_casts(args_of(total)[0])
    return found if isinstance(found, fx.Node) else None


def _through_casts(node: object) -> object:
    while isinstance(node, fx.Node) and facts(node).kind is OpKind.CAST:
        node = args_of(node)[0]
    return node
