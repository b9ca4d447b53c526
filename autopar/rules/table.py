"""The table of sharding rules: one line for each op, or a function that writes the line from a node's arguments.

Names are those of ``autopar.ops.facts.op_name``, so an entry covers all overloads. An op without an entry is replicated, and the plan
notes it. ``autopar.checks.samples`` has arguments for every entry, and the tests execute each entry on shards. An entry declares only the
letters and linearity that the spmd-types checker accepts in an emitted program.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.ops.facts import OpKind, aten_names
from autopar.rules import views as v

Entry = str | Callable[[fx.Node], str | None]

UNARY = aten_names("""
    abs acos asin atan ceil cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh isfinite isinf
    isnan leaky_relu log log10 log1p log2 log_sigmoid logical_not logit mish reciprocal relu relu6 round rsqrt selu sigmoid
    sign silu sin sinh softplus sqrt square tan tanh trunc nan_to_num hardshrink softshrink frac alias _to_copy
    zeros_like ones_like empty_like rand_like randn_like
""")
"""Elementwise ops whose only required argument is a floating-point tensor."""
_WITH_ARGUMENTS = aten_names("bitwise_not clamp clamp_min clamp_max threshold to type_as dropout full_like")
_BINARY = aten_names("""
    pow maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2
    remainder fmod floor_divide where masked_fill lerp addcmul addcdiv __and__ __or__ __xor__ copysign hypot fmin fmax
    xlogy rsub
""")
_VIEWS = aten_names("view reshape _unsafe_view view_copy flatten unflatten squeeze unsqueeze reshape_as view_as")
_ALONG_DIM = aten_names("""
    softmax log_softmax _softmax _log_softmax logcumsumexp cumsum cumprod sort topk
    split split_with_sizes chunk tensor_split
""")
_REDUCTIONS = aten_names("""
    amax amin max min argmax argmin var std prod any all norm linalg_vector_norm var_mean median count_nonzero
""")
_POOLS = aten_names("""
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_max_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
""")
_FACTORIES = aten_names("arange zeros ones full empty linspace eye scalar_tensor rand randn randint")

TABLE: dict[str, Entry] = {
    **dict.fromkeys(UNARY + _WITH_ARGUMENTS + _BINARY, v.elementwise()),
    **dict.fromkeys(aten_names("clone contiguous detach neg"), "* -> * ; linear 0"),
    **dict.fromkeys(_VIEWS, v.view),
    # sums and products
    "aten.add": v.elementwise("linear 0+1"),
    "aten.sub": v.elementwise("linear 0+1"),
    "aten.mul": v.elementwise("linear 0 1", "linear 0"),
    "aten.div": v.division,
    "aten.linear": "* k, n k, +n -> * n",
    "kernels_fp8.linear": "* k, n k -> * n",
    "aten.matmul": v.matmul,
    "aten.mm": "m k, k n -> m n ; linear 0 1",
    "aten.bmm": "b m k, b k n -> b m n ; linear 0 1",
    "aten.mv": "m k, k -> m",
    "aten.dot": "k, k -> ",
    "aten.addmm": v.addmm,
    "aten.baddbmm": v.addmm,
    "aten.einsum": v.einsum,
    "aten.outer": "m, n -> m n",
    # normalisation and attention
    "aten.layer_norm": v.layer_norm,
    "aten.rms_norm": v.layer_norm,
    "aten.group_norm": v.group_norm,
    "kernels_norm.batch_statistics": v.statistics("batch_statistics"),
    "kernels_norm.step_statistics": v.statistics("step_statistics"),
    "kernels_norm.normalise": v.normalise,
    "kernels_norm.local_batch_norm": v.local_batch_norm,
    "aten.scaled_dot_product_attention": v.attention,
    **dict.fromkeys(aten_names("rnn_tanh_cell rnn_relu_cell gru_cell lstm_cell"), v.cell),
    **dict.fromkeys(_ALONG_DIM, v.same_but("dim")),
    "aten.diff": v.diff,
    "aten.glu": v.glu,
    # views
    **dict.fromkeys(OpKind.EXPANSION.value, v.expand),
    "aten.permute": v.permute,
    "aten.transpose": v.permute,
    "aten.t": v.permute,
    "aten.movedim": v.movedim,
    "aten.select": v.select,
    "aten.slice": v.slice_,
    "aten.narrow": v.slice_,
    "aten.unbind": v.unbind,
    "aten.flip": v.same_but("dims"),
    "aten.roll": v.same_but("dims"),
    "_operator.getitem": v.getitem,
    "aten.cat": v.cat,
    "aten.stack": v.stack,
    "aten.pad": v.pad,
    "aten.constant_pad_nd": v.pad,
    "aten.repeat": v.repeat,
    "aten.repeat_interleave": v.repeat_interleave,
    "aten.view_as_complex": "* p! -> *",
    "aten.view_as_real": "* -> * p!",
    "aten.tril": v.never_sharded,
    "aten.triu": v.never_sharded,
    # reductions
    **dict.fromkeys(aten_names("sum mean"), v.reduction(linear=True)),
    **dict.fromkeys(_REDUCTIONS, v.reduction(linear=False)),
    "aten.logsumexp": v.logsumexp,
    # losses
    "aten.cross_entropy_loss": v.cross_entropy,
    "aten.nll_loss": v.cross_entropy,
    "aten.nll_loss_nd": v.cross_entropy,
    **dict.fromkeys(OpKind.LOSS.value, v.pointwise_loss),
    "kernels.cross_entropy_sum": v.sum_of_losses,
    "kernels_ctc.ctc_loss": "b 1 1, b 1, b, b -> b",
    # convolution and pooling
    **dict.fromkeys(aten_names("conv1d conv2d conv3d"), v.convolution),
    **dict.fromkeys(aten_names("conv_transpose1d conv_transpose2d conv_transpose3d"), v.transposed_convolution),
    **dict.fromkeys(_POOLS, v.pool),
    **dict.fromkeys(aten_names("pixel_shuffle pixel_unshuffle"), v.pixel_shuffle),
    "kernels_rnn.recurrent": v.recurrent,
    "kernels_random.bernoulli": v.elementwise(),
    "kernels_random.uniform": v.elementwise(),
    "kernels_random.normal": v.elementwise(),
    # indexing
    "aten.embedding": v.embedding,
    "aten.index": v.index,
    "aten.index_select": v.index_select,
    **dict.fromkeys(aten_names("gather scatter"), v.gather),
    "aten.one_hot": v.one_hot,
    # products in the bodies of mixtures of experts: rows are sorted by expert, and therefore never sharded
    "kernels_experts.grouped_linear": "s! k, e! n k, e! -> s! n",
    "kernels_fp8.grouped_linear": "s! k, e! n k, e! -> s! n",
    "kernels_experts.of_rows": v.of_rows,
    # created without operands: equal on every rank
    **dict.fromkeys(_FACTORIES, "-> *"),
    **dict.fromkeys(aten_names("new_zeros new_ones new_full new_empty"), v.new_tensor),
}
"""Maps an op's name to its line, or to the function that writes the line."""

KERNELS: dict[str, Entry] = {"aten.scaled_dot_product_attention": v.ring_attention}
"""Maps an op's name to a second line, with a kernel that shards the op in another way."""
