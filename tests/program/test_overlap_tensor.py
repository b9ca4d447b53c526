"""The collective of a column-parallel product's input gradient: when it is issued and awaited, and what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exactness import subject
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from workers import WorkerPool

from autopar.emit import emit
from autopar.program import flattened, kernels, kernels_overlap
from autopar.program.mesh_axes import on_mesh
from autopar.run.folder import program_modules
from autopar.search.manual import manual_plan
from autopar.verify import remote

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:spmd_types")

BATCH, LENGTH, WIDTH, OUT = 2, 4, 6, 8


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert a.shape == b.shape and float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


# -- the trace --------------------------------------------------------------------------------------------------------

Event = tuple[str, tuple[int, ...]]


class _Traced:
    """A request whose wait is an event."""

    def __init__(self, work: Any, events: list[Event], shape: tuple[int, ...]) -> None:
        self._work, self._events, self._shape = work, events, shape

    def wait(self) -> None:
        self._events.append(("wait", self._shape))
        self._work.wait()


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Records every matrix product with the shape of its result."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).split(".")[1] in ("mm", "addmm", "addmm_"):
            self._events.append(("product", tuple(result.shape)))
        return result


@contextmanager
def traced() -> Iterator[list[Event]]:
    """The collectives that ``dist`` issues asynchronously, the waits for them and the matrix products, in order."""
    events: list[Event] = []

    def issuing(name: str, real: Callable[..., Any], which: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = real(*args, **kwargs)
            if not kwargs.get("async_op"):
                return work
            events.append((name, tuple(args[which].shape)))
            return _Traced(work, events, tuple(args[which].shape))

        return call

    with (
        mock.patch.object(dist, "all_reduce", issuing("all_reduce", dist.all_reduce, 0)),
        mock.patch.object(dist, "reduce_scatter_tensor", issuing("reduce_scatter", dist.reduce_scatter_tensor, 0)),
        _Products(events),
    ):
        yield events


# -- the kernel -------------------------------------------------------------------------------------------------------


def joined(
    sequence: bool, return_input: bool, trainable: tuple[bool, bool], unread: bool, again: bool
) -> tuple[list[Tensor | None], list[Tensor | None], list[Event]]:
    """Gradients of input, weights and biases of two products, as the kernel and as the plain conversion compute them; and the trace of
    the kernel's backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("t",))
    rank, n = dist.get_rank(), dist.get_world_size()
    src = spmd.S(1) if sequence else spmd.I
    x = values(BATCH, LENGTH, WIDTH, seed=1)
    x = x.chunk(n, 1)[rank] if sequence else x
    weights = [
        values(OUT, WIDTH, seed=2 + rank),
        values(WIDTH, 3, seed=9 + rank).t(),
    ]  # the second one is a transposed view
    biases = [values(OUT, seed=5 + rank), None]
    read = values(BATCH, LENGTH, WIDTH, seed=40 + rank)
    found: list[list[Tensor | None]] = []
    events: list[Event] = []

    def results(own: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        return kernels_overlap.linears(
            own, operands[:2], [operands[2], None], axis="t", src=src, return_input=return_input
        )

    def plain(own: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        if sequence:
            converted = spmd.all_gather(own, "t", src=src, dst=spmd.R)
        else:
            converted = kernels.dense_gradient(spmd.convert(own, "t", src=src, dst=spmd.R))
        products = F.linear(converted, operands[0], operands[2]), F.linear(converted, operands[1])
        return (*products, converted) if return_input else products

    for compute in (results, plain):
        own = x.clone().requires_grad_()
        given = [w.detach().requires_grad_(wanted) for w, wanted in zip(weights, trainable, strict=True)]
        bias = biases[0].clone().requires_grad_()
        with on_mesh(mesh):
            out = checkpoint(compute, own, *given, bias, use_reentrant=False) if again else compute(own, *given, bias)
            loss = sum(
                (o * values(*o.shape, seed=20 + i + rank)).sum() for i, o in enumerate(out[:1] if unread else out[:2])
            )
            loss = loss + (out[2] * read).sum() if return_input else loss
            with traced() as seen:
                loss.backward()
        events = events or seen
        found.append([own.grad, *(w.grad for w in given), bias.grad])
    return found[0], found[1], events


@pytest.mark.parametrize("sequence", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("again", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("return_input", [False, True], ids=["alone", "other reader"])
@pytest.mark.parametrize(
    ("trainable", "unread"), [((True, True), False), ((True, False), False), ((True, True), True)],
    ids=["all", "one frozen", "one unread"],
)  # fmt: skip
def test_gradients_are_those_of_the_conversion_and_the_products(
    sequence: bool, again: bool, return_input: bool, trainable: tuple[bool, bool], unread: bool, workers2: WorkerPool
) -> None:
    for mine, plain, events in workers2.run(
        "test_overlap_tensor:joined", sequence, return_input, trainable, unread, again
    ):
        for a, b in zip(mine, plain, strict=True):
            close(a, b)
        names = [name for name, _ in events]
        issued, waited = names.index("reduce_scatter" if sequence else "all_reduce"), names.index("wait")
        assert names.count("wait") == 1
        # the terms of the input's gradient, then the collective, then the gradient of every trainable weight
        own = [
            shape
            for name, shape in events[:issued]
            if name == "product" and shape[0] == BATCH * LENGTH and shape[1] == WIDTH
        ]
        assert len(own) == (1 if unread else 2)
        of_weights = [shape for name, shape in events[issued:waited] if name == "product"]
        assert of_weights == ([(OUT, WIDTH)] if unread or not trainable[1] else [(OUT, WIDTH), (WIDTH, 3)])
        assert "product" not in names[waited:]


def scattered(dim: int) -> list[tuple[Tensor, Tensor]]:
    """The gradient of an input that two axes, flattened, shard along ``dim``; of the kernel and of the conversion."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = values(8, 4, 12, seed=1).chunk(4, dim)[dist.get_rank()]
    weight = values(OUT, 12, seed=2 + dist.get_rank())
    found = []
    for kernel in (True, False):
        own = x.clone().requires_grad_()
        with on_mesh(mesh, {("a", "b"): dist.group.WORLD}):
            if kernel:
                out = kernels_overlap.linear(own, weight.requires_grad_(), axis=("a", "b"), src=spmd.S(dim))
            else:
                out = F.linear(flattened.all_gather(own, ("a", "b"), src=spmd.S(dim), dst=spmd.R), weight)
            (out * values(*out.shape, seed=7 + dist.get_rank())).sum().backward()
        found.append((out.detach(), own.grad))
    return found


def test_what_is_sent_is_contiguous_whatever_the_other_readers_gradient_is() -> None:
    """NCCL refuses a tensor that isn't; the only row of a batch may come transposed."""
    others = torch.ones(1, WIDTH, LENGTH).transpose(1, 2)
    terms = kernels_overlap._input_gradient_term([None], [torch.ones(OUT, WIDTH)], others)
    assert terms is not None and terms.is_contiguous()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_of_several_axes_along_any_dim(dim: int, workers4: WorkerPool) -> None:
    for mine, plain in workers4.run("test_overlap_tensor:scattered", dim):
        for a, b in zip(mine, plain, strict=True):
            close(a, b)


# -- a program --------------------------------------------------------------------------------------------------------


def events_of_a_step(folder: str, state: str, batch: dict[str, Tensor]) -> list[Event]:
    with program_modules(folder):
        trainer = remote.open_trainer(folder, state)
        with traced() as events:
            trainer.forward_backward(batch)
    return events


@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"recompute": "selective"}, {"recompute": True}], ids=str)
def test_a_program_computes_weight_gradients_between_issue_and_wait(
    options: dict[str, Any], workers2: WorkerPool, tmp_path: Path
) -> None:
    """Of the four blocks of a Llama and of its head: query, key and value; gate and up; the logits."""
    given = subject("llama")
    emit(given.graph, manual_plan(given.graph, tensor=2, **options), tmp_path)
    state = tmp_path / "initial.pt"
    torch.save(given.state, state)
    name = "reduce_scatter" if options.get("sequence") else "all_reduce"
    for events in workers2.run("test_overlap_tensor:events_of_a_step", str(tmp_path), str(state), given.batch):
        between: list[list[tuple[int, ...]]] = []
        flying = False
        for what, shape in events:
            if what == name:
                assert not flying
                between.append([])
            elif what == "product" and flying:
                between[-1].append(shape)
            flying = what == name or (flying and what != "wait")
        assert not flying
        block = [[(32, 32), (32, 32)], [(16, 32), (8, 32), (8, 32)]]
        assert between == [[(48, 32)], *(4 * block)]


def test_without_overlap_a_program_issues_nothing_early(tmp_path: Path) -> None:
    given = subject("llama")
    emit(given.graph, manual_plan(given.graph, tensor=2, overlap="none"), tmp_path)
    assert not re.search(r"kernels_overlap", (tmp_path / "model.py").read_text())
