"""Measures ops and links in worker processes that all run at the same time: a core would be faster while the others are idle.

Every measurement returns a list of figures: ``{"name", "variant", "backward", "size", "unit", "samples"}``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from autopar.profile.sweep import MOVES
from autopar.program.collectives import ShardedReduceScatter, all_gather, backend_reduce_scatter, reduce_scatter
from autopar.run import remote

_BUDGET_S = {"cpu": 0.1, "cuda": 0.06}  # of one measurement, after a warm-up
_SAMPLES = (3, 40)  # minimum and maximum number per measurement
_MIN_SHARE = 0.1  # a difference of two noisy times counts as at least this fraction of the longer one
# Shorter runs are repeated back to back and timed as one sample. Processes that share a core get time slices of some milliseconds: a sample
# within one slice would show the speed of a process that runs alone.
_BACK_TO_BACK_S = {"cpu": 2e-2, "cuda": 2e-4}
_MAX_BACK_TO_BACK = 10_000
_BEYOND_CACHES = 1 << 26  # bytes of the operands of rotating copies: more than a core's caches
_COPIES = 64  # maximum copies of an op
_SEGMENT_S, _SEGMENTS, _BLOCKS = 5e-3, 10, 8  # compute before a collective; collectives in one sample; samples
_OVERLAPS = 4  # how often overlap is measured, because it is the noisiest figure
_device = torch.device("cpu")
_groups: dict[int, dist.ProcessGroup] = {}  # group size -> this rank's group

Figures = list[dict[str, Any]]
Op = tuple[Callable[[], Tensor], list[Tensor]]
"""An op, and the operands that need a gradient."""


def join(device: str) -> None:
    """Initialise process groups of every divisor of the world size over adjacent ranks."""
    global _device
    remote.join(device, timeout_s=600)
    rank, count = dist.get_rank(), dist.get_world_size()
    _device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    for members in range(2, count + 1):
        if count % members == 0:
            for first in range(0, count, members):
                group = dist.new_group(list(range(first, first + members)))
                if first <= rank < first + members:
                    _groups[members] = group


def measure(function: str, arguments: dict[str, Any]) -> Figures:
    """Return the figures of a ``sweep.Task``: call the function ``_FUNCTION`` of this module with ``arguments``."""
    dist.barrier()
    torch.manual_seed(0)
    figures: Figures = globals()[f"_{function}"](**arguments)
    return figures


def _seconds(
    run: Callable[[], Any], group_size: int = 1, warmups: int = 1, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return samples of the seconds (by ``clock``) that ``run`` takes, after ``warmups`` warm-up runs. A sample is the mean of back-to-back
    runs. If ``run`` is a collective over ``group_size`` ranks, all ranks agree on the number of runs."""
    for _ in range(warmups):
        run()
    _wait()
    start = time.perf_counter()
    run()
    _wait()
    once = time.perf_counter() - start
    if group_size > 1:
        once = _all_reduced(once, dist.ReduceOp.MAX)
    kind = _device.type
    inner = max(1, min(_MAX_BACK_TO_BACK, round(_BACK_TO_BACK_S[kind] / max(once, 1e-7))))
    least, most = _SAMPLES
    samples = []
    for _ in range(max(least, min(most, int(_BUDGET_S[kind] / max(once * inner, 1e-7))))):
        start = clock()
        for _ in range(inner):
            run()
        _wait()
        samples.append((clock() - start) / inner)
    return samples


def _all_reduced(value: float, op: Any = dist.ReduceOp.SUM) -> float:
    """Return ``value`` reduced over all ranks, in a tensor on the device, as NCCL requires."""
    tensor = torch.tensor([value], dtype=torch.float64, device=_device)
    dist.all_reduce(tensor, op=op)
    return float(tensor)


def _wait() -> None:
    if _device.type == "cuda":
        torch.cuda.synchronize()


def _figure(
    name: str, samples: list[float], size: dict[str, float], variant: str = "", backward: bool = False, unit: str = "s"
) -> dict[str, Any]:
    return {
        "name": name,
        "variant": variant,
        "backward": backward,
        "size": size,
        "unit": unit,
        "samples": samples,
    }


def _forward_backward(name: str, variant: str, make: Callable[[], Op], sizes: tuple[dict[str, float], ...]) -> Figures:
    """Measure an op's forward (with autograd) and, if ``sizes`` has two entries, its backward.

    Several copies of the op run in rotation, and each keeps its result until its next run. Together they exceed the caches, so that
    operands come from memory, as in a training step.
    """
    first = make()
    copy_bytes = sum(tensor.nbytes for tensor in (*first[1], first[0]()))
    copies = [first, *(make() for _ in range(min(_COPIES, _BEYOND_CACHES // copy_bytes) - 1))]
    outs = [forward() for forward, _ in copies]
    gradient, found = torch.ones_like(outs[0]), list[tuple[Tensor, ...]]([()] * len(copies))
    rotation = itertools.cycle(range(len(copies)))

    def forward() -> None:
        i = next(rotation)
        outs[i] = copies[i][0]()

    def backward() -> None:
        i = next(rotation)
        found[i] = torch.autograd.grad(outs[i], copies[i][1], gradient, retain_graph=True)

    figures = [_figure(name, _seconds(forward, warmups=len(copies)), sizes[0], variant)]
    if len(sizes) > 1:
        figures.append(_figure(name, _seconds(backward, warmups=len(copies)), sizes[1], variant, True))
    return figures


def _launch() -> Figures:
    """Measure the launch of a tiny op: the mean over a chain of ops, so that the start of autograd's backward hardly matters."""
    length = 64
    x = torch.ones(1, device=_device, requires_grad=True)

    def chain() -> Tensor:
        y = x
        for _ in range(length):
            y = y * 1.5
        return y

    figures = _forward_backward("launch", "", lambda: (chain, [x]), ({}, {}))
    return [figure | {"samples": [sample / length for sample in figure["samples"]]} for figure in figures]


def _product(dtype: str, shape: list[int]) -> Figures:
    rows, inner, columns = shape
    kind = getattr(torch, dtype)

    def make() -> Op:
        x = torch.randn(rows, inner, device=_device).to(kind).requires_grad_()
        weight = torch.randn(columns, inner, device=_device).to(kind).requires_grad_()
        return lambda: F.linear(x, weight), [x, weight]

    out_bytes, x_bytes, weight_bytes = (n * kind.itemsize for n in (rows * columns, rows * inner, inner * columns))
    size: dict[str, float] = {"rows": rows, "inner": inner, "columns": columns}
    size |= {"flops": 2.0 * rows * inner * columns, "bytes": out_bytes + x_bytes + weight_bytes}
    back = size | {
        "flops": 2 * size["flops"],
        "bytes": out_bytes + 2.0 * (x_bytes + weight_bytes),
        "ops": 2.0,
    }
    return _forward_backward("product", dtype, make, (size, back))


def _attention(dtype: str, shape: list[int]) -> Figures:
    batch, heads, length, width = shape

    def operand() -> Tensor:
        whole = torch.randn(batch, length, heads, width, device=_device, dtype=getattr(torch, dtype))
        return whole.transpose(1, 2).requires_grad_()

    def make() -> Op:
        q, k, v = operand(), operand(), operand()
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]

    flops = 2.0 * batch * heads * length**2 * width  # two products, each over the causal half of the scores
    size: dict[str, float] = {"batch": batch, "heads": heads, "length": length, "width": width}
    sizes = (size | {"flops": flops}, size | {"flops": 2.5 * flops})
    return _forward_backward("attention", dtype, make, sizes)


def _move(kind: str, elements: int) -> Figures:
    width = min(512 if _device.type == "cpu" else 4096, elements // 4)
    rows = elements // width
    sizes = tuple({"elements": float(elements), "bytes": 4.0 * n * rows * width} for n in MOVES[kind] if n)
    return _forward_backward("move", kind, lambda: _move_op(kind, rows, width), sizes)


def _move_op(kind: str, rows: int, width: int) -> Op:
    x = torch.randn(rows, width, device=_device, requires_grad=True)
    y = torch.randn_like(x, requires_grad=True)
    scale, target = torch.ones(width, device=_device), torch.zeros(rows, dtype=torch.long, device=_device)
    half = x.detach()[: rows // 2].clone().requires_grad_()
    runs: dict[str, Op] = {
        "pointwise": (lambda: x * y, [x, y]),
        "add": (lambda: x + y, [x, y]),
        "gelu": (lambda: F.gelu(x), [x]),
        "silu": (lambda: F.silu(x), [x]),
        "softmax": (lambda: F.softmax(x, -1), [x]),
        "layer_norm": (lambda: F.layer_norm(x, (width,), scale, scale), [x]),
        "rms_norm": (lambda: F.rms_norm(x, (width,), scale), [x]),
        "cat": (lambda: torch.cat((half, half), 0), [half]),
        "cross_entropy_loss": (lambda: F.cross_entropy(x, target), [x]),
    }
    return runs[kind]


def _update(elements: int) -> Figures:
    """Measure the optimizer's time per tensor; on a GPU, for a step over several tensors, because one kernel updates many tensors."""
    count = 1 if _device.type == "cpu" else 16
    parameters = [nn.Parameter(torch.zeros(elements, device=_device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    # a step reads the gradient, both moments and the parameter, and writes the moments and the parameter: 7 float32 numbers
    size = {"elements": float(elements), "bytes": 28.0 * elements}
    return [_figure("update", [s / count for s in _seconds(optimizer.step)], size)]


def _wire(name: str, members: int, size: int) -> Figures:
    """Measure a collective in which the full tensor (see ``price.collectives``) has ``size`` bytes, or a send of ``size`` bytes."""
    group = _groups[members]
    whole = torch.zeros(max(members, size // 4), device=_device)
    whole = whole[: len(whole) // members * members].contiguous()
    part = torch.zeros(len(whole) // members, device=_device)
    runs: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: backend_reduce_scatter(part, whole, group=group),
        "flat reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "p2p": lambda: _send_round(whole, group),
    }
    if name == "all_to_all":
        mine, other = torch.zeros_like(part), torch.zeros_like(part)
        mine, other = (t[: len(t) // members * members] for t in (mine, other))
        if not len(mine):
            mine, other = torch.zeros(members, device=_device), torch.zeros(members, device=_device)
        runs["all_to_all"] = lambda: dist.all_to_all_single(other, mine, group=group)
    samples = _seconds(runs[name], members)
    if name == "p2p":
        samples = [sample / 2 for sample in samples]
    return [_figure("wire", samples, {"members": float(members), "bytes": float(whole.nbytes)}, name)]


def _send_round(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send a tensor from the group's first rank to its second, and back."""
    first = dist.get_rank(group) == 0
    other = dist.get_global_rank(group, 1 if first else 0)
    for forth in (True, False):
        if first is forth:
            dist.send(tensor, other, group=group)
        else:
            dist.recv(tensor, other, group=group)


def _sharded(members: int, width: int) -> Figures:
    """Measure FSDP2's all-gather of a module's parameters and reduce-scatter of their gradients, including copies and hooks.

    The modules are a chain that exceeds the caches, so that parameters and buffers come from memory, as in a training step.
    """
    mesh = _mesh(members)
    depth = min(8, 2 + _BEYOND_CACHES // (8 * width * width))
    plain = nn.Sequential(*(nn.Linear(width, width, bias=False, device=_device) for _ in range(depth)))
    sharded = nn.Sequential(*(nn.Linear(width, width, bias=False, device=_device) for _ in range(depth)))
    modules: list[FSDPModule] = []
    for layer in sharded:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        assert isinstance(layer, FSDPModule)
        layer.set_force_sum_reduction_for_comms(True)
        if _device.type == "cpu":  # as emitted programs do
            layer.set_custom_reduce_scatter(cast(Any, ShardedReduceScatter()))
        modules.append(layer)
    x = torch.ones(1, width, device=_device, requires_grad=True)

    def step(model: nn.Module) -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    def gather() -> None:
        for module in modules:
            module.unshard()
        for module in modules:
            module.reshard()

    def time_once() -> tuple[float, float, float]:
        """Return the seconds per module of an all-gather, of a step with FSDP's hooks, and of a step without them."""
        seconds = []
        for run in (gather, lambda: step(sharded), lambda: step(plain)):
            dist.barrier()
            start = time.perf_counter()
            run()
            _wait()
            seconds.append((time.perf_counter() - start) / depth)
        return seconds[0], seconds[1], seconds[2]

    time_once()
    found = [time_once() for _ in range(_BLOCKS)]
    gathers = [gathered for gathered, _, _ in found]
    reduces = [max(hooks - gathered - without, _MIN_SHARE * hooks) for gathered, hooks, without in found]
    size = {"members": float(members), "bytes": 4.0 * width * width}
    return [
        _figure("wire", gathers, size, "sharded all_gather"),
        _figure("wire", reduces, size, "sharded reduce_scatter"),
    ]


def _straggler_wait(members: int) -> Figures:
    """Measure how long a collective after ``_SEGMENT_S`` seconds of compute waits for the slowest rank of its group."""
    a, b = torch.randn(256, 256, device=_device), torch.randn(256, 256, device=_device)
    small, group = torch.zeros(1, device=_device), _groups[members]
    once = _all_reduced(statistics.median(_seconds(lambda: a @ b)), dist.ReduceOp.MAX)
    count = max(1, round(_SEGMENT_S / once))

    def arithmetic() -> None:
        for _ in range(count):
            a @ b
        _wait()

    def compute_and_reduce() -> None:
        arithmetic()
        dist.all_reduce(small, group=group)

    def mean_s(run: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(_SEGMENTS):
            run()
        _wait()
        return _all_reduced((time.perf_counter() - start) / _SEGMENTS) / dist.get_world_size()

    samples, segments = [], []
    for _ in range(_BLOCKS):
        alone_s, both_s = mean_s(arithmetic), mean_s(compute_and_reduce)
        wire_s = mean_s(lambda: dist.all_reduce(small, group=group))
        segments.append(alone_s)
        samples.append(max(both_s - alone_s - wire_s, 1e-9))
    return [_figure("wait", samples, {"members": float(members), "seconds": statistics.median(segments)})]


def _mesh(members: int) -> Any:
    count = dist.get_world_size()
    return init_device_mesh(_device.type, (count // members, members), mesh_dim_names=("outer", "inner"))["inner"]


def _call(members: int) -> Figures:
    """Measure how much longer the host takes for a differentiable, typed collective than for a plain one: the time of Python and autograd.

    On a CPU, this is the thread's processor time, which excludes waiting for messages, times the slow-down by processes that compute at
    the same time.
    """
    group = _groups[members]
    x = torch.ones(64, device=_device, requires_grad=True)
    plain = x.detach().clone()
    gradient = torch.ones_like(plain)

    def typed() -> None:
        spmd.all_reduce(x, group, src=spmd.P, dst=spmd.R).backward(gradient)

    def without_collective() -> None:
        (x * 1.0).backward(gradient)

    clock = time.thread_time if _device.type == "cpu" else time.perf_counter
    plain_s = statistics.median(_seconds(lambda: dist.all_reduce(plain, group=group), members, clock=clock))
    autograd_s = statistics.median(_seconds(without_collective, clock=clock))
    dist.barrier()
    slowdown = statistics.median(_seconds(without_collective)) / autograd_s if _device.type == "cpu" else 1.0
    typed_s = _seconds(typed, members, clock=clock)
    samples = [slowdown * max((s - autograd_s) / 2 - plain_s, _MIN_SHARE * s / 2) for s in typed_s]
    return [_figure("call", samples, {"members": float(members)})]


def _overlap(members: int) -> Figures:
    """Measure the fraction of the overlapped time that stays exposed: 0 if compute and communication overlap fully, 1 if not at all."""
    whole = torch.zeros(1 << 20, device=_device)
    group = _groups[members]
    a, b = torch.randn(384, 384, device=_device), torch.randn(384, 384, device=_device)
    wire_s = statistics.median(_seconds(lambda: dist.all_reduce(whole, group=group), members))
    product_s = statistics.median(_seconds(lambda: a @ b))
    count = max(1, round(_all_reduced(wire_s / product_s) / dist.get_world_size()))

    def arithmetic() -> None:
        for _ in range(count):
            a @ b

    def both() -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        arithmetic()
        assert work is not None
        work.wait()

    compute_s = statistics.median(_seconds(arithmetic))
    together = [second for _ in range(_OVERLAPS) for second in _seconds(both, members)]
    samples = [min(1.0, max(0.01, (s - max(compute_s, wire_s)) / min(compute_s, wire_s))) for s in together]
    return [_figure("overlap", samples, {"members": float(members)}, unit="share of the hidden time")]
