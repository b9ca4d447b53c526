"""Faults put in on purpose, one at a time, and what catches each: ``python tests/reports mutations`` (``make report NAME=mutations``).

A mutation breaks a rule, a conversion, a pass, a kernel, the runtime or the emitted text. Rules, conversions and passes are patched in this
process before the program is emitted; the rest is changed in the emitted folder, which is what runs. Five things may catch it:

* ``rules``: the rule executed on shards (``autopar.checks.rules``);
* ``passes``: emission itself, which holds local shapes and types to each other;
* ``structure``: the emitted collectives against those decided and priced (``autopar.checks.collectives``);
* ``types``: the type checker (``autopar.checks.types``);
* ``exactness``: the loss and every gradient on real processes.

Every mutation must be caught by one of them at least; the command ends with status 1 otherwise.

Capture's faults are in ``capture_faults``: no plan is needed to show them, and one thing alone must catch them, ``capture``: the
comparison of the captured graph with the model (``autopar.capture.check``). ``python tests/reports mutations capture`` tries those alone,
and keeps the other lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import capture_faults
import torch
from exactness import subject
from places import EVIDENCE, file_of
from workers import WorkerPool

import passes.communication
import passes.conversions
import passes.localise
from autopar.checks.collectives import check_collectives
from autopar.checks.rules import check
from autopar.checks.samples import samples
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import AutoparError, RuleError
from autopar.plan import Role, Strategy
from autopar.rules import table, views
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard.solve import _solve
from autopar.verify.case import compare_step
from autopar.verify.mixtures import describe

RESULTS = EVIDENCE / "mutations.jsonl"
FAULTS = (AutoparError, AssertionError, RuntimeError, ValueError, IndexError, KeyError, StopIteration)
CATCHERS = ("rules", "passes", "structure", "types", "exactness", "capture")

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    """What is broken, in words; a model and a plan that use it; and the fault.

    ``file``, ``pattern`` and ``replacement`` change a file of the emitted folder; ``patch`` changes this process; ``op`` is the op
    whose rule is changed.
    """

    name: str
    model: str
    options: dict[str, Any]
    file: str = ""
    pattern: str = ""
    replacement: str = ""
    patch: Patch | None = None
    op: str = ""

    @property
    def breaks(self) -> str:
        if self.op:
            return "rule"
        return "pass" if self.patch is not None else {"model.py": "program"}.get(self.file, "runtime")


def text(file: str, name: str, model: str, options: dict[str, Any], pattern: str, replacement: str) -> Mutation:
    return Mutation(name, model, options, file, pattern, replacement)


def rule(name: str, model: str, options: dict[str, Any], op: str, entry: Any) -> Mutation:
    return Mutation(name, model, options, patch=lambda: mock.patch.dict(table.TABLE, {op: entry}), op=op)


def patched(name: str, model: str, options: dict[str, Any], where: Any, attribute: str, new: Any) -> Mutation:
    return Mutation(name, model, options, patch=lambda: mock.patch.object(where, attribute, new))


# -- the emitted text -------------------------------------------------------------------------------------------------

TENSOR, SEQUENCE, DATA = {"tensor": 2}, {"tensor": 2, "sequence": True}, {"data": 2}
WAITING = TENSOR | {"overlap": "none"}  # conversions and products apart
HALVED = SEQUENCE | {"overlap": "halves"}
DATA_TENSOR = {"data": 2, "tensor": 2}
SERVER = DATA | {"sync": "parameter-server"}
AVERAGED = DATA | {"sync": "local-steps:1", "allow": {"local_steps"}}
GRID = {"mesh": make_mesh(("tensor0", 2), ("tensor1", 2))}
TWO_AXES = {"mesh": make_mesh(("outer", 2), ("inner", 2))}
REDUCED = r'spmd\.all_reduce\((attn_output_\w+), "tensor", src=spmd\.P, dst=spmd\.I\)'

# Types that are wrong: the checker refuses every one.
ILL_TYPED = tuple(
    text("model.py", *line)
    for line in (
        ("partial sum is not reduced", "llama", TENSOR, REDUCED, r"\1"),
        (
            "partial sum is reduced to R, read as I", "llama", TENSOR, REDUCED,
            r'spmd.all_reduce(\1, "tensor", src=spmd.P, dst=spmd.R)',
        ),
        (
            "partial sum is reduced twice", "llama", TENSOR, REDUCED,
            r'spmd.all_reduce(spmd.all_reduce(\1, "tensor", src=spmd.P, dst=spmd.I), "tensor", src=spmd.P, dst=spmd.I)',
        ),
        ("gelu of a partial sum", "llama", TENSOR, REDUCED, r'spmd.all_reduce(F.gelu(\1), "tensor", src=spmd.P, dst=spmd.I)'),
        (
            "gradient of a column-parallel input is not reduced", "llama", WAITING,
            r'(hidden_states_r_2 =) kernels\.dense_gradient\(spmd\.convert\((\w+), "tensor", src=spmd\.I, dst=spmd\.R\)\)', r"\1 \2",
        ),
        ("softmax over a sharded dim", "llama", WAITING, r"F\.linear\(down_proj_mul,", "F.linear(torch.softmax(down_proj_mul, -1),"),
        (
            "joined products take their input for a slice", "llama", TENSOR, r"(kernels_overlap\.linears\([^()]*)src=spmd\.I",
            r"\1src=spmd.S(1)",
        ),
        (
            "joined products convert their input on another axis", "llama", DATA_TENSOR,
            r'(kernels_overlap\.linears\([^()]*)axis="tensor"', r'\1axis="data"',
        ),
        (
            "mean over a sharded dim", "llama", WAITING,
            r"F\.linear\((down_proj_mul),", r"F.linear(\1 - \1.mean([-1], keepdim=True),",
        ),
        (
            "loss over a slice of the vocabulary", "llama", TENSOR,
            r'kernels_vocab\.vocab_parallel_cross_entropy_sum\((.*), "tensor",', r"kernels.cross_entropy_sum(\1,",
        ),
        (
            "bias added to a partial sum on every rank", "gpt2", TENSOR,
            r"F\.linear\((.*), self\.attn\.c_proj\.weight\.t\(\)\)",
            r"F.linear(\1, self.attn.c_proj.weight.t(), self.attn.c_proj.bias)",
        ),
        (
            "lookup in a slice of the vocabulary", "gpt2", TENSOR,
            r'kernels_vocab\.masked_embedding\((\w+), (\w+), axis="tensor"\)', r"F.embedding(\1, \2)",
        ),
        ("reduce-scatter along the wrong dim", "llama", SEQUENCE, r"(reduce_scatter\(.*)dst=spmd\.S\(1\)", r"\1dst=spmd.S(0)"),
        ("all-to-all from the wrong dim", "llama", SEQUENCE, r"all_to_all\((.*)src=spmd\.S\(2\)", r"all_to_all(\1src=spmd.S(0)"),
        (
            "gradient of a norm's weight on a slice of the sequence is not reduced", "llama", SEQUENCE,
            r'= kernels\.dense_gradient\(spmd\.convert\((self\.\w+layernorm\.weight), "tensor", src=spmd\.I, dst=spmd\.R\)\)',
            r"= \1",
        ),
        ("loss on slices of the batch is not a term", "llama", {"data": 2, "tensor": 2}, r'partial_axes=\("data",\)', "partial_axes=()"),
        (
            "loss divided by the number of valid labels of a slice", "llama", {"data": 2, "tensor": 2},
            r"cross_entropy_sum / valid_labels", "cross_entropy_sum / (labels != -100).sum()",
        ),
        (
            "mean loss of a slice of the batch", "mlp", DATA,
            r"torch\.ops\.aten\.mse_loss\.default\((.*), 2\)", r"torch.ops.aten.mse_loss.default(\1, 1)",
        ),
        ("statistics over a slice of the batch", "mlp", DATA, r"F\.linear\(x, self", "F.linear(x - x.mean(0), self"),
        (
            "labels are taken whole", "llama", {"data": 2, "tensor": 2},
            r'("labels": TensorSpec\(.*\{"data": )spmd\.S\(0\)', r"\1spmd.R",
        ),
        (
            "border declared in another type", "llama", {"pipeline": 2, "data": 2, "microbatches": 2},
            r'("model\.layers\.1": TensorSpec\(.*\{"data": )spmd\.S\(0\)', r"\1spmd.R",
        ),
        (
            "slices of two axes taken in the wrong order", "llama", TWO_AXES, r"( +)for layer in self",
            r'\1hidden = spmd.all_gather(hidden, "outer", src=spmd.S(0), dst=spmd.I)\n'
            r'\1hidden = spmd.convert(hidden, "outer", src=spmd.I, dst=spmd.S(0))\n'
            r"\1for layer in self",
        ),
    )
)  # fmt: skip

# Types that are right and values that are wrong: no type tells, the exactness run does.
UNSEEN = tuple(
    text("model.py", *line)
    for line in (
        ("mean divided by the wrong count", "mlp", DATA, r"\* 0\.001953125", "* 0.00390625"),
        ("attention that is not causal", "llama", TENSOR, r", is_causal=True", ""),
        ("attention with another scale", "llama", TENSOR, r"scale=0\.5", "scale=0.25"),
        ("masked labels are counted", "llama", {"data": 2, "tensor": 2}, r"!= -100", "!= -101"),
        ("a norm's epsilon", "llama", SEQUENCE, r"1e-06", "1e-03"),
    )
)


# -- kernels and the runtime ------------------------------------------------------------------------------------------

ZERO_2 = {"data": 2, "zero": 2}
PIPELINE = {"pipeline": 2, "microbatches": 4}
BOTH_WAYS = {"pipeline": 2, "microbatches": 4, "schedule": "chimera"}
BOTH_WAYS_ZERO = {"pipeline": 2, "data": 2, "microbatches": 4, "schedule": "chimera", "zero": 1}
PIPELINE_ZERO = {"pipeline": 2, "data": 2, "zero": 2, "microbatches": 2}
RUNTIME = tuple(
    text(*line)
    for line in (
        ("kernels_vocab.py", "rows of other ranks are not zeroed in a masked lookup", "gpt2", TENSOR,
         r"\.masked_fill\(elsewhere\.unsqueeze\(-1\), 0\)", ""),
        ("kernels_vocab.py", "a masked lookup begins at row zero on every rank", "gpt2", TENSOR,
         r"local = ids - _slice_start\(axes, weight\.shape\[0\], ids\.device\)",
         "local = ids - 0 * _slice_start(axes, weight.shape[0], ids.device)"),
        ("kernels_vocab.py", "the sums of a vocabulary-parallel loss are not reduced", "llama", TENSOR,
         r"terms = flattened\.all_reduce\(terms, axes, src=P, dst=I\)", "terms = terms.clone()"),
        ("kernels_vocab.py", "a label of another rank is picked in a vocabulary-parallel loss", "llama", TENSOR,
         r"\.squeeze\(1\)\.masked_fill\(elsewhere, 0\)", ".squeeze(1)"),
        ("kernels_vocab.py", "every rank scatters a label's gradient", "llama", TENSOR,
         r"\(grad\[1\] \* ctx\.on\)\.masked_fill\(elsewhere, 0\)", "(grad[1] * ctx.on)"),
        ("kernels_vocab.py", "ignored labels are not ignored", "llama", TENSOR,
         r"\.masked_fill\(labels == ignore_index, 0\.0\)", ""),
        ("kernels_overlap.py", "a sum that runs under weight gradients is not awaited", "llama", SEQUENCE, r"work\.wait\(\)", "pass"),
        ("kernels_overlap.py", "the wait is for the handle of the first sum of the step", "llama", SEQUENCE,
         r"def finish\(\) -> Tensor:\n            work\.wait\(\)",
         "_Products.flying = [*getattr(_Products, 'flying', ()), work]\n\n        def finish() -> Tensor:\n"
         "            _Products.flying[0].wait()"),
        ("kernels_overlap.py", "the sum starts before the terms of all joined products are added up", "llama", TENSOR,
         r"(?s)terms = _input_gradient_term\(rows, weights, \*grads\[count:\]\)(.*?)finish\(\), None",
         r"terms = _input_gradient_term(rows[:1], weights[:1], *grads[count:])\1"
         r"finish() + (_input_gradient_term(rows[1:], weights[1:]).view(converted.shape) if count > 1 else 0), None"),
        ("kernels_overlap.py", "weight gradients of joined products from the gathered input in another order", "llama", SEQUENCE,
         r"flat = converted\.reshape", "flat = converted.roll(1, 1).reshape"),
        ("kernels_overlap.py", "weight gradients of joined products from the local slice alone", "llama", SEQUENCE,
         r"ctx\.save_for_backward\(converted,", "ctx.save_for_backward(x.repeat(1, 2, 1) if isinstance(src, S) else x,"),
        ("kernels_overlap.py", "the first joined product's term is counted twice", "llama", TENSOR,
         r"total = grad @ weight if", "total = 2 * (grad @ weight) if"),
        ("kernels_overlap.py", "the sum of joined products runs over all ranks", "llama", DATA_TENSOR,
         r"group_of\(\*axes\)", "dist.group.WORLD"),
        ("kernels_overlap.py", "the gradient of other readers of the converted input is left out", "parallel blocks", TENSOR,
         r"_input_gradient_term\(rows, weights, \*grads\[count:\]\)", "_input_gradient_term(rows, weights)"),
        ("kernels_overlap.py", "slices are scattered along the first dim", "llama", SEQUENCE,
         r"torch\.cat\(slices\) if self\.dim else terms", "terms"),
        ("kernels_overlap.py", "a joined product's bias gets the gradient of one row", "gpt2", TENSOR,
         r"grad\.sum\(0\)", "grad[0]"),
        ("halves.py", "what a half sends is not awaited", "llama", HALVED, r"work\.wait\(\)", "pass"),
        ("halves.py", "both halves are the first", "llama", HALVED, r"pair\[half\] for pair", "pair[0] for pair"),
        ("halves.py", "the halves are joined in the other order", "llama", HALVED,
         r"whole = torch\.cat\(list\(pair\), dim\)|return torch\.cat\(list\(pair\), dim\)", "return torch.cat(list(pair)[::-1], dim)"),
        ("halves.py", "gradients of a half count twice", "llama", HALVED, r"return finish\(\), None", "return 2 * finish(), None"),
        ("halves.py", "the gradient of a half's replicated input is not summed", "llama", TENSOR | {"overlap": "halves"},
         r"reduced if dst is R else _no_collective", "_no_collective"),
        ("halves.py", "a half's gradient is the one that was issued last", "llama", HALVED,
         r"ctx\.conversion\.finish_backward = ctx\.conversion\.backward\(grad\)",
         "ctx.conversion.finish_backward = lambda: AsyncConversion.last()\n"
         "        AsyncConversion.last = staticmethod(ctx.conversion.backward(grad))"),
        ("halves.py", "a half's sums are scattered along the first dim", "llama", HALVED,
         r"torch\.stack\(x\.chunk\(dist\.get_world_size\(group\), dim\)\) if dim else x\.contiguous\(\)", "x.contiguous()"),
        ("kernels_norm.py", "batch norm of each rank's own mean", "resnet", DATA, r"mean = means\.mean\(0\)", "mean = mean.clone()"),
        ("kernels_norm.py", "variance without the spread of the ranks' means", "resnet", DATA,
         r" \+ \(means - mean\)\.square\(\)\)", ")"),
        ("kernels_ring.py", "ring without the correction of earlier blocks", "masked", {"ring": 2},
         r"rescale = \(running_max\[rows\] - base\)\.exp_\(\)", "rescale = torch.ones_like(base)"),
        ("kernels_ring.py", "ring's kernels without the correction of earlier blocks", "llama", {"ring": 2},
         r"rescale = \(lse\[\.\.\., rows\] - total\)\.exp_\(\)\.unsqueeze\(-1\)", "rescale = torch.ones_like(total).unsqueeze(-1)"),
        ("kernels_ring.py", "ring's kernels with the gradient of their own step's result", "llama", {"ring": 2},
         r"row_lse = lse\[\.\.\., rows\]\.contiguous\(\)", "row_lse = torch.zeros_like(lse[..., rows])"),
        ("kernels_ring.py", "ring's gradient without the row sums", "masked", {"ring": 2},
         r"delta = \(grad\.to\(wide\) \* out\.to\(wide\)\)\.sum\(-1\)", "delta = 0 * (grad.to(wide) * out.to(wide)).sum(-1)"),
        ("parameters.py", "gradients are not summed over the data axis", "llama", DATA,
         r"self\._work = dist\.all_reduce\(self\._grads, group=self\._group, async_op=True\)", "pass"),
        ("parameters.py", "tied gradients are not summed over the stages", "gpt2", PIPELINE,
         r"dist\.all_reduce\(self\._grads, group=self\._world\.shared\[self\.shared\]\)", "pass"),
        ("fsdp.py", "ZeRO averages gradients", "llama", ZERO_2,
         r"module\.set_gradient_divide_factor\(1\.0\)", "module.set_gradient_divide_factor(2.0)"),
        ("parameters.py", "every rank's piece under ZeRO is the first", "llama", {"data": 2, "zero": 1},
         r"index = dist\.get_rank\(self\._group\) if self\._scattered else 0", "index = 0"),
        ("parameters.py", "ZeRO 1 keeps the last microbatch's gradient only", "llama", {"data": 2, "zero": 1, "microbatches": 2},
         r"grad\.add_\(gradient\)", "grad.copy_(gradient)"),
        ("parameters.py", "the server does not broadcast", "gpt2", SERVER,
         r"self\._sending = dist\.broadcast\(.*\)", "pass"),
        ("parameters.py", "the server's own gradient counts twice", "gpt2", SERVER,
         r"self\._work = dist\.reduce\(", r"self._grads *= 1 + self._has_masters; self._work = dist.reduce("),
        ("parameters.py", "another rank than the server updates", "gpt2", SERVER,
         r"dist\.get_rank\(self\._group\) == 0", "dist.get_rank(self._group) == 1"),
        ("parameters.py", "the sum is on another rank than the server", "gpt2", SERVER, r"group_dst=0", "group_dst=1"),
        ("parameters.py", "another rank than the server broadcasts", "gpt2", SERVER, r"group_src=0", "group_src=1"),
        ("parameters.py", "replicas are averaged over the wrong group", "llama", AVERAGED | DATA_TENSOR,
         r"world\.group\(self\._local_sgd_axes\)", 'world.group(("tensor",))'),
        ("parameters.py", "replicas are added up, not averaged", "gpt2", AVERAGED,
         r"own\.div_\(dist\.get_world_size\(self\._replicas\)\)", "own"),
        ("trainer.py", "replicas are not averaged", "gpt2", AVERAGED, r"group\.average\(\)", "pass"),
        ("pipeline.py", "the schedule divides gradients by the microbatches", "llama", PIPELINE_ZERO,
         r'"scale_grads": False', '"scale_grads": True'),
        ("microbatches.py", "the losses of microbatches apart are added, not averaged", "resnet by microbatch",
         {"data": 2, "microbatches": 2},
         r"term = loss / self\.microbatches if", "term = loss if"),
        ("share.py", "every rank takes the first slice of the batch", "llama", DATA,
         r"index \* extent, extent\)", "0 * extent, extent)"),
        ("microbatches.py", "the loss of one rank is taken for the whole", "llama", DATA,
         r"if type_ == spmd\.P and", "if type_ == spmd.R and"),
        ("collectives.py", "slices of a gradient are put together in the wrong order", "pairs",
         GRID, r"sorted\(own, key=lambda item: item\[0\]\)", "sorted(own, key=lambda item: -item[0])"),
        ("world.py", "every rank holds the first slice of a parameter", "llama", TENSOR,
         r"index \* \(extent // size\)", "0 * (extent // size)"),
        ("world.py", "a parameter's slices are nested in the wrong order", "llama",
         GRID, r"for axis, dim in self\.sharded:", "for axis, dim in reversed(self.sharded):"),
        ("processes.py", "gradients are reduced over the wrong group of ranks", "llama", TWO_AXES,
         r"ranks\.permute\(\*outer, \*inner\)", "ranks.permute(*inner, *outer)"),
        ("world.py", "the gradients of a stage's copies are not summed", "llama", BOTH_WAYS,
         r"for axis in \(MIRROR, \*layout\.replicated\)", "for axis in layout.replicated"),
        ("world.py", "ranks that do not mirror each other sum their gradients", "llama", BOTH_WAYS | {"pipeline": 4},
         r"ranks\[half:\]\.flip\(0\)", "ranks[half:]"),
        ("parameters.py", "the gradients of a stage's copies are summed twice", "llama", BOTH_WAYS,
         r"self\._work = dist\.all_reduce\(self\._grads, group=self\._group, async_op=True\)",
         "dist.all_reduce(self._grads, group=self._group); dist.all_reduce(self._grads, group=self._group)"),
        ("parameters.py", "under ZeRO 1 each copy of a stage updates by its own microbatches", "llama", BOTH_WAYS_ZERO,
         r"self\._work, self\._over_copies = dist\.all_reduce\(self\._sum, group=self\._copies, async_op=True\), True",
         "self._work, self._over_copies = None, True"),
        ("parameters.py", "tied gradients of one device's two stages are not added up", "gpt2", BOTH_WAYS,
         r"self\._grads \+= other\._grads", "pass"),
        ("chimera.py", "both directions run the first half of the microbatches", "llama", BOTH_WAYS,
         r"inputs\[step\.microbatch\]", "inputs[step.microbatch % (len(inputs) // 2)]"),
        ("chimera.py", "a stage sends its inputs back instead of their gradients", "llama", BOTH_WAYS,
         r"torch\.zeros_like\(tensor\) if tensor\.grad is None else tensor\.grad\.contiguous\(\)", "tensor.detach()"),
        ("microbatches.py", "the loss is that of one direction", "llama", BOTH_WAYS,
         r"dist\.all_reduce\(total, group=self\.world\.group\(\(MIRROR,\)\)\)", "pass"),
        ("buffers.py", "running statistics are those of one direction", "resnet by microbatch", BOTH_WAYS | {"microbatches": 2},
         r"dist\.all_reduce\(mean, group=.*", "mean *= copies"),
    )
)  # fmt: skip


# -- rules ------------------------------------------------------------------------------------------------------------

RULES = (
    rule("linear: the bias is added once per rank", "gpt2", TENSOR, "aten.linear", "* k, n k, n -> * n"),
    rule("linear: the contracted dim stays", "llama", TENSOR, "aten.linear", "* k, k n, +n -> * n"),
    rule("layer_norm: the normalised dim may be sharded", "gpt2", TENSOR, "aten.layer_norm", views.elementwise()),
    rule("softmax: its dim may be sharded", "gpt2", TENSOR, "aten.softmax", views.elementwise()),
    rule("gelu of a sum is the sum of gelus", "gpt2", TENSOR, "aten.gelu", "* -> * ; linear 0"),
    rule("a product of two sums is the sum of products", "llama", TENSOR, "aten.mul", views.elementwise("linear 0+1")),
    rule("a power of a sum is the sum of powers", "llama", TENSOR, "aten.pow", views.elementwise("linear 0")),
    rule("mm: the contracted dim is the wrong one", "mlp", TENSOR, "aten.mm", "m k, n k -> m n ; linear 0 1"),
    rule("bmm: examples are summed over", "mlp", TENSOR, "aten.bmm", "b m k, b k n -> m n"),
    rule("max over a sharded dim is the sum of the maxima", "mlp", TENSOR, "aten.amax", views.reduction(linear=True)),
    rule("cumsum may be sharded along its dim", "mlp", TENSOR, "aten.cumsum", views.elementwise()),
    rule("transpose keeps the dims where they are", "llama", TENSOR, "aten.transpose", views.elementwise()),
    rule("embedding: rows may be sharded without a mask", "gpt2", TENSOR, "aten.embedding", views.elementwise()),
    rule(
        "a subtraction's second operand is not linear with the first",
        "mlp",
        TENSOR,
        "aten.sub",
        views.elementwise("linear 0"),
    ),
)


# -- conversions and passes -------------------------------------------------------------------------------------------


def _steps_without(source: str, target: str) -> Any:
    real = passes.conversions.conversion_steps

    def steps(*args: Any) -> Any:
        return tuple(s for s in real(*args) if (s.source.kind, s.target.kind) != (source, target))

    return steps


def _sum(node: Any, shapes: Any) -> Any:
    target, args, kwargs, _ = _MEAN(node, shapes)
    return target, args, kwargs, None


_MEAN = passes.localise._mean

# The outer axis turns from data to tensor and back, while the inner one holds slices of the same dim.
INNER_HELD = TWO_AXES | {
    "strategies": {i: Strategy((Role.DATA if i in (0, 5) else Role.TENSOR, Role.DATA)) for i in range(6)}
}

HIDDEN = {i: Strategy((Role.TENSOR_HIDDEN,)) for i in range(6)}  # norms over slices of the hidden dim

PASSES = (
    patched("I to R is left out: gradients of replicated inputs are not summed", "llama", WAITING,
            passes.communication, "conversion_steps", _steps_without("I", "R")),
    patched("P to I is left out", "llama", TENSOR, passes.communication, "conversion_steps", _steps_without("P", "I")),
    patched("S to R is left out", "llama", SEQUENCE, passes.communication, "conversion_steps", _steps_without("S", "R")),
    patched("S to S is left out", "llama", {"ulysses": 2}, passes.communication, "conversion_steps", _steps_without("S", "S")),
    patched("an outer axis changes a dim that an inner one holds", "llama", INNER_HELD,
            passes.conversions, "_inner_shards", lambda *_: []),
    patched("a mean over a sharded dim is the sum", "llama", {"mesh": make_mesh(("tensor", 2)), "strategies": HIDDEN},
            passes.localise, "_mean", _sum),
)  # fmt: skip

MUTATIONS = (*ILL_TYPED, *UNSEEN, *RUNTIME, *RULES, *PASSES)


# -- one mutation -----------------------------------------------------------------------------------------------------


def caught(mutation: Mutation, pools: dict[int, WorkerPool]) -> dict[str, str]:
    """Who catches the mutation, and what they say."""
    given = subject(mutation.model)
    found: dict[str, str] = {}
    _forget()
    try:
        with (mutation.patch or contextlib.nullcontext)(), tempfile.TemporaryDirectory() as root:
            with _catching("rules", found, (RuleError,)):
                _check_rule(mutation.op)
            folder = Path(root) / "program"
            local: Any = None
            with _catching("passes", found):
                plan = manual_plan(given.graph, **mutation.options)
                local = emit(given.graph, plan, folder)
            if local is None:
                return found
            if mutation.file:
                break_file(file_of(folder, mutation.file), mutation)
            with _catching("structure", found):
                check_collectives(local)
            with _catching("types", found):
                check_program(folder)
            with _catching("exactness", found):
                _run(given, folder, pools.setdefault(plan.device_count, WorkerPool(plan.device_count)))
    finally:
        _forget()
    return found


def _forget() -> None:
    """Empty the caches of what a mutation may change."""
    _solve.cache_clear()
    passes.conversions.conversion_steps.cache_clear()


@contextlib.contextmanager
def _catching(who: str, found: dict[str, str], kinds: tuple[type[Exception], ...] = FAULTS) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        found[who] = f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _check_rule(op: str) -> None:
    for given in samples():
        if op and given.name == op:
            check(given)


def break_file(path: Path, mutation: Mutation) -> None:
    """Put the mutation into an emitted file; it must be there, and change."""
    source = path.read_text()
    changed = re.sub(mutation.pattern, mutation.replacement, source)
    if changed == source:
        raise LookupError(f"{mutation.name}: {mutation.pattern} is not in {mutation.file}")
    path.write_text(changed)


def _run(given: Any, folder: Path, pool: WorkerPool) -> None:
    state = folder / "initial.pt"
    torch.save(given.state, state)
    answers = pool.run("autopar.verify.remote:gradients", str(folder), str(state), given.batch)
    error = compare_step(given, *answers[0])
    assert error.exact, f"{error.where} is off by {error.value:.1e}"


# -- the command ------------------------------------------------------------------------------------------------------


def line_of(mutation: Mutation, pools: dict[int, WorkerPool]) -> dict[str, Any]:
    plan = describe(manual_plan(subject(mutation.model).graph, **mutation.options))
    line = {"mutation": mutation.name, "breaks": mutation.breaks, "model": mutation.model, "plan": plan}
    return line | {"caught": caught(mutation, pools)}


def line_of_capture(fault: capture_faults.Fault) -> dict[str, Any]:
    said = capture_faults.found(fault).splitlines()[:1]
    line = {"mutation": fault.name, "breaks": "capture", "model": fault.model.__name__, "plan": "one device"}
    return line | {"caught": {"capture": said[0]} if said else {}}


def page(lines: list[dict[str, Any]]) -> str:
    counts = {who: sum(who in line["caught"] for line in lines) for who in CATCHERS}
    total = sum(bool(line["caught"]) for line in lines)
    rows = "".join(
        f"| {line['mutation']} | {line['breaks']} | {' | '.join('x' if who in line['caught'] else '' for who in CATCHERS)} |\n"
        for line in lines
    )
    return f"""# Mutations

{len(lines)} faults are injected one at a time, and {total} are detected. The columns are the checks that detect them:

- *rules*: a sharding rule is executed on shards;
- *passes*: emission fails, because shapes contradict types;
- *structure*: the emitted collectives are compared with the priced ones;
- *types*: the type checker of programs;
- *exactness*: a program's numbers are compared with eager PyTorch;
- *capture*: `compile` compares the captured graph with the model.

| fault | in | {" | ".join(f"{who} ({counts[who]})" for who in CATCHERS)} |
|---|---|{"---|" * len(CATCHERS)}
{rows}
Made by `make report NAME=mutations`, from the lines of [mutations.jsonl](mutations.jsonl), which have the messages. Do not edit.
"""


def main() -> int:
    from results import quiet
    from rich.console import Console
    from rich.progress import track

    quiet()
    torch.set_num_threads(1)
    pools: dict[int, WorkerPool] = {}
    console = Console(stderr=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "only", nargs="?", choices=["capture"], help="the faults of this kind alone; the other lines stay"
    )
    if parser.parse_args().only == "capture":
        lines = [line for line in map(json.loads, RESULTS.read_text().splitlines()) if line["breaks"] != "capture"]
    else:
        try:
            lines = [line_of(m, pools) for m in track(MUTATIONS, "mutations", console=console)]
        finally:
            for pool in pools.values():
                pool.close()
    lines += [line_of_capture(fault) for fault in track(capture_faults.FAULTS, "capture", console=console)]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    RESULTS.with_suffix(".md").write_text(page(lines))
    missed = [line["mutation"] for line in lines if not line["caught"]]
    print(f"{len(lines) - len(missed)} of {len(lines)} mutations are caught", *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
