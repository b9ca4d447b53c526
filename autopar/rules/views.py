"""Writes the lines (sharding rules) of ops whose dims depend on shapes and arguments: views, reductions, concatenation, indexing.

A function of a node returns its line, or ``None`` if it has none. Its docstring names the ops, then the dims that may (not) be sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count
from math import gcd
from typing import Any

import torch
from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, dtype_of, operands, shape_of

Words = list[str]


def letters(ndim: int) -> Words:
    """Return a letter for every dim: a, b, c, ..."""
    assert ndim <= 26, ndim
    return [chr(ord("a") + i) for i in range(ndim)]


def line(operand_words: Sequence[Words], result: Words, *clauses: str) -> str:
    """Return the text of a line. Operands and result have one word (such as a letter) for each dim. ``clauses`` name the kernel of a letter
    (``v = masked_embedding``), or the operands in which the op is linear (``linear 0 1``), through which partial sums pass."""
    if list(operand_words) == [[]]:  # a single 0-d operand, which an empty text would not name
        operand_words, result = [["*"]], ["*", *result]
    return " ; ".join([", ".join(" ".join(words) for words in operand_words) + " -> " + " ".join(result), *clauses])


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """Normalise a ``dim`` argument: ``None`` or ``[]`` means all dims, an int means one, and negative numbers count from the end."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return tuple(range(ndim))
    chosen = value if isinstance(value, list | tuple) else (value,)
    return tuple(int(dim) % max(ndim, 1) for dim in chosen)


def source(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the first tensor operand."""
    return shape_of(operands(node)[0])


def unsharded(words: Words, dims: Sequence[int]) -> Words:
    """Return the words with ``!`` on ``dims``."""
    return [word + "!" if i in dims else word for i, word in enumerate(words)]


# -- views -----------------------------------------------------------------------------------------------------------


def view(node: fx.Node) -> str | None:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: the factors that dims of both shapes share (``factors``)."""
    if "dtype" in arguments(node):  # the same bits as other numbers, which the type checker does not know
        return None
    left, right = factors(source(node), shape_of(node))
    return line([left, *(["1"] * len(shape_of(other)) for other in operands(node)[1:])], right, "linear 0")


def factors(before: Sequence[int], after: Sequence[int]) -> tuple[Words, Words]:
    """Return the words of both sides of a reshape from ``before`` to ``after``.

    Dims are consumed from the left. Each step makes a letter of the greatest common divisor of the two current dims: the outermost factor
    of both. If the divisor is 1, no letter may be sharded up to the next boundary that both sides share.
    """
    if 0 in before:  # without elements there is nothing to shard
        return ["1"] * len(before), ["1"] * len(after)
    atoms: tuple[list[Words], list[Words]] = ([[] for _ in before], [[] for _ in after])
    open_dims = (
        [[i, size] for i, size in enumerate(before) if size != 1],
        [[i, size] for i, size in enumerate(after) if size != 1],
    )
    number = count()

    def take(side: int, factor: int, letter: str, mark: str = "") -> None:
        index, rest = open_dims[side][0]
        atoms[side][index].append(f"{letter}={factor}{mark}")
        open_dims[side][0][1] = rest // factor
        if rest == factor:
            open_dims[side].pop(0)

    while open_dims[0] and open_dims[1]:
        shared = gcd(open_dims[0][0][1], open_dims[1][0][1])
        if shared > 1:
            letter = f"d{next(number)}"
            take(0, shared, letter)
            take(1, shared, letter)
            continue
        products = [1, 1]  # products of the sizes consumed on either side since the last common boundary
        while products[0] != products[1] or products[0] == 1:
            side = 0 if products[0] <= products[1] else 1
            factor = open_dims[side][0][1]
            products[side] *= factor
            take(side, factor, f"d{next(number)}", "!")
    words = [[word[0] if len(word) == 1 else f"({' '.join(word)})" if word else "1" for word in side] for side in atoms]
    return words[0], words[1]


def expand(node: fx.Node) -> str:
    """expand, broadcast_to: a dim that grows from size 1 has a letter only in the result; each rank creates its slice of it."""
    before, after = source(node), shape_of(node)
    right = letters(len(after))
    left = right[len(after) - len(before) :]
    return line([left, *(["1"] * len(shape_of(other)) for other in operands(node)[1:])], right, "linear 0")


def permute(node: fx.Node) -> str:
    """permute, transpose, t: the same letters in another order."""
    words = letters(len(source(node)))
    given = arguments(node)
    order = list(range(len(words)))
    if "dims" in given:
        order = list(dims_of(given["dims"], len(words)))
    else:
        first, second = (dims_of(given.get(f"dim{i}", i), len(words))[0] for i in (0, 1))
        if len(words) > 1:
            order[first], order[second] = order[second], order[first]
    return line([words], [words[i] for i in order], "linear 0")


def select(node: fx.Node) -> str:
    """select: the selected dim disappears, and may not be sharded."""
    words = letters(len(source(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    return line([unsharded(words, [dim])], words[:dim] + words[dim + 1 :])


def slice_(node: fx.Node) -> str:
    """slice: the sliced dim may not be sharded unless the slice covers all of it."""
    before, after = source(node), shape_of(node)
    given = arguments(node)
    dim = dims_of(given["dim"], len(before))[0]
    words = letters(len(before))
    left = words if before[dim] == after[dim] else [w if i != dim else "1" for i, w in enumerate(words)]
    right = words if before[dim] == after[dim] else left
    return line([left], right)


def same_but(*positions: str) -> Callable[[fx.Node], str]:
    """softmax, cumsum, flip, sort, split, ...: all dims but those along which the op works.

    ``positions`` has the names of the arguments that give these dims.
    """

    def build(node: fx.Node) -> str:
        words = letters(len(source(node)))
        given = arguments(node)
        dims = [dim for name in positions for dim in dims_of(given[name], len(words))]
        return line(
            [["1" if i in dims else w for i, w in enumerate(words)]],
            ["1" if i in dims else w for i, w in enumerate(words)],
        )

    return build


def unbind(node: fx.Node) -> str:
    """unbind: the unbound dim disappears, and may not be sharded."""
    words = letters(len(source(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    return line([unsharded(words, [dim])], words[:dim] + words[dim + 1 :])


def getitem(node: fx.Node) -> str | None:
    """getitem of a tuple of tensors: the element has the tuple's type, which shards no dim whose size differs between elements."""
    parts = meta(operands(node)[0])["val"]
    if not isinstance(parts, tuple | list):
        return None
    words = letters(len(shape_of(node)))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if any(part.dim() != len(words) for part in tensors):
        return None
    sizes = [{part.shape[i] for part in tensors} for i in range(len(words))]
    words = [word if len(size) == 1 else "1" for word, size in zip(words, sizes, strict=True)]
    return line([words], words, "linear 0")


def cat(node: fx.Node) -> str:
    """cat: all dims but the concatenated one; partial sums pass through if every part is one."""
    linear = "linear " + "+".join(str(i) for i in range(len(operands(node))))
    parts = [shape_of(part) for part in operands(node)]
    words = letters(len(shape_of(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    words[dim] = "1"
    # torch.cat skips one-dimensional empty parts, whatever the others' number of dims
    given = [words if len(part) == len(words) else ["1"] for part in parts]
    return line(given, words, linear)


def stack(node: fx.Node) -> str:
    """stack: the new dim may not be sharded."""
    parts = operands(node)
    words = letters(len(shape_of(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    inner = words[:dim] + words[dim + 1 :]
    return line([inner] * len(parts), unsharded(words, [dim]), "linear " + "+".join(str(i) for i in range(len(parts))))


def pad(node: fx.Node) -> str:
    """pad, constant_pad_nd: padded dims may not be sharded, not even one that keeps its size because it is cut on the other side."""
    dims, amounts = len(source(node)), arguments(node)["pad"]  # pairs, starting with the last dim
    padded = {dims - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    words = ["1" if dim in padded else word for dim, word in enumerate(letters(dims))]
    return line([words], words)


def repeat_interleave(node: fx.Node) -> str | None:
    """repeat_interleave by a number along a dim: the dim becomes (a r); the letter r, the number of repetitions, may not be sharded."""
    given = arguments(node)
    if not isinstance(given.get("repeats"), int) or given.get("dim") is None:
        return None
    words = letters(len(source(node)))
    dim = dims_of(given["dim"], len(words))[0]
    right = list(words)
    right[dim] = f"({words[dim]} r={given['repeats']}!)"
    return line([words], right)


def repeat(node: fx.Node) -> str:
    """repeat: dims that are not repeated."""
    before, after = source(node), shape_of(node)
    words = letters(len(after))
    grown = len(after) - len(before)
    kept = [i >= grown and before[i - grown] == after[i] for i in range(len(after))]
    right = [w if keep else "1" for w, keep in zip(words, kept, strict=True)]
    return line([right[grown:]], right)


# -- reductions ------------------------------------------------------------------------------------------------------


def reduction(linear: bool) -> Callable[[fx.Node], str | None]:
    """Reductions over ``dim``: a linear one may be sharded over the reduced dims, too, and then gives a partial sum."""

    def build(node: fx.Node) -> str | None:
        if len(operands(node)) > 1:  # max(x, y)
            return "*, * -> *"
        words = letters(len(source(node)))
        given = arguments(node)
        dims = dims_of(given.get("dim"), len(words))
        kept = len(shape_of(node)) == len(words)
        right = [("1" if i in dims else w) for i, w in enumerate(words) if kept or i not in dims]
        return line([words if linear else unsharded(words, dims)], right, *(["linear 0"] if linear else []))

    return build


def logsumexp(node: fx.Node) -> str:
    """logsumexp: like any reduction; with ``keepdim``, the reduced dim and all after it may not be sharded, because torch's sharding
    propagation for ``DTensor`` moves their shards to wrong dims."""
    text = reduction(linear=False)(node)
    assert text is not None
    given = arguments(node)
    ndim = len(source(node))
    if not given["keepdim"]:
        return text
    first = min(dims_of(given["dim"], ndim))
    words = letters(ndim)[:first] + ["1"] * (ndim - first)
    return line([words], words)


# -- products --------------------------------------------------------------------------------------------------------


def matmul(node: fx.Node) -> str:
    """matmul: the line depends on the operands' numbers of dims. An operand may lack a batch dim, or have it with size 1."""
    left, right = (shape_of(operand) for operand in operands(node))
    text = {
        (True, True): "k, k -> ",
        (True, False): "k, * k n -> * n",
        (False, True): "* m k, k -> * m",
        (False, False): "* m k, * k n -> * m n",
    }[len(left) == 1, len(right) == 1]
    return text + " ; linear 0 1"


def einsum(node: fx.Node) -> str | None:
    """einsum: the equation is the line, if each letter appears once per operand and there is no ellipsis."""
    equation = str(arguments(node)["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if "." in equation or any(len(set(part)) != len(part) for part in parts):
        return None
    if not arrow:
        flat = left.replace(",", "")
        right = "".join(sorted(letter for letter in set(flat) if flat.count(letter) == 1))
    return line([list(p) for p in parts], list(right), "linear " + " ".join(str(i) for i in range(len(parts))))


def attention(node: fx.Node) -> str:
    """scaled_dot_product_attention: batch, heads (in groups if there are fewer key heads), and queries if neither a causal mask nor
    dropout depends on their positions."""
    given = arguments(node)
    query, key = shape_of(given["query"]), shape_of(given["key"])
    lead = len(query) - 3
    batch = [f"b{i}" for i in range(lead)]
    row = "l" if not given["is_causal"] and not given["dropout_p"] else "l!"
    head, key_head = ["h"], ["h"]
    if lead < 1:
        batch, head, key_head = [], ["b"] if len(query) == 3 else [], ["b"] if len(query) == 3 else []
    elif given.get("enable_gqa") and query[-3] != key[-3]:
        head, key_head = [f"(h={key[-3]} r={query[-3] // key[-3]})"], [f"h={key[-3]}"]
    dims = [
        [*batch, *head, row, "e!"],
        [*batch, *key_head, "s!", "e!"],
        [*batch, *key_head, "s!", "v!"],
    ]
    mask = given.get("attn_mask")
    if isinstance(mask, fx.Node):
        all_dims = [*batch, *head, row, "s!"]
        dims.append(all_dims[len(all_dims) - len(shape_of(mask)) :])
    return line(dims, [*batch, *head, row, "v!"])


def diff(node: fx.Node) -> str:
    """diff: all dims but the one along which differences are taken, also of the tensors that are prepended and appended."""
    words = letters(len(source(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    words[dim] = "1"
    return line([words] * len(operands(node)), words)


def ring_attention(node: fx.Node) -> str | None:
    """scaled_dot_product_attention with the sequence sharded in query, key and value: keys and values go around a ring."""
    given = arguments(node)
    query, key, value = (shape_of(given[name]) for name in ("query", "key", "value"))
    if len(query) < 3 or query[-2] != key[-2] or not query[:-3] == key[:-3] == value[:-3]:
        return None
    rest = [f"{name}!" for name in letters(len(query) - 3)]
    heads = f"(h={key[-3]}! r={query[-3] // key[-3]}!)" if query[-3] != key[-3] else "h!"
    key_heads = "h!"
    dims = [[*rest, heads, "t", "x!"], [*rest, key_heads, "t", "x!"], [*rest, key_heads, "t", "y!"]]
    mask = given.get("attn_mask")
    if isinstance(mask, fx.Node):
        all_dims = [*rest, heads, "t", "z!"]
        dims.append(all_dims[len(all_dims) - len(shape_of(mask)) :])
    return line(dims, [*rest, heads, "t", "y!"], "t = ring_attention")


# -- normalisation, losses, convolution ------------------------------------------------------------------------------


def layer_norm(node: fx.Node) -> str:
    """layer_norm, rms_norm: all dims but the normalised ones, which are those of weight and bias."""
    normalised = [f"d{i}!" for i in range(len(arguments(node)["normalized_shape"]))]
    return line([["*", *normalised], *([normalised] * (len(operands(node)) - 1))], ["*", *normalised])


def group_norm(node: fx.Node) -> str:
    """group_norm: examples only, because channels and positions are normalised together."""
    words = letters(len(source(node)))
    words = words[:1] + [w + "!" for w in words[1:]]
    return line([words, *([words[1]] for _ in operands(node)[1:])], words)


def statistics(kernel: str) -> Callable[[fx.Node], str]:
    """batch_statistics, step_statistics: channels, also of the running statistics; along the other dims a kernel combines the statistics
    of the shards."""

    def build(node: fx.Node) -> str:
        words = letters(len(source(node)))
        clauses = [f"{word} = {kernel} -> I" for i, word in enumerate(words) if i != 1]
        return line([words, *([words[1]] for _ in operands(node)[1:])], ["1", words[1]], *clauses)

    return build


def normalise(node: fx.Node) -> str:
    """normalise: all dims; the other operands have one element per channel."""
    words = letters(len(source(node)))
    return line([words, *([words[1]] for _ in operands(node)[1:])], words)


def local_batch_norm(node: fx.Node) -> str:
    """local_batch_norm: channels; and examples, with a kernel that normalises each shard by its statistics."""
    words = unsharded(letters(len(source(node))), range(2, len(source(node))))
    return line([words, *([words[1]] for _ in operands(node)[1:])], words, f"{words[0]} = local_batch_norm")


def convolution(node: fx.Node) -> str:
    """conv1d/2d/3d: examples; with one group also output channels, and input channels, which are summed over."""
    given = arguments(node)
    places = [f"p{i}" for i in range(len(source(node)) - 2)]
    window = [f"w{i}!" for i in range(len(places))]
    if given.get("groups", 1) != 1:
        dims = [["n", "c!", *(["1"] * len(places))], ["1", "1", *window], ["1"]]
        return line(dims[: len(operands(node))], ["n", *(["1"] * (len(places) + 1))])
    text = line([["n", "c", *(["1"] * len(places))], ["o", "c", *window]], ["n", "o", *(["1"] * len(places))])
    if isinstance(given.get("bias"), fx.Node):
        text = text.replace(" ->", ", +o ->")
    return text


def transposed_convolution(node: fx.Node) -> str:
    """conv_transpose: examples only, because the type checker takes the weight's first dim for the output channels, as in a convolution."""
    rest = ["1"] * (len(source(node)) - 1)
    dims = [["n", *rest], ["1", *rest], ["1"]]
    return line(dims[: len(operands(node))], ["n", *rest])


def recurrent(node: fx.Node) -> str:
    """recurrent: examples; time, widths and gates may not be sharded."""
    given = arguments(node)
    states = [["1", "b", "1"] for _ in given["states"]]
    weights = [["1"] * len(shape_of(weight)) for weight in given["weights"]]
    return line([["b", "1", "1"], *states, *weights], ["b", "1", "1"])


def pixel_shuffle(node: fx.Node) -> str:
    """pixel_shuffle, pixel_unshuffle: all dims but the last three."""
    count = len(source(node)) - 3
    lead = letters(count)
    return line([[*lead, "1", "1", "1"]], [*lead, "1", "1", "1"])


def pool(node: fx.Node) -> str:
    """Pools, interpolation: examples and channels."""
    before, after = source(node), shape_of(node)
    places = int(re.search(r"([123])d", op_name(node))[1])  # type: ignore[index]
    lead = letters(len(before) - places)
    return line([[*lead, *["1"] * places]], [*lead, *["1"] * (len(after) - len(lead))])


def cross_entropy(node: fx.Node) -> str | None:
    """cross_entropy_loss, nll_loss: all dims but the classes (dim 1), unless the reduction is a mean.

    A mean divides by the number of labels that are not ignored, which no rank knows by itself: none of its letters may be sharded.
    """
    given = arguments(node)
    logits = shape_of(operands(node)[0])
    reduction = given["reduction"]
    words = letters(len(logits))
    if len(words) == 1:
        return None
    if reduction == 1:
        words = [w + "!" for w in words]
    words[1] += "" if words[1].endswith("!") else "!"
    target = operands(node)[1]
    labels = words if dtype_of(target).is_floating_point else words[:1] + words[2:]
    rest = [[words[1]] for _ in operands(node)[2:]]
    return line([words, labels, *rest], words[:1] + words[2:] if reduction == 0 else [])


def pointwise_loss(node: fx.Node) -> str:
    """mse_loss, kl_div, ...: all dims; a reduced loss is a partial sum. Weights align with the last dims."""
    if arguments(node)["reduction"] == 0:
        return line([["*"]] * len(operands(node)), ["*"])
    words = letters(max(len(shape_of(operand)) for operand in operands(node)))
    return line([words[len(words) - len(shape_of(operand)) :] for operand in operands(node)], [])


def cell(node: fx.Node) -> str:
    """rnn_tanh_cell, rnn_relu_cell, gru_cell, lstm_cell: examples; features and gates may not be sharded."""
    batch = ["b"] if len(source(node)) == 2 else []
    states = 2 if "lstm" in op_name(node) else 1
    biases = len(operands(node)) - 3 - states
    weights = [["g!", "i!"], ["g!", "h!"], *([["g!"]] * biases)]
    return line([[*batch, "i!"], *([[*batch, "h!"]] * states), *weights], [*batch, "h!"])


# -- indexing --------------------------------------------------------------------------------------------------------


def embedding(node: fx.Node) -> str:
    """embedding: all dims; sharding the vocabulary uses the masked kernel."""
    return "v d, * -> * d ; v = masked_embedding"


def index(node: fx.Node) -> str | None:
    """x[:, i, j]: dims without an index, and the dims of the indices, which broadcast; there is no line for masks or separated indices."""
    given = arguments(node)
    indices = list(given["indices"])
    indices += [None] * (len(source(node)) - len(indices))
    used = [i for i, item in enumerate(indices) if item is not None]
    nodes = [indices[i] for i in used]
    if not used or used != list(range(used[0], used[-1] + 1)):
        return None
    if any(dtype_of(item) in (torch.bool, torch.uint8) for item in nodes):
        return None
    words = letters(len(indices))
    ranks = [len(shape_of(item)) for item in nodes]
    inner = [f"i{k}" for k in range(max(ranks))]
    result = words[: used[0]] + inner + words[used[-1] + 1 :]
    operand = ["1" if i in used else w for i, w in enumerate(words)]
    return line([operand, *(inner[len(inner) - rank :] for rank in ranks)], result)


def index_select(node: fx.Node) -> str:
    """index_select: all dims but the one that is indexed, and the indices."""
    words = letters(len(source(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    return line(
        [["1" if i == dim else w for i, w in enumerate(words)], ["i"]],
        [w if i != dim else "i" for i, w in enumerate(words)],
    )


def gather(node: fx.Node) -> str | None:
    """gather, scatter: all dims, except ``dim``, in which the index (and the written value, if it is a tensor) has the operand's size."""
    sizes = [shape_of(operand) for operand in operands(node)]
    if len({len(shape) for shape in sizes}) > 1:
        return None  # torch takes a 0-d tensor for one of a single element
    dim = dims_of(arguments(node)["dim"], len(sizes[0]))[0]
    words = [
        "1" if i == dim or len(set(n)) > 1 else w
        for i, (w, *n) in enumerate(zip(letters(len(sizes[0])), *sizes, strict=True))
    ]
    return line([words] * len(sizes), words)


def one_hot(node: fx.Node) -> str | None:
    """one_hot with an explicit number of classes: all dims but the classes."""
    if int(arguments(node)["num_classes"]) < 0:
        return None
    words = letters(len(source(node)))
    return line([words], [*words, "1"])


def of_rows(node: fx.Node) -> str:
    """kernels_experts.of_rows: the values' dims after the experts; neither experts nor rows."""
    words = letters(len(source(node)))
    return line([unsharded(words, [0]), ["1"] * len(shape_of(operands(node)[1])), ["1"]], ["1", *words[1:]], "linear 0")


def elementwise(*linear: str) -> Callable[[fx.Node], str]:
    """Elementwise ops: all dims of any number of operands, which broadcast.

    ``linear`` has the clause for two tensors, then the one for a tensor and a number.
    """

    def build(node: fx.Node) -> str:
        number = len(operands(node))
        clause = linear[:1] if number == 2 else linear[1:2]
        if arguments(node).get("alpha", 1) != 1:  # the type checker does not know that the op is linear with alpha
            clause = ()
        return line([["*"]] * number, ["*"], *(c for c in clause if c))

    return build


def division(node: fx.Node) -> str:
    """div: linear in the dividend, unless it rounds."""
    rounds = arguments(node).get("rounding_mode") is not None
    both = isinstance(arguments(node)["self"], fx.Node)
    return elementwise(*([] if rounds or not both else ["linear 0", "linear 0"]))(node)


def sum_of_losses(node: fx.Node) -> str:
    """kernels.cross_entropy_sum: examples and positions, which give partial sums; sharding the vocabulary uses the vocabulary-parallel
    kernel, which takes no class weights.
    """
    if arguments(node)["weight"] is not None:
        return "* v!, *, v! -> "
    return "* v, * -> ; v = vocab_parallel_cross_entropy_sum -> I"


def new_tensor(node: fx.Node) -> str:
    """new_zeros, new_ones, ...: no dim; the op reads nothing but the operand's dtype."""
    return line([["1"] * len(source(node))], ["1"] * len(shape_of(node)))


def addmm(node: fx.Node) -> str:
    """addmm, baddbmm: all dims; the added operand broadcasts, and must be a partial sum if the product is one."""
    batch = ["b"] if len(shape_of(node)) == 3 else []
    given = [*batch, "m", "n"]
    added = given[len(given) - len(source(node)) :]
    return f"+{' '.join(added)}, {' '.join([*batch, 'm', 'k'])}, {' '.join([*batch, 'k', 'n'])} -> {' '.join(given)}"


def glu(node: fx.Node) -> str:
    """glu: all dims but the one that is split into two."""
    words = letters(len(source(node)))
    dim = dims_of(arguments(node)["dim"], len(words))[0]
    words[dim] = "1"
    return line([words], words)


def movedim(node: fx.Node) -> str:
    """movedim: all dims, in the order of the result."""
    words = letters(len(source(node)))
    given = arguments(node)
    moved = dict(zip(dims_of(given["destination"], len(words)), dims_of(given["source"], len(words)), strict=True))
    rest = iter(i for i in range(len(words)) if i not in moved.values())
    return line([words], [words[moved[i]] if i in moved else words[next(rest)] for i in range(len(words))])


def never_sharded(node: fx.Node) -> str:
    """Ops whose leading dims could be sharded, but never are, because the type checker does not know the ops."""
    words = ["1"] * len(source(node))
    return line([words], words)
