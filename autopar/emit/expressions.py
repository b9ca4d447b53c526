"""Emits one call of a graph as idiomatic Python: ``F.linear(x, w)``, ``x.transpose(1, 2)``, ``a + b``.

An op without a familiar notation is written as ``torch.ops.aten.name.overload(...)``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import program
from autopar.emit.names import CALLED, quoted
from autopar.ops.experts import Experts
from autopar.ops.facts import OpKind, facts, is_custom, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import arguments
from autopar.program import kernels_norm
from autopar.torch_private import overload_schema
from autopar.types import SpmdType
from passes.collectives import convert, share
from passes.joined import converted_types, is_joined
from passes.localise_layer import random_seed, scale

ATOM, UNARY, PRODUCT, SUM, COMPARE = 4, 3, 2, 1, 0  # operator precedences
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Text:
    """An expression and its operator precedence."""

    text: str
    binds: int = ATOM

    def within(self, binds: int) -> str:
        """Return the text as an operand of an operator with precedence ``binds``."""
        return self.text if self.binds >= binds else f"({self.text})"


Texts = Mapping[fx.Node, Text]

_FUNCTIONAL = frozenset(
    """linear silu gelu relu relu6 elu leaky_relu mish softplus hardswish hardsigmoid layer_norm group_norm rms_norm embedding
    scaled_dot_product_attention conv1d conv2d conv_transpose2d softmax log_softmax logsigmoid pad glu one_hot
    max_pool2d avg_pool2d adaptive_avg_pool2d cross_entropy""".split()  # noqa: SIM905  a list of words
)
_TORCH = frozenset(
    """rsqrt sqrt exp log tanh sigmoid abs sin cos pow cat stack matmul bmm mm addmm where cumsum minimum maximum erf square
    clamp amax amin var einsum topk sort gather scatter flip roll cumprod logsumexp logical_not""".split()  # noqa: SIM905  a list of words
)
_METHODS = frozenset(
    """transpose permute view reshape unsqueeze squeeze expand contiguous t clone detach flatten
    masked_fill""".split()  # noqa: SIM905  a list of words
)
_INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}


def literal(value: Any, texts: Texts) -> str:
    """Return the text of an argument: a node's expression, a custom op, a plain value, or a list, tuple or dict of these."""
    if isinstance(value, fx.Node):
        return texts[value].text
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(item, texts) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if is_custom(value):
        return _qualified(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k, texts)}: {literal(v, texts)}" for k, v in value.items()) + "}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str):
        return quoted(value)
    assert value is None or isinstance(value, (bool, int, float)), value
    return repr(value)


def module_input(node: fx.Node) -> fx.Node:
    """Return the argument of torch's module for a product, norm or embedding: the operand that isn't a parameter."""
    found = arguments(node)["indices" if op_name(node) == "aten.embedding" else "input"]
    assert isinstance(found, fx.Node), node.format_node()
    return found


def kernel_module(node: fx.Node) -> str | None:
    """Return the runtime module whose function the node calls; ``None`` for torch's functions."""
    package, _, module = str(getattr(node.target, "__module__", "")).rpartition(".")
    return module if package == program.__name__ else None


def expression(node: fx.Node, texts: Texts) -> Text:
    """Return the node's call, with its operands as in ``texts``. If ``meta["caller"]`` names a function, that function makes the call."""
    if node.target is convert:
        return Text(_conversion(node, texts))
    text = _call(node, texts)
    caller = meta(node).get("caller", "")
    if not caller or is_joined(node):
        return text
    function, _, arguments = text.text.partition("(")
    return Text(_called(function, arguments.removesuffix(")"), caller))


def _call(node: fx.Node, texts: Texts) -> Text:
    if (path := meta(node).get("module")) is not None:
        return Text(f"self.{path}({texts[module_input(node)].text})")
    if node.target is share:
        return Text(f"{texts[_operand(node)].within(PRODUCT)} / {node.args[1]}", PRODUCT)
    if node.target is scale:
        return Text(f"{texts[_operand(node)].within(PRODUCT)} * {literal(node.args[1], texts)}", PRODUCT)
    if node.target is random_seed:
        number, axes = node.args
        return Text(f"kernels.seed(key, self.number, {number}, {literal(axes, texts)})")
    if node.target is operator.getitem:
        return Text(f"{texts[_operand(node)].within(ATOM)}[{literal(node.args[1], texts)}]")
    if isinstance(node.target, Experts):
        call, given = experts_call(node, texts)
        return Text(f"{call}({', '.join(given)})")
    if is_joined(node):
        call, given = joined_call(node, texts)
        return Text(f"{call}({', '.join(given)})")
    module = kernel_module(node)
    if module is not None:
        assert module in CALLED, module
        mode = ", training=self.training" if node.target in kernels_norm.WITH_MODE else ""
        return Text(f"{module}.{getattr(node.target, '__name__', '')}({_call_arguments(node, texts)}{mode})")
    name = op_name(node)
    if name.startswith("autopar.opaque_"):
        return Text(_opaque(node, name, texts))
    assert name.startswith("aten.") or "." in name, name
    form = _familiar(node, name.removeprefix("aten."), texts) if name.startswith("aten.") else None
    return form if form is not None else Text(f"{_qualified(node.target)}({_call_arguments(node, texts)})")


def experts_call(node: fx.Node, texts: Texts) -> tuple[str, list[str]]:
    """Return the function and the arguments of the call of a mixture of experts, whose body is the layer's method ``meta["body"]``."""
    op = node.target
    assert isinstance(op, Experts) and not meta(node).get("caller"), node.format_node()
    *tokens, parameters = *(literal(arg, texts) for arg in node.args[:3]), list(node.args[3:])
    experts = f"{literal(parameters, texts)}, self.{meta(node)['body']}, {op.count}"
    rest = [f"{key}={literal(value, texts)}" for key, value in node.kwargs.items()]
    rest += ["weights_first=True"] if op.weights_first else []
    rest += ["dispatch=kernels_fp8.TILED_ROWS"] if op.fp8_dispatch else []
    rest += [f"send={meta(node)['kernel_send']}"] if meta(node).get("kernel_send") else []
    given = [", ".join(part) for part in (tokens, [experts], rest) if part]
    if send := meta(node).get("kernel_async_op"):
        return "yield from kernels_experts.in_steps", [send, f"({given[0]})", *given[1:]]
    return "kernels_experts.experts", given


def joined_call(node: fx.Node, texts: Texts) -> tuple[str, list[str]]:
    """Return the function and the arguments of a joined call: products that convert their input themselves (``passes.joined``)."""
    _, axes, source = converted_types(node)
    options = [f"axis={literal(axes[0] if len(axes) == 1 else axes, {})}", f"src=spmd.{source}"]
    options += ["return_input=True"] if node.kwargs.get("return_input") else []
    function = f"{kernel_module(node)}.{getattr(node.target, '__name__', '')}"
    given = [*(literal(arg, texts) for arg in node.args), ", ".join(options)]
    caller = meta(node).get("caller", "")
    return (caller, [function, *given]) if caller else (function, given)


def _called(function: str, arguments: str, caller: str) -> str:
    """Return the call of a function, made by ``caller`` if there is one."""
    return f"{caller}({function}, {arguments})" if caller else f"{function}({arguments})"


def _operand(node: fx.Node) -> fx.Node:
    """Return the first argument, which must be a node."""
    first = node.args[0]
    assert isinstance(first, fx.Node), node.format_node()
    return first


def _qualified(target: Any) -> str:
    """Return an op overload as text: ``torch.ops.aten.silu.default``."""
    return f"torch.ops.{target}"


def _call_arguments(node: fx.Node, texts: Texts) -> str:
    parts = [literal(arg, texts) for arg in node.args]
    parts += [f"{key}={literal(value, texts)}" for key, value in node.kwargs.items()]
    return ", ".join(parts)


def _opaque(node: fx.Node, name: str, texts: Texts) -> str:
    """Return the call of an opaque module, whose unsharded results have the captured shapes."""
    inputs, tensors = (literal(arg, texts) for arg in node.args)
    value = meta(node)["val"]
    if isinstance(value, torch.Tensor):
        return f"opaque.call({quoted(name)}, {inputs}, {tensors}, {tuple(value.shape)}, {value.dtype})"
    results = ", ".join(f"({tuple(each.shape)}, {each.dtype})" for each in value)
    return f"opaque.call_all({quoted(name)}, {inputs}, {tensors}, [{results}])"


def _conversion(node: fx.Node, texts: Texts) -> str:
    """Return the ``spmd_types`` call of a conversion."""
    value, axes, source, target = node.args
    assert isinstance(value, fx.Node) and isinstance(axes, (list, tuple))
    dtype = meta(value)["val"].dtype if meta(value)["gradient"] else None
    text = texts[value].text
    if str(source) == "P" and _strided(value):
        text = f"{texts[value].within(ATOM)}.contiguous()"  # required by all-reduce
    caller = meta(node).get("caller", "")
    return conversion_text(text, tuple(map(str, axes)), str(source), str(target), dtype, caller)


def _strided(value: fx.Node) -> bool:
    """Return whether the value may be non-contiguous at run time: a view, or a result with its operands' layout, which may differ from
    the captured one."""
    op = facts(value)
    laid_out_like_operands = op.kind in (OpKind.CONVOLUTION, OpKind.TRANSPOSED_CONVOLUTION, OpKind.EINSUM)
    return op.is_strided or laid_out_like_operands or not meta(value)["val"].is_contiguous()


_REDUCES_BACKWARD = frozenset(("IR", "SR", "PR"))
_ALL_REDUCES_BACKWARD = frozenset(("IR", "PR"))


def conversion_text(
    value: str, axes: tuple[str, ...], source: str, target: str, dtype: torch.dtype | None, caller: str = ""
) -> str:
    """Return the call that converts ``value``: of ``spmd_types`` on one axis, of ``flattened`` on several. ``dtype`` is the value's
    dtype, or ``None`` if no gradient flows through it; ``caller`` is a function that makes the call, if any.

    Gradients in 16 bits are reduced in 16 bits, like activations and as in Megatron; ``spmd_types`` requires an explicit argument for it.
    """
    kinds = SpmdType.parse(source).kind + SpmdType.parse(target).kind
    call = {
        "PI": "all_reduce",
        "PR": "all_reduce",
        "PS": "reduce_scatter",
        "SR": "all_gather",
        "SI": "all_gather",
        "SS": "all_to_all",
    }.get(kinds, "convert")
    expert = ", expert_mode=True" if kinds in ("RI", "IP", "RP") else ""
    reduced = dtype in (torch.bfloat16, torch.float16) and kinds in _REDUCES_BACKWARD
    options = f', backward_options={{"op_dtype": {dtype}}}' if reduced else ""
    where, over = ("spmd", quoted(axes[0])) if len(axes) == 1 else ("flattened", literal(axes, {}))
    given = f"{value}, {over}, src=spmd.{source}, dst=spmd.{target}{expert}{options}"
    text = _called(f"{where}.{call}", given, caller)
    return f"kernels.dense_gradient({text})" if dtype is not None and kinds in _ALL_REDUCES_BACKWARD else text


def _familiar(node: fx.Node, name: str, texts: Texts) -> Text | None:
    special = _SPECIAL.get(name)
    if special is not None:
        return special(node, texts)
    if name in _INFIX:
        return _infix(node, name, texts)
    if name == "neg":
        return Text(f"-{texts[_operand(node)].within(UNARY)}", UNARY)
    if name in _METHODS:
        receiver = texts[_operand(node)].within(ATOM)
        rest = ", ".join([literal(a, texts) for a in _flat_sizes(name, node.args[1:])])
        keywords = "".join(f", {k}={literal(v, texts)}" for k, v in node.kwargs.items()).removeprefix(
            "" if rest else ", "
        )
        return Text(f"{receiver}.{name}({rest}{keywords})")
    if name in _FUNCTIONAL:
        return Text(f"F.{name}({_named_arguments(node, texts)})")
    if name in _TORCH:
        return Text(f"torch.{name}({_call_arguments(node, texts)})")
    return None


def _flat_sizes(name: str, args: tuple[Any, ...]) -> list[Any]:
    """Return sizes as separate arguments: ``a.view(2, 3)``, but ``a.view([])`` for an empty list."""
    if name in ("view", "reshape", "expand", "permute") and len(args) == 1 and isinstance(args[0], (list, tuple)):
        return list(args[0]) or list(args)
    return list(args)


def _named_arguments(node: fx.Node, texts: Texts) -> str:
    """Return the arguments of a functional: tensors by position, others by keyword, without defaults."""
    given = list(arguments(node).items())
    defaults = dict(overload_schema(node.target) or ())
    parts: list[str] = []
    by_position = True
    for index, (key, value) in enumerate(given):
        if not isinstance(value, fx.Node) and index > 0 and value == defaults[key]:
            by_position = False
            continue
        if key in ("cudnn_enable", "cudnn_enabled"):
            by_position = False
            continue
        # a number may be the second positional argument; torch takes strings (gelu's approximation) only by keyword
        first = by_position and (isinstance(value, fx.Node) or (index < 2 and not isinstance(value, str)))
        parts.append(literal(value, texts) if first else f"{key}={literal(value, texts)}")
        by_position = first
    return ", ".join(parts)


def _infix(node: fx.Node, name: str, texts: Texts) -> Text | None:
    if node.kwargs or len(node.args) != 2:
        return None
    symbol, binds = _INFIX[name]
    left, right = node.args
    # a comparison of comparisons without parentheses is a chain to Python: ``a < b == c`` means ``a < b and b == c``
    a = texts[left].within(binds + (binds == COMPARE)) if isinstance(left, fx.Node) else literal(left, texts)
    # the right operand of - and / needs parentheses at equal precedence; for + and * they keep the order of rounding
    b = texts[right].within(binds + 1) if isinstance(right, fx.Node) else literal(right, texts)
    return Text(f"{a} {symbol} {b}", binds)


def _slice(node: fx.Node, texts: Texts) -> Text:
    given = arguments(node)
    ndim = _ndim(_operand(node))
    dim = int(given["dim"]) % ndim
    start = given["start"] or 0
    end = "" if given["end"] is None or given["end"] >= _MAX_INT else given["end"]
    step = "" if given["step"] == 1 else f":{given['step']}"
    window = f"{start or ''}:{end}{step}"
    index = ", ".join([":"] * dim + [window]) if dim < ndim - 1 or dim == 0 else f"..., {window}"
    return Text(f"{texts[_operand(node)].within(ATOM)}[{index}]")


def _select(node: fx.Node, texts: Texts) -> Text:
    given = arguments(node)
    dim = int(given["dim"]) % _ndim(_operand(node))
    index = ", ".join([":"] * dim + [literal(given["index"], texts)])
    return Text(f"{texts[_operand(node)].within(ATOM)}[{index}]")


def _to(node: fx.Node, texts: Texts) -> Text | None:
    dtype = arguments(node).get("dtype")
    if not isinstance(dtype, torch.dtype):
        return None
    return Text(f"{texts[_operand(node)].within(ATOM)}.to({dtype})")


def _sum(node: fx.Node, texts: Texts) -> Text:
    given = arguments(node)
    parts = [] if given.get("dim") is None and not given.get("keepdim") else [literal(given.get("dim"), texts)]
    parts += ["keepdim=True"] if given.get("keepdim") else []
    parts += [f"dtype={given['dtype']}"] if given.get("dtype") is not None else []
    return Text(f"{texts[_operand(node)].within(ATOM)}.{op_name(node).removeprefix('aten.')}({', '.join(parts)})")


def _embedding(node: fx.Node, texts: Texts) -> Text:
    given = arguments(node)
    padding = given["padding_idx"]
    extra = f", padding_idx={padding}" if padding not in (-1, None) else ""
    return Text(f"F.embedding({literal(given['indices'], texts)}, {literal(given['weight'], texts)}{extra})")


def _ndim(node: fx.Node) -> int:
    return int(meta(node)["val"].dim())


_SPECIAL: dict[str, Callable[[fx.Node, Texts], Text | None]] = {
    "slice": _slice,
    "select": _select,
    "to": _to,
    "sum": _sum,
    "mean": _sum,
    "embedding": _embedding,
}
