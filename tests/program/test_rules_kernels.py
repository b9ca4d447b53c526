"""The kernels: on real process groups against one process in float64, and under the type checker on a fake one."""

from __future__ import annotations

import importlib.util
from math import prod

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types.checker import typecheck
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import types
from autopar.checks.rules import Sample, build
from autopar.checks.samples import samples
from autopar.emit.experts import body_method, name_bodies
from autopar.emit.expressions import Text, expression
from autopar.ops.experts import Experts
from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.operands import operands, shape_of
from autopar.program import flattened, kernels, kernels_logits, kernels_vocab
from autopar.program.mesh_axes import on_mesh
from autopar.rules import candidates
from passes.localise import apply, local_call

# spmd-types calls names of collectives that torch 2.13 deprecates, and runs dropout on CPU DTensors to follow its dims
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:spmd_types"),
    pytest.mark.filterwarnings("ignore:DTensor random operators"),
]

AXES = {"I": spmd.I, "R": spmd.R, "P": spmd.P}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ids(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


# -- on ranks: module-level functions that the worker processes run ---------------------------------------------------


def first_ranks(*shape: int) -> DeviceMesh | None:
    """A mesh of the first ranks with axes t, or a and t; None on the others, which have nothing to do."""
    mesh = DeviceMesh("cpu", torch.arange(prod(shape)).view(shape), mesh_dim_names=("a", "t")[-len(shape) :])
    return mesh if dist.get_rank() < prod(shape) else None


def vocabulary_loss(smoothing: float, *shape: int) -> None:
    """The loss with the vocabulary on one axis, or on two, against F.cross_entropy; gradients of every slice."""
    mesh, world = first_ranks(*shape), prod(shape)
    if mesh is None:
        return
    names = mesh.mesh_dim_names
    logits, labels = values(5, 3, 4 * world) * 4, ids(4 * world, 5, 3)
    labels[0, :2] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    expected.backward()
    mine = logits.chunk(world, -1)[dist.get_rank()].clone().requires_grad_()
    several = {names: dist.group.WORLD} if shape == (2, 2) else {}
    with on_mesh(mesh, several):
        axis = names[0] if len(names) == 1 else names
        loss = kernels_vocab.vocab_parallel_cross_entropy_sum(mine, labels, axis, -100, smoothing)
        loss.backward()
    close(loss.detach(), expected.detach())
    close(mine.grad, whole.grad.chunk(world, -1)[dist.get_rank()])


def vocabulary_loss_is_stable() -> None:
    """Logits of 1e4, and a dtype of 16 bits: accumulated in 32."""
    mesh, world, rank = first_ranks(2), 2, dist.get_rank()
    if mesh is None:
        return
    labels = ids(4 * world, 6)
    with spmd.set_current_mesh(mesh):
        large = (values(6, 4 * world) * 1e4).chunk(world, -1)[rank].contiguous()
        assert torch.isfinite(kernels_vocab.vocab_parallel_cross_entropy_sum(large, labels, "t"))
        for label in (-1, 4 * world):  # F.cross_entropy raises
            outside = labels.clone()
            outside[0] = label
            assert kernels_vocab.vocab_parallel_cross_entropy_sum(large, outside, "t").isnan()
            assert kernels_vocab.vocab_parallel_cross_entropy_sum(large, outside, "t", label).isfinite()
        half = values(6, 4 * world).bfloat16()
        mine = half.chunk(world, -1)[rank].clone().requires_grad_()
        loss = kernels_vocab.vocab_parallel_cross_entropy_sum(mine, labels, "t")
        loss.backward()
    exact = F.cross_entropy(half.float(), labels, reduction="sum")
    assert abs(float(loss) - float(exact)) <= 0.01 * float(exact)
    assert mine.grad.dtype == torch.bfloat16


def embedding(padding: int | None, *shape: int) -> None:
    """Rows on one axis or two: the terms add up to F.embedding, and each slice gets its rows' gradient."""
    mesh, world, rank = first_ranks(*shape), prod(shape), dist.get_rank()
    if mesh is None:
        return
    names = mesh.mesh_dim_names
    weight, rows, g = values(3 * world, 5), ids(3 * world, 4, 6), values(4, 6, 5, seed=1)
    whole = weight.clone().requires_grad_()
    expected = F.embedding(rows, whole, padding)
    expected.backward(g)
    mine = weight.chunk(world, 0)[rank].clone().requires_grad_()
    with spmd.set_current_mesh(mesh):
        out = kernels_vocab.masked_embedding(rows, mine, names[0] if len(names) == 1 else names, padding)
        for name in names:
            out = spmd.all_reduce(out, name, src=spmd.P, dst=spmd.I)
        out.backward(g)
    close(out.detach(), expected.detach())
    close(mine.grad, whole.grad.chunk(world, 0)[rank])


def batch_loss(smoothing: float, world: int) -> None:
    """Examples sharded: the terms add up, ignored labels differ between ranks."""
    mesh, rank = first_ranks(world), dist.get_rank()
    if mesh is None:
        return
    logits, labels = values(2 * world, 3, 7), ids(7, 2 * world, 3)
    labels[0] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    expected.backward()
    mine = logits.chunk(world)[rank].clone().requires_grad_()
    with spmd.set_current_mesh(mesh):
        term = kernels.cross_entropy_sum(
            mine, labels.chunk(world)[rank], label_smoothing=smoothing, partial_axes=("t",)
        )
        loss = spmd.all_reduce(term, "t", src=spmd.P, dst=spmd.I)
        loss.backward()
    close(loss.detach(), expected.detach())
    close(mine.grad, whole.grad.chunk(world)[rank])


def growing_dim(world: int) -> None:
    """expand R -> S: the gradients of the ranks add up to the whole one."""
    mesh, rank = first_ranks(world), dist.get_rank()
    if mesh is None:
        return
    x, g = values(1, 3), values(2 * world, 4, 3, seed=1)
    whole = x.clone().requires_grad_()
    whole.unsqueeze(1).expand(2 * world, 4, 3).backward(g)
    mine = x.clone().requires_grad_()
    with spmd.set_current_mesh(mesh):
        entered = spmd.convert(mine, "t", src=spmd.I, dst=spmd.R)
        out = kernels.expand(entered.unsqueeze(1), [2, 4, 3], ("t", None, None))
        out.backward(g.chunk(world)[rank])
    close(mine.grad, whole.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_vocabulary_loss(workers4, smoothing, shape):
    workers4.run("test_rules_kernels:vocabulary_loss", smoothing, *shape)


def test_vocabulary_loss_is_stable(workers4):
    workers4.run("test_rules_kernels:vocabulary_loss_is_stable")


@pytest.mark.parametrize(("padding", "shape"), [(None, (2,)), (2, (3,)), (7, (2, 2))])
def test_embedding(workers4, padding, shape):
    workers4.run("test_rules_kernels:embedding", padding, *shape)


@pytest.mark.parametrize(("smoothing", "world"), [(0.0, 2), (0.1, 3)])
def test_batch_loss(workers4, smoothing, world):
    workers4.run("test_rules_kernels:batch_loss", smoothing, world)


@pytest.mark.parametrize("world", [2, 3])
def test_growing_dim(workers4, world):
    workers4.run("test_rules_kernels:growing_dim", world)


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_its_seed():
    x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    before = torch.get_rng_state()
    once, again, other = kernels.dropout(x, 0.25, 1), kernels.dropout(x, 0.25, 1), kernels.dropout(x, 0.25, 2)
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(once.detach().unique().tolist()) == {0.0, 1 / 0.75} and abs(float(once.detach().mean()) - 1) < 0.05
    (gradient,) = torch.autograd.grad(once.sum(), x)
    assert torch.equal(gradient, once.detach())
    assert kernels.dropout(x, 0.0, 1) is x


def test_attention_dropout_is_a_function_of_its_seed():
    q, k, v = values(2, 2, 8, 4), values(2, 2, 8, 4, seed=1), values(2, 2, 8, 4, seed=2)
    before = torch.get_rng_state()
    once, again, other = (kernels.attention(q, k, v, None, 0.5, True, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert torch.equal(torch.get_rng_state(), before)


# -- under the type checker -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    """A 2 x 2 mesh on the fake process group, and the type checker's current mesh."""
    dist.init_process_group("fake", rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "t"))
    with spmd.set_current_mesh(mesh):
        yield mesh
    dist.destroy_process_group()


def typed(x: torch.Tensor, t: spmd.PerMeshAxisSpmdType = spmd.R, d: spmd.PerMeshAxisSpmdType = spmd.R) -> torch.Tensor:
    if x.is_floating_point():
        with spmd.no_typecheck():
            x = x.detach().clone().requires_grad_()
    return spmd.assert_type(x, {"t": t, "d": d})


def types_of(x: torch.Tensor) -> tuple[dict[str, str], list[str]]:
    names = spmd.current_mesh_names()
    found = spmd.get_local_type(x)
    spec = spmd.get_partition_spec(x) or [None] * x.ndim
    return {name: found.get(axis, spmd.R).name for name, axis in names.items()}, [_name(entry, names) for entry in spec]


def _name(entry, names) -> str:
    entry = entry if isinstance(entry, tuple) else (entry,)
    return "".join(name for e in entry for name, axis in names.items() if axis == e)


S, R, P, I = spmd.S, spmd.R, spmd.P, spmd.I  # noqa: E741


def test_reshape_splits_heads(mesh):
    x = typed(values(2, 3, 8), S(2), S(0))
    with typecheck(local=False):
        heads = kernels.reshape(x, [2, 3, 2, 4], ("d", None, "t", None))
        merged = kernels.reshape(heads.transpose(1, 2), [2, 2, 12], ("d", "t", None))
        with pytest.raises(spmd.SpmdTypeError, match="reshape"):
            kernels.reshape(x, [2, 3, 2, 4], ("d", None, None, "t"))
        with pytest.raises(spmd.SpmdTypeError, match="reshape"):
            kernels.reshape(x, [6, 8], ("t", "d"))
        with pytest.raises(spmd.SpmdTypeError, match="reshape"):
            kernels.reshape(x, [2, 3, 2, 4], ("d", None, None, None))
    assert types_of(heads) == ({"d": "V", "t": "V"}, ["d", "", "t", ""])
    assert types_of(merged) == ({"d": "V", "t": "V"}, ["d", "t", ""])


def test_expand_types(mesh):
    with typecheck(local=False):
        out = kernels.expand(typed(values(1, 3), R, R), [2, 4, 3], ("d", "t", None))
        kept = kernels.expand(typed(values(4, 1), S(0), R), [2, 4, 3], (None, "t", None))
        with pytest.raises(spmd.SpmdTypeError, match="expand"):
            kernels.expand(typed(values(4, 1), S(0), R), [2, 4, 3], (None, None, None))
        with pytest.raises(spmd.SpmdTypeError):
            kernels.expand(typed(values(1, 3), I, R), [4, 3], ("t", None))
    assert types_of(out) == ({"d": "V", "t": "V"}, ["d", "t", ""])
    assert types_of(kept) == ({"d": "R", "t": "V"}, ["", "t", ""])


def test_attention_types(mesh):
    q, k = typed(values(2, 4, 5, 4), S(1), S(0)), typed(values(2, 2, 5, 4), S(1), S(0))
    with typecheck(local=False):
        out = kernels.attention(q, k, k, is_causal=True, enable_gqa=True)
        rows = kernels.attention(typed(values(2, 2, 5, 4), S(2)), typed(values(2, 2, 5, 4)), typed(values(2, 2, 5, 4)))
        for wrong in (S(2), R):
            with pytest.raises(spmd.SpmdTypeError, match="attention"):
                kernels.attention(q, typed(values(2, 2, 5, 4), wrong, S(0)), k, is_causal=True, enable_gqa=True)
        with pytest.raises(spmd.SpmdTypeError, match="attention"):
            kernels.attention(
                typed(values(2, 2, 5, 4), S(2)), typed(values(2, 2, 5, 4)), typed(values(2, 2, 5, 4)), is_causal=True
            )
        with pytest.raises(spmd.SpmdTypeError, match="mask"):
            kernels.attention(
                typed(values(2, 2, 5, 4), S(0)), *[typed(values(2, 2, 5, 4), S(0))] * 2, typed(values(2, 1, 5, 5))
            )
    assert types_of(out) == ({"d": "V", "t": "V"}, ["d", "t", "", ""])
    assert types_of(rows) == ({"d": "R", "t": "V"}, ["", "", "t", ""])


def test_loss_and_embedding_types(mesh):
    logits, labels = typed(values(2, 3, 4), S(2), S(0)), typed(ids(8, 2, 3), R, S(0))
    with typecheck(local=False):
        loss = kernels_vocab.vocab_parallel_cross_entropy_sum(logits, labels, "t", partial_axes=("d",))
        plain = kernels.cross_entropy_sum(
            typed(values(2, 3, 8), S(1), S(0)), typed(ids(8, 2, 3), S(1), S(0)), partial_axes=("d", "t")
        )
        out = kernels_vocab.masked_embedding(labels, typed(values(4, 6), S(0)), "t")
        with pytest.raises(spmd.SpmdTypeError):
            kernels_vocab.masked_embedding(labels, typed(values(4, 6), R), "t")
        untold = kernels.cross_entropy_sum(typed(values(2, 3, 8), S(1)), typed(ids(8, 2, 3), S(1)))
    assert types_of(loss)[0] == {"d": "P", "t": "I"}
    assert types_of(plain)[0] == {"d": "P", "t": "P"}
    assert types_of(out) == ({"d": "V", "t": "P"}, ["d", "", ""])
    assert types_of(untold)[0]["t"] == "V"


def test_dropout_types(mesh):
    with typecheck(local=False):
        out = kernels.dropout(typed(values(2, 3), S(1), I), 0.5, 1)
        with pytest.raises(spmd.SpmdTypeError, match="dropout"):
            kernels.dropout(typed(values(2, 3), P), 0.5, 1)
    assert types_of(out) == ({"d": "I", "t": "V"}, ["", "t"])


def test_a_flattened_conversion_takes_numbers_of_either_type(mesh):
    """Without a gradient, I and R are the same, so that none is converted to the other, and axes may come with either."""
    with typecheck(local=False), on_mesh(mesh, {("d", "t"): dist.group.WORLD}):
        out = flattened.convert(typed(ids(8, 4, 3), R, I), ("d", "t"), src=I, dst=S(0))
    assert types_of(out) == ({"d": "V", "t": "V"}, ["dt", ""])


# Ops whose text does not run yet: those that draw take a seed, the others stand in bodies of mixtures alone, which run in a local region.
DRAWING = {"aten.dropout", "kernels_random.bernoulli", "kernels_random.normal", "kernels_random.uniform"}
UNWRITTEN = {*DRAWING, "kernels_experts.grouped_linear", "kernels_experts.of_rows"}


def test_checker_accepts_every_candidate(mesh, tmp_path):
    """Each candidate's local call, in the text that is emitted for it, types under ``local=False`` as the rule says, and
    computes what the graph's op does."""
    cases, lines = (
        {},
        [
            "import torch",
            "import torch.nn.functional as F",
            "from autopar.program import kernels, kernels_ctc, kernels_experts, kernels_fp8, kernels_logits, kernels_norm, "
            "kernels_random, kernels_rnn",
            "",
        ],
    )
    for given in samples():
        node, tensors = build(given)
        if any(isinstance(x, tuple) for x in tensors):
            continue
        for candidate in candidates(node):
            key = op_name(node), types_text(candidate)
            if (
                candidate.kernel is None
                and candidate.extent % 2 == 0
                and key not in cases
                and candidate.result != types.I
            ):
                lines += _emitted(f"call{len(cases)}", node, candidate)
                cases[key] = (node, tensors, candidate, given)
    (tmp_path / "calls.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("calls", tmp_path / "calls.py")
    calls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(calls)
    refused = set()
    for i, ((name, text), case) in enumerate(cases.items()):
        try:
            _typecheck(getattr(calls, f"call{i}"), *case)
        except Exception as error:  # the checker raises several kinds
            refused.add(name)
            print(name, text, type(error).__name__, str(error).splitlines()[0][:150], lines[4 + 3 * i + 1])
    assert refused <= UNWRITTEN
    assert len(cases) > 600


def types_text(candidate) -> str:
    return f"{', '.join(map(str, candidate.operands))} -> {candidate.result}"


def _emitted(name: str, node, candidate) -> list[str]:
    """The call as a function of its operands."""
    shapes = [_local(shape_of(o), t) for o, t in zip(operands(node), candidate.operands, strict=True)]
    result = _local(shape_of(node), candidate.result)
    partition = tuple("t" if i == candidate.result.dim else None for i in range(len(result)))
    target, args, kwargs, factor = local_call(node, shapes, result, partition)
    graph = fx.Graph()
    places = {o: graph.placeholder(o.name) for o in operands(node)}
    for o, shape in zip(operands(node), shapes, strict=True):
        places[o].meta["val"] = torch.empty(shape, dtype=o.meta["val"].dtype, device="meta")
    losses = kernels.cross_entropy_sum, kernels_logits.loss_in_slices
    if (target in losses or isinstance(target, Experts)) and candidate.result == types.P:
        kwargs = {**kwargs, "partial_axes": ("t",)}
    call = graph.call_function(target, fx.map_arg(args, places.get), fx.map_arg(kwargs, places.get))
    call.meta["val"] = node.meta["val"]
    bodies = name_bodies([call])
    text = expression(call, {place: Text(o.name) for o, place in places.items()}).text
    parameters = ", ".join(o.name for o in places)
    body = [line.removeprefix("    ") for op in bodies for line in body_method(op, f"{name}_body")]
    text = text.replace("self.expert_body", f"{name}_body").replace("self.training", "True")
    return [
        *body[2:],  # not an empty line and "@staticmethod"
        f"def {name}({parameters}):",
        f"    return {text}" if factor is None else f"    return ({text}) * {factor}",
        "",
    ]


def _typecheck(function, node, tensors, candidate, given: Sample) -> None:
    local = {}
    for i, (o, x, t) in enumerate(zip(operands(node), tensors, candidate.operands, strict=True)):
        x = (x.chunk(2, t.dim)[0] if t.sharded else x).detach().clone()
        x.requires_grad_((x.is_floating_point() or x.is_complex()) and i not in given.without_gradient)
        local[o.name] = spmd.assert_type(x, {"t": S(t.dim) if t.sharded else AXES[t.kind], "d": R})
    with typecheck(local=False):
        out = function(**local)
    if candidate.result == types.R and facts(node).kind is not OpKind.VALUE_INDEPENDENT:
        expected = apply((node.target, node.args, dict(node.kwargs), None), node, tensors)
        for x, y in zip(_tuple(out), _tuple(expected), strict=True):
            torch.testing.assert_close(x.detach(), y, equal_nan=True)
    for x in _tuple(out):
        found, spec = types_of(x)
        if candidate.result.sharded:
            assert spec[candidate.result.dim] == "t", (spec, str(candidate.result))
        else:
            assert found["t"] == candidate.result.kind, (found, str(candidate.result))


def _tuple(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _local(shape, t):
    return tuple(size // 2 if i == t.dim else size for i, size in enumerate(shape))


def test_linear_without_unit_dims_types(mesh):
    """DTensor refuses the plain product here: a dim of size one behind a sharded one."""
    weight, heads = typed(values(3, 4)), typed(values(6, 4), S(0), R)
    with typecheck(local=False):
        out = kernels.linear_without_unit_dims(typed(values(2, 1, 5, 4), R, S(0)), weight, [1])
        both = kernels.linear_without_unit_dims(typed(values(2, 1, 1, 4), R, S(0)), heads, [1, 2])
    assert (tuple(out.shape), *types_of(out)) == ((2, 1, 5, 3), {"d": "V", "t": "R"}, ["d", "", "", ""])
    assert (tuple(both.shape), *types_of(both)) == ((2, 1, 1, 6), {"d": "V", "t": "V"}, ["d", "", "", "t"])
    x = values(2, 1, 5, 4)
    assert torch.equal(kernels.linear_without_unit_dims(x, weight.detach(), [1]), F.linear(x, weight.detach()))
