"""Sample calls to execute the rules: at least one for every entry of the table.

Sizes are mostly 6 and 12, which are divisible by 2 and 3; some are 4 or 5, which aren't.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.checks.rules import Sample, sample, without_gradient
from autopar.checks.sample_experts import gated_experts, plain_experts
from autopar.ops.fused import FUSED_OPS
from autopar.program import kernels, kernels_ctc, kernels_fp8, kernels_norm, kernels_random, kernels_rnn
from autopar.program.kernels_experts import grouped_linear, of_rows
from autopar.rules.table import UNARY
from passes import rewrite  # noqa: F401  registers the ops that passes make

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    """Return normal float64 values."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def u(*shape: int) -> Tensor:
    """Return float64 values in (0.1, 0.9), where every elementary function is smooth."""
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def n(high: int, *shape: int) -> Tensor:
    """Return non-negative integers below ``high``."""
    return torch.randint(high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    """Return random booleans."""
    return torch.rand(shape, generator=_generator) > 0.5


def _words(text: str) -> list[str]:
    return text.split()


_UNARY = [*(name.removeprefix("aten.") for name in UNARY), "clone", "contiguous", "detach", "neg"]
_SMOOTH = _words("maximum minimum atan2 fmin fmax hypot")
_COMPARISONS = _words("eq ne lt le gt ge remainder fmod copysign")
_LOGICAL = _words("logical_and logical_or logical_xor")
_BITWISE = _words("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__")


def _overload(name: str, overload: str = "default") -> Callable[..., Any]:
    return getattr(getattr(aten, name), overload)


def elementwise() -> list[Sample]:
    """Return samples of unary, binary and ternary elementwise ops, with broadcasting."""
    return [
        *(sample(_overload(name), u(6, 4)) for name in _UNARY),
        *(sample(_overload(name), u(6, 1, 4), u(12, 4)) for name in _SMOOTH),
        *(sample(_overload(name, "Tensor"), r(6, 12), r(12)) for name in _COMPARISONS),
        *(sample(_overload(name, "Scalar"), n(5, 6, 12), 3) for name in _COMPARISONS),
        *(sample(_overload(name), b(6, 12), b(6, 1)) for name in _LOGICAL),
        *(sample(_overload(name, "Tensor"), b(6, 12), b(6, 1)) for name in _BITWISE),
        sample(aten.bitwise_not.default, b(6, 4)),
        sample(aten.floor_divide.default, n(50, 6, 4), n(4, 6, 1) + 1),
        sample(aten.xlogy.Tensor, u(6, 4), u(6, 1)),
        *(sample(op.Tensor, r(6, 4, 12), r(4, 1)) for op in (aten.add, aten.sub, aten.mul, aten.rsub)),
        *(sample(op.Tensor, r(6, 4), 2.5) for op in (aten.add, aten.sub, aten.mul, aten.div)),
        *(sample(op.Scalar, r(6, 4), 2.5) for op in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub)),
        *(sample(op.Tensor, r(6, 4), r()) for op in (aten.add, aten.mul)),
        sample(aten.add.Tensor, r(6, 4), r(6, 4), alpha=3),
        sample(aten.div.Tensor, r(6, 4), u(6, 1)),
        sample(aten.div.Tensor_mode, r(6, 4), u(6, 1), rounding_mode="floor"),
        sample(aten.pow.Tensor_Scalar, u(6, 4), 2),
        sample(aten.pow.Tensor_Tensor, u(6, 4), u(4)),
        sample(aten.pow.Scalar, 2.0, r(6, 4)),
        sample(aten.where.self, b(6, 1), r(6, 4), r(4)),
        sample(aten.where.ScalarOther, b(6, 4), r(6, 4), 0.0),
        sample(aten.where.ScalarSelf, b(6, 4), 1.0, r(6, 4)),
        sample(aten.masked_fill.Scalar, r(6, 12), b(12), 0.5),
        sample(aten.masked_fill.Tensor, r(6, 12), b(6, 12), r()),
        sample(aten.lerp.Tensor, r(6, 4), r(6, 4), r(4)),
        sample(aten.lerp.Scalar, r(6, 4), r(6, 4), 0.3),
        sample(aten.addcmul.default, r(6, 4), r(6, 1), r(4), value=2),
        sample(aten.addcdiv.default, r(6, 4), r(6, 1), u(4)),
        sample(aten.clamp.default, r(6, 4), -0.5, 0.5),
        sample(aten.clamp.Tensor, r(6, 4), r(6, 1) - 2, r(6, 1) + 2),
        sample(aten.clamp_min.default, r(6, 4), 0.0),
        sample(aten.clamp_max.default, r(6, 4), 0.0),
        sample(aten.threshold.default, r(6, 4), 0.1, 0.2),
        sample(aten.to.dtype, r(6, 4), torch.float64, True, True),
        sample(aten.to.device, r(6, 4), "cpu", torch.float64),
        sample(aten.type_as.default, n(9, 6, 4), r(1)),
        sample(aten.dropout.default, r(6, 4), 0.0, True),
        sample(kernels_random.bernoulli, r(6, 4), 1.0),
        sample(kernels_random.uniform, r(6, 4), 0.5, 0.5),
        sample(kernels_random.normal, r(6, 4), 0.5, 0.0),
        sample(aten.full_like.default, r(6, 4), 3.0),
        sample(aten.neg.default, r(6, 1)),
    ]


def products() -> list[Sample]:
    """Return samples of matrix products, attention and normalisation."""
    query, key = r(6, 12, 5, 4), r(6, 6, 5, 4)
    return [
        sample(aten.linear.default, r(6, 5, 12), r(6, 12), r(6)),
        sample(aten.linear.default, r(6, 12), r(4, 12)),
        sample(aten.linear.default, r(1, 6, 12), r(6, 12)),
        sample(kernels_fp8.linear, r(6, 5, 12), r(6, 12)),
        *(
            sample(aten.matmul.default, a, c)
            for a, c in ((r(6), r(6)), (r(6), r(6, 4)), (r(2, 6, 12), r(12)), (r(6, 12), r(12, 6)))
        ),
        *(
            sample(aten.matmul.default, a, c)
            for a, c in (
                (r(6, 4, 12), r(12, 6)),
                (r(6, 1, 4, 12), r(6, 12, 5)),
                (r(6, 4), r(5, 4, 6)),
                (r(6, 4, 12), r(1, 12, 6)),
            )
        ),
        sample(aten.mm.default, r(6, 12), r(12, 6)),
        sample(aten.bmm.default, r(6, 4, 12), r(6, 12, 6)),
        sample(aten.mv.default, r(6, 12), r(12)),
        sample(aten.dot.default, r(6), r(6)),
        sample(aten.outer.default, r(6), r(12)),
        sample(aten.addmm.default, r(12), r(6, 6), r(6, 12)),
        sample(aten.addmm.default, r(6, 12), r(6, 6), r(6, 12), beta=2, alpha=0.5),
        sample(aten.baddbmm.default, r(6, 1, 12), r(6, 4, 6), r(6, 6, 12)),
        sample(aten.einsum.default, "b i d, i j d -> b i j", [r(6, 5, 12), r(5, 6, 12)]),
        sample(aten.einsum.default, "ij,jk", [r(6, 12), r(12, 6)]),
        sample(
            aten.scaled_dot_product_attention.default, r(6, 12, 5, 4), r(6, 12, 5, 4), r(6, 12, 5, 6), is_causal=True
        ),
        sample(
            aten.scaled_dot_product_attention.default,
            r(6, 2, 12, 4),
            r(6, 2, 5, 4),
            r(6, 2, 5, 4),
            b(6, 1, 1, 5) | True,
        ),
        sample(aten.scaled_dot_product_attention.default, r(6, 12, 6, 4), r(6, 12, 5, 4), r(6, 12, 5, 4), r(12, 6, 5)),
        sample(aten.scaled_dot_product_attention.default, query, key, key, is_causal=True, enable_gqa=True),
        sample(
            aten.scaled_dot_product_attention.default, query, r(6, 1, 5, 4), r(6, 1, 5, 4), r(5, 5), enable_gqa=True
        ),
        sample(aten.scaled_dot_product_attention.default, r(6, 5, 4), r(6, 5, 4), r(6, 5, 4), scale=0.3),
        sample(aten.layer_norm.default, r(6, 12, 5), [5], r(5), r(5)),
        sample(aten.layer_norm.default, r(6, 4, 5), [4, 5]),
        sample(aten.layer_norm.default, r(6, 5), [5], r(5)),
        sample(aten.rms_norm.default, r(6, 12, 5), [5], r(5), 1e-6),
        sample(aten.group_norm.default, r(6, 12, 3), 2, r(12), r(12)),
        *(sample(op, r(6, 12, *more)) for op in _STATISTICS for more in ((), (5,), (3, 5))),
        sample(kernels_norm.batch_statistics, r(6, 12, 5), r(12), u(12)),
        sample(aten.group_norm.default, r(6, 4, 3, 5), 4),
        sample(kernels_norm.normalise, r(6, 12, 3, 5), r(12), u(12), r(12), r(12), 1e-5),
        sample(kernels_norm.normalise, r(6, 12), r(12), u(12)),
        sample(kernels_norm.local_batch_norm, r(4, 6, 3), r(6), r(6), 1e-5),
        sample(kernels_norm.local_batch_norm, r(4, 6, 3), r(6), r(6), 1e-5, r(6), u(6)),
        *(sample(_overload(name, "int"), r(6, 6, 12), 1) for name in ("softmax", "log_softmax")),
        *(sample(_overload(name), r(6, 12, 5), -1, False) for name in ("_softmax", "_log_softmax")),
        sample(aten.glu.default, r(6, 12, 4), -1),
    ]


def views() -> list[Sample]:
    """Return samples of views, concatenation and padding."""
    return [
        *(sample(aten.view.default, r(*shape), list(to)) for shape, to in _RESHAPES),
        sample(aten.reshape.default, r(6, 12).t(), [4, 18]),
        sample(aten._unsafe_view.default, r(6, 4, 5), [24, 5]),
        sample(aten.view_copy.default, r(6, 4, 5), [6, 20]),
        sample(aten.reshape_as.default, r(6, 12), r(6, 6, 2)),
        sample(aten.view_as.default, r(6, 12), r(6, 6, 2)),
        sample(aten.flatten.using_ints, r(2, 6, 12, 5), 1, 2),
        sample(aten.unflatten.int, r(5, 12, 4), 1, [6, 2]),
        sample(aten.squeeze.dim, r(6, 1, 12), 1),
        sample(aten.squeeze.default, r(6, 1, 12)),
        sample(aten.unsqueeze.default, r(6, 12), -1),
        sample(aten.unsqueeze.default, r(), 0),
        sample(aten.expand.default, r(6, 1, 4), [12, 6, 6, -1]),
        sample(aten.expand.default, r(), [12, 6]),
        sample(aten.expand_as.default, r(6, 1), r(6, 12)),
        sample(aten.broadcast_to.default, r(1, 12), [6, 12]),
        sample(aten.permute.default, r(6, 4, 12), [2, 0, 1]),
        sample(aten.transpose.int, r(6, 4, 12), 1, -1),
        sample(aten.t.default, r(6, 12)),
        sample(aten.t.default, r(6)),
        sample(aten.movedim.int, r(6, 4, 12), 0, -1),
        sample(aten.movedim.intlist, r(6, 4, 12), [0, 1], [1, 2]),
        sample(aten.select.int, r(6, 4, 12), 1, -1),
        sample(aten.slice.Tensor, r(6, 5, 12), 1, 1, 4),
        sample(aten.slice.Tensor, r(6, 5, 12), 0, 0, 9223372036854775807),
        sample(aten.slice.Tensor, r(6, 5, 12), 2, 0, 12),
        sample(aten.narrow.default, r(6, 5, 12), 2, 0, 12),
        sample(aten.narrow.default, r(6, 5, 12), 1, 2, 2),
        sample(aten.unbind.int, r(6, 3, 12), 1),
        sample(aten.split.Tensor, r(6, 5, 12), 2, 1),
        sample(aten.split_with_sizes.default, r(6, 5, 12), [2, 3], 1),
        sample(aten.chunk.default, r(6, 5, 12), 2, -2),
        sample(aten.tensor_split.sections, r(6, 5, 12), 2, 1),
        sample(aten.cumsum.default, r(6, 6, 12), 1),
        sample(aten.diff.default, r(6, 5, 12), 2, 1),
        sample(aten.diff.default, r(6, 12), 1, -1, r(6, 1)),
        sample(aten.logcumsumexp.default, r(6, 6, 12), 1),
        sample(aten.cumprod.default, u(6, 5, 12), 1),
        sample(aten.flip.default, r(6, 5, 12), [1]),
        sample(aten.roll.default, r(6, 5, 12), [1], [1]),
        sample(operator.getitem, (r(6, 2, 12), r(6, 3, 12)), 1),
        sample(aten.cat.default, [r(6, 4), r(6, 5), r(6, 1)], -1),
        sample(aten.stack.default, [r(6, 4), r(6, 4)], 1),
        sample(aten.pad.default, r(6, 5, 12), [1, 1, 0, 2]),
        sample(aten.constant_pad_nd.default, r(6, 5), [1, 1], 2.0),
        sample(aten.constant_pad_nd.default, r(6, 12), [1, -1]),
        sample(aten.repeat.default, r(6, 5), [2, 1, 3]),
        sample(aten.repeat_interleave.self_int, r(6, 12, 4), 2, 1),
        sample(aten.repeat_interleave.self_int, r(6, 1, 4), 2, 1),
        sample(aten.view_as_complex.default, r(6, 4, 2)),
        sample(aten.view_as_real.default, torch.complex(r(6, 4), r(6, 4))),
        sample(aten.tril.default, r(6, 4, 5)),
        sample(aten.triu.default, r(6, 4, 5), 1),
    ]


_STATISTICS = (kernels_norm.batch_statistics, kernels_norm.step_statistics)
_RESHAPES = [
    ((6, 4, 12), (6, 4, 6, 2)),
    ((6, 4, 12), (24, 12)),
    ((24, 12), (6, 4, 12)),
    ((6, 4, 6, 2), (6, 4, 12)),
    ((6, 4), (4, 6)),
    ((2, 6, 5), (2, 5, 6)),
    ((1, 6, 1, 12), (6, 12, 1)),
    ((6, 12), (-1,)),
    ((36,), (6, 2, 3)),
]


def reductions() -> list[Sample]:
    """Return samples of reductions, sorting and losses."""
    return [
        *(
            sample(op.default, r(6, 12))
            for op in (aten.sum, aten.mean, aten.max, aten.min, aten.prod, aten.std, aten.var, aten.median)
        ),
        *(sample(op.dim_IntList, r(6, 5, 12), [0, 2], True) for op in (aten.sum,)),
        *(sample(op.dim, r(6, 5, 12), *more) for op, *more in ((aten.mean, [-1], True), (aten.mean, [0, 1]))),
        sample(aten.mean.dim, r(6, 12), None),
        sample(aten.sum.dim_IntList, r(6, 5, 12), [-1], dtype=torch.float64),
        *(sample(op.default, r(6, 5, 12), [1], True) for op in (aten.amax, aten.amin, aten.logsumexp)),
        sample(aten.logsumexp.default, r(6, 5, 12), [1]),
        *(sample(op.dim, r(6, 6, 12), 1) for op in (aten.max, aten.min, aten.median)),
        sample(aten.max.other, r(6, 12), r(12)),
        *(sample(op.default, r(6, 5, 12), 1, True) for op in (aten.argmax, aten.argmin)),
        *(
            sample(op.correction, r(6, 5, 12), [1], correction=0, keepdim=True)
            for op in (aten.var, aten.std, aten.var_mean)
        ),
        sample(aten.prod.dim_int, r(6, 6, 12), 1),
        *(sample(op.dim, b(6, 5, 12), 1) for op in (aten.any, aten.all)),
        *(sample(op.default, b(6, 12)) for op in (aten.any, aten.all)),
        sample(aten.norm.ScalarOpt_dim, r(6, 5, 12), 2, [1]),
        sample(aten.linalg_vector_norm.default, r(6, 5, 12), 2, [1]),
        sample(aten.count_nonzero.dim_IntList, n(2, 6, 5, 12), [1]),
        sample(aten.sum.default, b(6, 12)),
        sample(aten.sort.default, r(6, 5), 1),
        sample(aten.topk.default, r(6, 5, 12), 2, 1),
        sample(aten.cross_entropy_loss.default, r(6, 5), n(5, 6), None, 2, -100, 0.1),
        without_gradient(sample(aten.cross_entropy_loss.default, r(6, 5, 12), n(5, 6, 12), u(5), 0), 2),
        sample(aten.cross_entropy_loss.default, r(6, 5), n(5, 6)),
        sample(aten.nll_loss.default, r(6, 5), n(5, 6), None, 2),
        sample(aten.rnn_tanh_cell.default, r(6, 5), r(6, 4), r(4, 5), r(4, 4), r(4), r(4)),
        sample(aten.rnn_relu_cell.default, r(6, 5), r(6, 4), r(4, 5), r(4, 4)),
        sample(aten.gru_cell.default, r(6, 5), r(6, 4), r(12, 5), r(12, 4), r(12), r(12)),
        sample(aten.lstm_cell.default, r(6, 5), [r(6, 4), r(6, 4)], r(16, 5), r(16, 4), r(16), r(16)),
        sample(aten.nll_loss_nd.default, r(6, 5, 12), n(5, 6, 12), None, 2),
        *(
            without_gradient(sample(_overload(name), u(6, 12), u(6, 12), *more), 1)
            for name in _LOSSES
            for more in ((), (0,), (2,))
        ),
        *(
            sample(aten.binary_cross_entropy_with_logits.default, r(6, 12), u(6, 12), None, None, reduction)
            for reduction in (0, 1, 2)
        ),
        without_gradient(sample(aten.binary_cross_entropy_with_logits.default, r(6, 12), u(6, 12), None, u(12), 2), 2),
        without_gradient(
            sample(aten.binary_cross_entropy_with_logits.default, r(6, 12), u(6, 12), u(6, 1), None, 0), 2
        ),
        sample(aten.binary_cross_entropy.default, u(6, 12), u(6, 12), None, 2),
        sample(kernels.cross_entropy_sum, r(6, 12, 5), n(5, 6, 12)),
        sample(kernels.cross_entropy_sum, r(6, 5), n(5, 6), 0, 0.1),
        without_gradient(sample(kernels.cross_entropy_sum, r(6, 12, 5), n(5, 6, 12), 0, 0.1, u(5)), 2),
        *(sample(op.function, *given, **options) for op in FUSED_OPS.values() for given, options in op.samples(r, n)),
        sample(kernels_ctc.ctc_loss, r(6, 12, 5).log_softmax(-1), n(4, 6, 3) + 1, n(4, 6) + 8, n(4, 6), 0, True),
    ]


_LOSSES = _words("mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss")


def _gates(count: int, width: int, hidden: int) -> list[Tensor]:
    """Return one layer's weights of a recurrent op with ``count`` gates."""
    rows = count * hidden
    return [r(rows, width), r(rows, hidden), r(rows), r(rows)]


def spatial() -> list[Sample]:
    """Return samples of convolution, pooling and interpolation."""
    return [
        sample(aten.conv1d.default, r(6, 12, 8), r(6, 12, 3), r(6)),
        sample(aten.conv2d.default, r(6, 3, 8, 8), r(12, 3, 3, 3), r(12), [2, 2], [1, 1]),
        sample(aten.conv2d.default, r(6, 12, 5, 5), r(6, 12, 3, 3)),
        sample(aten.conv2d.default, r(6, 12, 5, 5), r(12, 1, 3, 3), r(12), [1, 1], [0, 0], [1, 1], 12),
        sample(aten.conv3d.default, r(6, 2, 3, 3, 3), r(6, 2, 2, 2, 2)),
        sample(aten.conv_transpose1d.default, r(6, 12, 4), r(12, 6, 3), r(6)),
        sample(aten.conv_transpose2d.input, r(6, 4, 3, 3), r(4, 12, 2, 2), r(12), [2, 2]),
        sample(aten.conv_transpose2d.input, r(6, 12, 3, 3), r(12, 1, 2, 2), None, [2, 2], [0, 0], [0, 0], 12),
        sample(aten.conv_transpose3d.input, r(6, 2, 2, 2, 2), r(2, 6, 2, 2, 2)),
        sample(aten.pixel_shuffle.default, r(6, 12, 3, 3), 2),
        sample(aten.pixel_unshuffle.default, r(6, 3, 4, 4), 2),
        *(
            sample(kernels_rnn.recurrent, r(6, 3, 4), [r(1, 6, 5)] * count, _gates(gates, 4, 5), mode)
            for mode, count, gates in (
                ("lstm", 2, 4),
                ("lstm", 0, 4),
                ("gru", 1, 3),
                ("rnn_tanh", 1, 1),
                ("rnn_relu", 0, 1),
            )
        ),
        sample(
            kernels_rnn.recurrent,
            r(6, 3, 4),
            [r(4, 6, 2), r(4, 6, 2)],
            [w for width in (4, 4, 4, 4) for w in _gates(4, width, 2)],
            "lstm",
            True,
            2,
            0.0,
            True,
        ),
        sample(aten.max_pool1d.default, r(6, 12, 8), [2]),
        sample(aten.avg_pool1d.default, r(6, 12, 8), [2]),
        sample(aten.adaptive_avg_pool1d.default, r(6, 12, 8), [2]),
        *(sample(op.default, r(6, 12, 6, 6), [2, 2]) for op in (aten.max_pool2d, aten.avg_pool2d)),
        *(sample(op.default, r(6, 12, 6, 6), [1, 1]) for op in (aten.adaptive_avg_pool2d, aten.adaptive_max_pool2d)),
        *(sample(op.default, r(6, 12, 4, 4, 4), [2, 2, 2]) for op in (aten.max_pool3d, aten.avg_pool3d)),
        sample(aten.upsample_nearest2d.vec, r(6, 12, 3, 3), None, [2.0, 2.0]),
        sample(aten.upsample_bilinear2d.vec, r(6, 12, 3, 3), [5, 5], False, None),
        sample(aten.upsample_bicubic2d.vec, r(6, 12, 3, 3), [5, 5], True, None),
        sample(aten.upsample_linear1d.vec, r(6, 12, 3), None, False, [2.0]),
        sample(aten.upsample_trilinear3d.vec, r(6, 12, 3, 3, 2), None, False, [2.0, 2.0, 2.0]),
        sample(aten.upsample_nearest1d.vec, r(6, 12, 3), None, [2.0]),
        sample(aten.upsample_nearest3d.vec, r(6, 12, 3, 3, 2), [4, 4, 4], None),
        sample(aten._upsample_nearest_exact1d.vec, r(6, 12, 3), None, [2.0]),
        sample(aten._upsample_nearest_exact2d.vec, r(6, 12, 3, 3), [5, 5], None),
        sample(aten.adaptive_avg_pool3d.default, r(6, 12, 4, 4, 4), [2, 2, 2]),
    ]


def indexing() -> list[Sample]:
    """Return samples of lookups and of ops that create tensors."""
    return [
        sample(aten.embedding.default, r(12, 6), n(12, 6, 4)),
        sample(aten.index.Tensor, r(6, 5, 12), [None, n(5, 6)]),
        sample(aten.index.Tensor, r(5, 4, 12), [n(5, 6, 3), n(4, 3)]),
        sample(aten.index.Tensor, r(5, 12), [n(5, 6)]),
        sample(aten.index.Tensor, r(5, 12), [b(5)]),
        sample(aten.index_select.default, r(6, 5, 12), 1, n(5, 6)),
        sample(aten.gather.default, r(6, 5, 12), 1, n(5, 6, 2, 12)),
        sample(aten.gather.default, r(6, 5, 12), 1, n(5, 6, 2, 6)),
        sample(aten.scatter.value, r(6, 5, 12), 1, n(5, 6, 2, 12), 1.0),
        sample(aten.scatter.value, r(6, 5, 12), 1, n(5, 6, 2, 6), 1.0),
        sample(aten.scatter.src, r(6, 5, 12), 1, torch.arange(4).view(1, 4, 1).expand(6, 4, 12), r(6, 4, 12)),
        sample(aten.one_hot.default, n(5, 6, 4), 5),
        sample(aten.arange.default, 6),
        sample(aten.zeros.default, [6, 4]),
        sample(aten.ones.default, [6]),
        sample(aten.full.default, [6, 4], 2.0),
        sample(aten.empty.memory_format, [6, 4]),
        sample(aten.linspace.default, 0.0, 1.0, 5),
        sample(aten.eye.default, 4),
        sample(aten.scalar_tensor.default, 2.0),
        sample(aten.rand.default, [6]),
        sample(aten.randn.default, [6]),
        sample(aten.randint.default, 5, [6]),
        sample(aten.new_zeros.default, r(6), [4, 6]),
        sample(aten.new_ones.default, r(6), [4, 6]),
        sample(aten.new_full.default, r(6), [4, 6], 2.0),
        sample(aten.new_empty.default, r(6), [4, 6]),
    ]


def mixtures() -> list[Sample]:
    """Return samples of mixtures of experts: gated bodies that are weighted before and after, and plain ones with biases, with matrices in
    both orientations."""
    counts = torch.tensor([2, 0, 3, 1])
    gated = [gated_experts(12, 5, weights_first=first) for first in (False, True)]
    return [
        sample(grouped_linear, r(6, 5), r(4, 12, 5), counts),
        sample(kernels_fp8.grouped_linear, r(6, 5), r(4, 12, 5), counts),
        sample(of_rows, r(4, 12), r(6, 5), counts),
        *(sample(op, r(6, 4, 5), n(6, 6, 4, 2), u(6, 4, 2), r(6, 12, 5), r(6, 12, 5), r(6, 5, 12)) for op in gated),
        sample(plain_experts(24, 5, 6), r(6, 5), n(6, 6, 2), u(6, 2), r(6, 12, 5), r(6, 12), r(6, 12, 5), r(6, 5)),
    ]


def samples() -> list[Sample]:
    """Return all samples."""
    return [*elementwise(), *products(), *views(), *reductions(), *spatial(), *indexing(), *mixtures()]
