"""``allow={"fp8_dispatch"}``: rows are sent to their experts in 8 bits, and come back in 16."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from expert_models import mixtral
from test_experts import values
from tiers import in_short, short
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM
from workers import WorkerPool

from autopar.capture import capture, flatten_batch
from autopar.checks.collectives import check_collectives
from autopar.checks.sample_experts import gated_experts
from autopar.checks.types import check_program
from autopar.devices import constants, parse
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.ops.experts import Experts
from autopar.ops.operands import operands
from autopar.plan import Plan, Role, Strategy
from autopar.planning import plan_model
from autopar.price import Pricer
from autopar.program import halves, kernels_experts
from autopar.program.kernels_fp8 import TILE, TILED_ROWS, tiled
from autopar.program.mesh_axes import on_mesh
from autopar.rules.traffic import kernel_traffic
from autopar.search import SearchOptions
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate
from autopar.summary import describe
from autopar.techniques.dispatch import FP8_DISPATCH
from autopar.workload import Workload
from passes.dispatch import rewrite

WIDTH, INNER, COUNT, ROWS = TILE + 72, 24, 8, 12  # the second tile of a row is padded


def rounded(x: Tensor) -> Tensor:
    """``x`` with each tile of 1 x 128 rounded to e4m3, not by the format of rows."""
    return tiled(x.reshape(-1, x.shape[-1]), 1).dequantized(x.dtype)[:, : x.shape[-1]].reshape(x.shape)


class Rounds(torch.autograd.Function):
    """Rounds a value in the forward pass, or its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: bool) -> Tensor:
        ctx.backward = backward
        return x.clone() if backward else rounded(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return rounded(grad) if ctx.backward else grad, None


def tokens(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Tokens whose tiles have very different magnitudes, weights and parameters; the choices; the result's gradient."""
    x, g = (values(ROWS, WIDTH, seed=seed) for seed in (0, 9))
    spread = torch.exp2(torch.arange(ROWS * 2).view(ROWS, 2) % 13 - 6.0).repeat_interleave(TILE, 1)[:, :WIDTH]
    shapes = [(COUNT, INNER, WIDTH), (COUNT, INNER, WIDTH), (COUNT, WIDTH, INNER)]
    parameters = [values(*shape, seed=2 + i) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)]
    inputs = [t.to(dtype) for t in (x * spread, values(ROWS, 3, seed=1).abs(), *parameters)]
    index = torch.stack([(torch.arange(ROWS) * k + k) % COUNT for k in (1, 3, 5)], 1)
    return inputs, index, (g * spread.flip(0)).to(dtype)


def on_one_device(dtype: torch.dtype, relayed: bool, first: bool, rounds: bool = True) -> list[Tensor]:
    """The result and all gradients of a mixture whose body's rows, and its results' gradients, are rounded; with relays a token's row and
    its result's gradient are rounded once before."""
    inputs, index, g = tokens(dtype)
    own = [t.requires_grad_() for t in inputs]
    op = gated_experts(3 * ROWS, WIDTH, inner=INNER, count=COUNT, weights_first=first)
    through = Rounds.apply if rounds else lambda x, backward: x

    def body(rows: Tensor, counts: Tensor, *parameters: Tensor) -> Tensor:
        return through(op.body(through(rows, False), counts, *parameters), True)

    x = through(own[0], False) if relayed else own[0]
    out = kernels_experts.experts(x, index, own[1], own[2:], body, COUNT, weights_first=first)
    out = through(out, True) if relayed else out
    return [out.detach(), *torch.autograd.grad(out, own, g)]


def on_ranks(
    dtype: torch.dtype, relayed: bool, first: bool, async_op: bool, packed: bool = True
) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """This rank's result and gradients, and the dtype and bytes of all-to-alls of floating-point rows or packed rows, in order."""
    inputs, index, g = tokens(dtype)
    rank, n = dist.get_rank(), dist.get_world_size()
    own = [t.chunk(n)[rank].clone().requires_grad_() for t in inputs]
    op = gated_experts(3 * ROWS, WIDTH, inner=INNER, count=COUNT, weights_first=first)
    axes: dict[str, Any] = {"owners": ("e",), "exchange": ("e",)}
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("e",))
    if relayed:
        axes = {"owners": ("r", "e"), "exchange": ("e",), "relay": ("r",)}
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("r", "e"))
    options = {"dispatch": TILED_ROWS} if packed else {}
    sent: list[tuple[str, int]] = []
    exchange = dist.all_to_all_single

    def recorded(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype != torch.int64 and input.shape[1:] != (3,):  # counts, choices and weights
            sent.append((str(input.dtype), input.nbytes))
        return exchange(output, input, *args, **kwargs)

    send = halves.send if async_op else kernels_experts._send_and_wait
    with on_mesh(mesh), mock.patch.object(dist, "all_to_all_single", recorded):
        given = (own[0], index.chunk(n)[rank], own[1]), own[2:], op.body, COUNT, first
        steps = kernels_experts.in_steps(send, *given, **options, **axes)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                out = end.value
                break
        found = torch.autograd.grad(out, own, g.chunk(n)[rank])
    return [out.detach(), *found], sent


CASES = list(itertools.product((False, True), repeat=3))  # relayed, first, async_op


def check(pool: WorkerPool, dtype: torch.dtype, tolerance: float, case: tuple[bool, bool, bool]) -> None:
    ranks = pool.run("test_fp8_dispatch:on_ranks", dtype, *case)
    wanted = on_one_device(dtype, *case[:2])
    plain = on_one_device(dtype, *case[:2], rounds=False)
    for i, (mine, other) in enumerate(zip(wanted, plain, strict=True)):
        found = torch.cat([results[i] for results, _ in ranks])
        largest = float(mine.abs().max())
        assert float((found - mine).abs().max()) <= tolerance * largest, (i, case)
        assert float((mine - other).abs().max()) > 1e-3 * largest, i  # rounding shows


@pytest.mark.parametrize("case", short(CASES, lambda case: list(enumerate(case))), ids=str)
def test_ranks_compute_what_one_device_does_with_rounded_rows(
    case: tuple[bool, bool, bool], workers4: WorkerPool
) -> None:
    """Only sums differ in their order: of a few choices, and of at most 36 rows in the gradients of parameters."""
    check(workers4, torch.float32, 1e-6, case)


def test_in_bfloat16_results_are_within_its_precision(workers2: WorkerPool) -> None:
    """Where a sum of 16-bit numbers in another order is rounded by another half unit (2^-9), the next rounding to 3 bits of mantissa may
    fall on the other side; such numbers are few, and their errors an eighth at most."""
    for relayed, first, async_op in ((False, False, False), (False, True, True)):
        ranks = workers2.run("test_fp8_dispatch:on_ranks", torch.bfloat16, relayed, first, async_op)
        for i, mine in enumerate(on_one_device(torch.bfloat16, relayed, first)):
            found = torch.cat([results[i] for results, _ in ranks])
            assert float((found - mine).norm() / mine.norm()) <= 2**-8, i
            assert float((found - mine).abs().max()) <= 2**-6 * float(mine.abs().max()), i


@pytest.mark.parametrize("async_op", [False, True])
def test_dispatches_send_bytes_and_combines_16_bits(async_op: bool, workers2: WorkerPool) -> None:
    """In the order of the step: dispatch, combine, gradients of results, gradients of rows. Without ``dispatch`` all have 16 bits."""
    rows = ROWS // 2 * 3
    for _, sent in workers2.run("test_fp8_dispatch:on_ranks", torch.bfloat16, False, False, async_op):
        own = sent[1][1] // (2 * WIDTH)  # the rows that this rank's experts got
        packed, wide = ("torch.uint8", WIDTH + 4 * 2), ("torch.bfloat16", 2 * WIDTH)
        formats = [(packed, rows), (wide, own), (packed, rows), (wide, own)]
        assert sent == [(dtype, size * n) for (dtype, size), n in formats] and 0 < own < 2 * rows
    for _, sent in workers2.run("test_fp8_dispatch:on_ranks", torch.bfloat16, False, False, async_op, False):
        assert [dtype for dtype, _ in sent] == ["torch.bfloat16"] * 4 and sent[0][1] == rows * 2 * WIDTH


def test_without_a_format_nothing_is_rounded(workers2: WorkerPool) -> None:
    ranks = workers2.run("test_fp8_dispatch:on_ranks", torch.float32, False, False, False, False)
    for i, mine in enumerate(on_one_device(torch.float32, False, False, rounds=False)):
        found = torch.cat([results[i] for results, _ in ranks])
        assert float((found - mine).abs().max()) <= 1e-6 * float(mine.abs().max())


# -- programs --------------------------------------------------------------------------------------------------------------


@functools.cache
def mixture(precision: str = "bfloat16") -> Graph:
    torch.manual_seed(0)
    model, batch, loss_fn = mixtral(hidden_size=64, intermediate_size=128, vocab_size=96, num_hidden_layers=2)
    return annotate(capture(model, batch, loss_fn, precision=precision, name="mixture"))


def gradients(folder: Path, plan: Plan, pool: WorkerPool) -> tuple[float, dict[str, Tensor]]:
    check_collectives(emit(mixture(), plan, folder))
    assert check_program(folder) == len(plan.stages)
    torch.manual_seed(0)
    model, batch, _ = mixtral(hidden_size=64, intermediate_size=128, vocab_size=96, num_hidden_layers=2)
    torch.save(model.state_dict(), folder / "state.pt")
    flat = flatten_batch(mixture().structure, batch)  # type: ignore[arg-type]
    loss, found, _ = pool.run("autopar.verify.remote:gradients", str(folder), str(folder / "state.pt"), flat)[0]
    return loss, found


PLANS: dict[str, dict[str, Any]] = {
    "expert 2": {"expert": 2},
    "relayed": {"mesh": make_mesh(("relay", 2), ("expert", 2))},
    "relayed, in halves": {"mesh": make_mesh(("relay", 2), ("expert", 2)), "overlap": "halves"},
    "in halves": {"expert": 2, "overlap": "halves"},
}


@pytest.mark.parametrize("name", in_short(PLANS, "expert 2", "relayed, in halves"))
def test_programs_stay_near_bfloat16(name: str, workers2: WorkerPool, workers4: WorkerPool, tmp_path: Path) -> None:
    """The same plan without the deviation, on the same devices: the loss is near, gradients point the same way, and neither is equal."""
    pool, results, texts = (workers4 if "relayed" in name else workers2), [], []
    for number, options in enumerate(({}, {"dispatch_format": "fp8", "allow": {FP8_DISPATCH}})):
        folder = tmp_path / str(number)
        plan = manual_plan(mixture(), precision="bfloat16", **PLANS[name], **options)
        results.append(gradients(folder, plan, pool))
        texts.append((folder / "model.py").read_text())
        assert json.loads((folder / "plan.json").read_text())["allow"] == sorted(options.get("allow", ()))
    assert "kernels_fp8" not in texts[0] and not (tmp_path / "0" / "runtime" / "kernels_fp8.py").exists()
    assert "dispatch=kernels_fp8.TILED_ROWS" in texts[1] and f"as {FP8_DISPATCH} allows" in texts[1]
    (loss0, exact), (loss, found) = results
    assert loss == pytest.approx(loss0, rel=0.01) and loss != loss0
    for key, wanted in exact.items():
        assert F.cosine_similarity(found[key].float().flatten(), wanted.float().flatten(), 0) > 0.97, key


# -- plans -----------------------------------------------------------------------------------------------------------------


def test_only_plans_that_exchange_rows_have_it() -> None:
    pinned: dict[str, Any] = {"dispatch_format": "fp8", "allow": {FP8_DISPATCH}}
    plan = manual_plan(mixture(), precision="bfloat16", expert=2, **pinned)
    mixed = [bool(mixture().classes[layer.cls].mixtures) for layer in mixture().layers]
    assert [layer.strategy.options.by_name["dispatch_format"] == "fp8" for layer in plan.layers] == mixed
    assert plan.allow == (FP8_DISPATCH,) and Plan.from_json(json.loads(plan.dumps())) == plan
    assert "rows of 2 of 4 layers dispatched in 8 bits" in describe(plan)
    with pytest.raises(UsageError, match="dispatch_format=fp8 is not exact"):
        manual_plan(mixture(), precision="bfloat16", expert=2, dispatch_format="fp8")
    with pytest.raises(UsageError, match="sends no rows to experts on other devices"):
        manual_plan(mixture(), precision="bfloat16", data=2, **pinned)
    (wide,) = {id(c): c for c in mixture("float32").classes.values() if c.mixtures}.values()
    assert rewrite(wide) == "computes in float32, and only rows in bfloat16 are sent in 8 bits"
    with pytest.raises(UsageError, match="8 bits need a mixture of experts in bfloat16"):
        manual_plan(mixture("float32"), expert=2, **pinned)


def test_a_dispatch_has_a_byte_for_each_number_and_four_for_each_tile() -> None:
    """In both passes; combines have two."""
    (cls,) = {id(c): c for c in mixture().classes.values() if c.mixtures}.values()
    changed = rewrite(cls)
    assert not isinstance(changed, str)
    (node,) = (n for n in changed.graph.graph.nodes if isinstance(n.target, Experts))
    (plain,) = (n for n in cls.graph.graph.nodes if isinstance(n.target, Experts))
    numbers = operands(node)[0].meta["val"].numel()
    for kernel, times in (("expert_exchange", 2), ("expert_relay", 1)):
        rows, before = (
            [c.bytes() for c in kernel_traffic(kernel, n) if c.value is operands(n)[0]] for n in (node, plain)
        )
        assert before == [2 * numbers * times] * 2 and rows == [numbers * times * (1 + 4 / 64), 2 * numbers * times]


def test_rounding_takes_compute_time_and_sends_less() -> None:
    """Per pass: what the all-to-all saves, and what rounding adds to the arithmetic, from the published figures of the device."""
    cluster = parse("2x8xH100-80GB")
    mesh, roles = make_mesh(("expert", 2)), (Role.EXPERT,)
    (layer,) = {layer.cls: layer for layer in mixture().layers if mixture().classes[layer.cls].mixtures}.values()
    pricer = Pricer(mixture(), cluster, "bfloat16")
    plain, narrow = (
        pricer._variant_for(strategy)._microbatch(layer.cls, mesh, strategy, 1)[0].passes  # type: ignore[index]
        for strategy in (Strategy(roles), Strategy(roles, dispatch_format="fp8"))
    )
    numbers = 8 * 16 * 2 * 64 / 2  # rows, tokens, choices, width, on one of two devices
    sent, moved = numbers * (1 + 4 / 64), cluster.gpu.bytes_per_s
    rounding_s = (
        constants.FUSED_DISPATCH_ROUNDING.value * sent / moved
        + constants.FUSED_DISPATCH_KERNELS.value * cluster.gpu.kernel_s
    )
    for side in ("forward", "backward"):
        before, after = getattr(plain, side), getattr(narrow, side)
        assert after.compute_s - before.compute_s == pytest.approx(rounding_s, rel=1e-6)
        saved_s = (2 * numbers - sent) / 2 / cluster.intra.bytes_per_s  # half the rows stay on the device
        assert before.exchange_s - after.exchange_s == pytest.approx(saved_s, rel=1e-6)
        assert after.host_s - before.host_s == pytest.approx(
            constants.FUSED_DISPATCH_KERNELS.value * cluster.gpu.op_floor_s
        )


@pytest.mark.slow
def test_the_search_takes_it_where_the_network_is_slower_than_rounding() -> None:
    config = MixtralConfig(
        hidden_size=4096,
        intermediate_size=1024,
        num_hidden_layers=2,
        vocab_size=1024,
        num_local_experts=64,
        num_experts_per_tok=8,
    )
    with torch.device("meta"):
        model, ids = MixtralForCausalLM(config), torch.zeros(64, 4096, dtype=torch.long)
    workload = Workload(model, {"input_ids": ids, "labels": ids}, precision="bfloat16")

    def planned(devices: str, expert: int, *allow: str) -> Plan:
        options = SearchOptions(time_limit_s=20, allow=allow, expert=expert, dispatch="direct", pipeline=1, tensor=1)
        return plan_model(workload, parse(devices), options, capture_check=False)[1]

    exact, narrow = planned("8x8xH100-80GB", 64), planned("8x8xH100-80GB", 64, FP8_DISPATCH)
    assert (exact.allow, narrow.allow) == ((), (FP8_DISPATCH,))
    assert narrow.prediction.step_time_s < 0.95 * exact.prediction.step_time_s
    assert any(f"as {FP8_DISPATCH} allows: 2 of 4 layers" in note for note in narrow.notes)
    assert planned("8xH100-80GB", 8, FP8_DISPATCH).allow == ()  # over NVLink rounding takes longer than it saves
