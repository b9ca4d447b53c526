"""What ops cost, what autograd keeps, and the price of a layer, against counts made by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import pytest
import torch
from price_models import Builder, aten, gpt_block, llama_block, mlp, mlp_types, price_layer, replicated, time_s

from autopar.devices import Cluster, constants, parse
from autopar.errors import UsageError
from autopar.graph import LayerClass
from autopar.layer_price import LayerPrice
from autopar.ops.cost import executed_flops, model_flops, op_cost
from autopar.plan import NARROW_GRADIENTS, Axis, Role, Strategy
from autopar.price.fusion import merge
from autopar.price.live_memory import PrefetchContext
from autopar.price.op_costs import OpCosts, op_costs
from autopar.price.state import Precision, precision, state_bytes
from autopar.price.table import ClassTable, build
from autopar.price.trace import trace
from autopar.price.trainer import EMITTED, TrainerModel
from autopar.sharding import Sharding
from autopar.trainers import OtherTrainer
from autopar.types import Collective

H100 = parse("2x8xH100-80GB")
DATA, TENSOR, SEQUENCE, IDLE = Role.DATA, Role.TENSOR, Role.TENSOR_SEQUENCE, Role.IDLE
B, SEQ, H, F = 16, 512, 1024, 4096


def price(
    roles: tuple[Role, ...] = (DATA,),
    sizes: tuple[int, ...] = (1,),
    microbatches: int = 1,
    zero: int = 0,
    activations: str = "keep",
    dtype: str = "bfloat16",
    cluster=H100,
    trainer: TrainerModel = EMITTED,
    reduce: str = "microbatch",
    overlap: str = "tensor",
) -> LayerPrice | None:
    """The MLP's price; the last axis is the innermost."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    mesh = tuple(Axis(f"a{i}", n, s) for i, (n, s) in enumerate(zip(sizes, strides, strict=True)))
    sharding = Sharding((*mesh, Axis("microbatch", microbatches, 0)), (*map(mlp_types, roles), mlp_types(DATA)))
    cls = mlp(B, SEQ, H, F, getattr(torch, dtype))
    strategy = Strategy(roles, zero, activations=activations, reduce=reduce, overlap=overlap)
    return price_layer(cls, sharding, strategy, cluster, dtype, trainer)


class Narrow(TrainerModel):
    """Gradients in 16 bits."""

    def precision(self, name: str, allow: Collection[str] = ()) -> Precision:
        return precision(name, (NARROW_GRADIENTS,))


def must(found: LayerPrice | None) -> LayerPrice:
    assert found is not None
    return found


def kept_bytes(table: ClassTable) -> dict[int, float]:
    """Storage to bytes of what is kept without recomputation."""
    entries = zip(table.saved, table.saved_bytes, table.plain, strict=True)
    return {entry.storage: n for entry, n, plain in entries if plain}


# -- ops -------------------------------------------------------------------------------------------------------------


def test_a_transformer_block_has_the_published_number_of_flops():
    b, s, h = 2, 64, 128
    cls = gpt_block(b, s, h, 4)
    published = 24 * b * s * h**2 + 4 * b * s**2 * h  # Narayanan et al. 2021, forward
    assert sum(model_flops(n) for n in cls.graph.graph.nodes) == published
    causal = 24 * b * s * h**2 + 2 * b * s**2 * h
    assert sum(executed_flops(n) for n in cls.graph.graph.nodes) == causal
    table, _ = build(cls, precision("bfloat16"))
    assert table.model_flops == 3 * published
    assert table.backward_flops.sum() == 2 * 24 * b * s * h**2 + 2.5 * 2 * b * s**2 * h


def test_costs_of_single_ops():
    g = Builder(torch.float32)
    a, b, c = (g.border("activations", n, *s) for n, s in (("a", (3, 4)), ("b", (4, 5)), ("c", (3, 5))))
    image, kernel = g.border("activations", "image", 2, 6, 8, 8), g.border("parameters", "kernel", 10, 3, 3, 3)
    ids, rows = g.border("inputs", "ids", 7, dtype=torch.int64), g.border("parameters", "rows", 1000, 16)
    assert op_cost(g.call(aten.mm.default, a, b)) == (2 * 3 * 4 * 5, 4 * (12 + 20 + 15))
    assert op_cost(g.call(aten.addmm.default, c, a, b))[0] == 2 * 3 * 4 * 5
    tokens, experts = g.border("activations", "tokens", 32, 64), g.border("parameters", "experts", 4, 64, 16)
    ends = g.border("inputs", "ends", 4, dtype=torch.int32)
    grouped = g.graph.call_function(aten._grouped_mm.default, (tokens, experts, ends))
    grouped.meta["val"] = torch.empty(32, 16, device="meta")
    assert op_cost(grouped)[0] == 2 * 32 * 64 * 16
    assert op_cost(g.call(aten.einsum.default, "ij,jk->ik", [a, b]))[0] == 2 * 3 * 4 * 5
    assert op_cost(g.call(aten.conv2d.default, image, kernel, None, [1, 1], [1, 1], [1, 1], 2))[0] == (
        2 * (2 * 10 * 8 * 8) * 3 * 9
    )
    assert op_cost(g.call(aten.embedding.default, rows, ids)) == (0, 2 * 7 * 16 * 4 + 7 * 8)
    assert op_cost(g.call(aten.relu.default, a)) == (0, 2 * 48)
    assert op_cost(g.call(aten.transpose.int, a, 0, 1)) == (0, 0)


def test_a_product_with_a_batch_of_inputs_needs_half_the_backward():
    g = Builder()
    ids = g.border("inputs", "pixels", 8, 16, dtype=torch.int64)
    weight = g.border("parameters", "weight", 32, 16)
    pixels = g.call(aten.to.dtype, ids, torch.bfloat16)
    cls = g.done("patch", g.call(aten.linear.default, pixels, weight))
    table, _ = build(cls, precision("bfloat16"))
    assert table.backward_flops.sum() == table.forward_flops.sum() == 2 * 8 * 16 * 32


# -- saved activations -----------------------------------------------------------------------------------------------


def test_a_gpt_block_keeps_34_sbh_without_dropout():
    b, s, h, heads = 2, 64, 128, 4
    cls = gpt_block(b, s, h, heads)
    table, _ = build(cls, precision("bfloat16"))
    distinct = kept_bytes(table)
    # Korthikanti et al. 2022: 34 sbh, less the two dropout masks after attention and MLP (2 sbh); flash attention keeps a
    # float per row of scores instead of 5 a s / h, and the norms two floats per token each
    assert sum(distinct.values()) == (34 - 2) * s * b * h + 4 * b * heads * s + 2 * 2 * 4 * b * s


def test_a_llama_block_keeps_what_was_counted_by_hand():
    b, s, h, heads, kv, f = 2, 64, 128, 8, 2, 384
    table, _ = build(llama_block(b, s, h, heads, kv, f), precision("bfloat16"))
    distinct = kept_bytes(table)
    t = b * s
    norm = (
        4 * t * h + 4 * t + 2 * t * h + 2 * t * h
    )  # float32 input, 1/rms, scaled (for the weight), normed (for linears)
    attention = 2 * t * h + 2 * 2 * t * h * kv // heads + 2 * t * h + 4 * t * heads
    swiglu = 2 * t * f * 4  # gate, silu(gate), up, product
    assert sum(distinct.values()) == 2 * norm + attention + swiglu


def test_parameters_constants_and_inputs_are_not_counted_as_saved():
    run = trace(mlp(2, 4, 8, 16))
    assert [(e.node, e.operand) for e in run.saved] == [
        ("linear_default", 0),
        ("gelu_default", 0),
        ("linear_default_1", 0),
    ]


def test_a_loss_keeps_its_log_probabilities():
    g = Builder()
    logits, labels = g.border("activations", "logits", 8, 100), g.border("inputs", "labels", 8, dtype=torch.int64)
    run = trace(g.done("loss", g.call(aten.cross_entropy_loss.default, logits, labels)))
    assert max(e.numel for e in run.saved) == 800 and sum(e.numel >= 800 for e in run.saved) == 1


def test_a_value_that_is_gathered_is_kept_at_its_gathered_size():
    n = 4
    whole = must(price((TENSOR,), (1,))).saved_bytes
    inside, entry = 2 * 2 * B * SEQ * F, 2 * B * SEQ * H  # gelu's input and output; the first product's input
    assert whole == inside + entry
    # sequence parallelism: the entry is gathered for the product, and kept so
    assert must(price((SEQUENCE,), (n,))).saved_bytes == inside // n + entry
    assert must(price((TENSOR,), (n,))).saved_bytes == inside // n + entry
    assert must(price((DATA,), (n,))).saved_bytes == (inside + entry) // n


def test_recomputation_keeps_the_input_alone_and_pays_a_forward():
    plain, again = must(price((SEQUENCE,), (4,))), must(price((SEQUENCE,), (4,), activations="full"))
    assert again.saved_bytes == 2 * B * SEQ * H // 4 < plain.saved_bytes
    assert again.transient_bytes == plain.transient_bytes + plain.saved_bytes - again.saved_bytes
    assert again.backward_s == pytest.approx(plain.backward_s + plain.forward_s)
    assert again.flops == plain.flops and again.forward_s == plain.forward_s


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "billions"), [(0, 5.0), (1, 19.1), (2, 36.1), (3, 320.0)])
def test_the_largest_model_on_64_devices_of_80_gb(zero, billions):
    """Rajbhandari et al. 2020, section 5, scaled from 32 to 80 GB: 16 bytes per parameter, of which ZeRO divides some."""
    low, high, papers = 0, 10**12, OtherTrainer().precision("bfloat16")
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(state_bytes(middle, middle, 64, zero, papers)) <= 80e9
        low, high = (middle, high) if fits else (low, middle)
    assert low / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("dtype", "per_parameter"), [("bfloat16", 18), ("float32", 16), ("float64", 32)])
def test_bytes_per_parameter(dtype, per_parameter):
    """The parameter, its gradient, the master copy and two moments: 2 + 4 + 4 + 8 in bfloat16, 4 + 4 + 8 in float32."""
    found = must(price(dtype=dtype))
    assert found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes == per_parameter * 2 * H * F
    assert must(price((DATA,), (4,), dtype=dtype)).optimizer_bytes == found.optimizer_bytes


def test_a_plans_layer_uses_the_same_formula():
    for zero in range(4):
        found = must(price((DATA, TENSOR), (4, 2), zero=zero, microbatches=2, trainer=Narrow()))
        held = (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes)
        assert held == state_bytes(H * F, H * F, 4, zero, Narrow().precision("bfloat16"))


@pytest.mark.parametrize(
    ("zero", "bytes_of"),
    [(0, (2.0, 4.0, 12.0)), (1, (2.0, 4.0, 1.5)), (2, (2.0, 0.5, 1.5)), (3, (0.5, 0.5, 1.0))],
)
def test_what_an_emitted_program_keeps_of_a_parameter_of_16_bits(zero, bytes_of):
    """On 8 devices: 2 to compute with, a float32 sum of gradients, a float32 master and two float32 moments; under ZeRO-3 what is at rest
    is the master."""
    assert state_bytes(800, 800, 8, zero, precision("bfloat16")) == tuple(800 * n for n in bytes_of)


@pytest.mark.parametrize("zero", range(4))
def test_what_may_be_narrow(zero):
    wide = state_bytes(800, 800, 8, zero, precision("bfloat16"))
    share = 800 // (8 if zero >= 2 else 1), 800 // (8 if zero else 1)
    gradients = state_bytes(800, 800, 8, zero, precision("bfloat16", allow=["bfloat16_gradients"]))
    moments = state_bytes(800, 800, 8, zero, precision("bfloat16", allow=["bfloat16_moments"]))
    assert gradients == (wide[0], wide[1] - 2 * share[0], wide[2])
    assert moments == (wide[0], wide[1], wide[2] - 4 * share[1])
    both = precision("bfloat16", allow=["bfloat16_gradients", "bfloat16_moments"])
    assert (both.reduced, both.averaged, both.accumulated) == (2, 2, 6)  # read, read and written
    plain = precision("bfloat16")
    assert (plain.reduced, plain.averaged, plain.accumulated) == (4, 4, 10)
    assert precision("float32", allow=["bfloat16_gradients", "bfloat16_moments"]) == precision("float32")


def test_frozen_parameters_have_no_gradient_and_no_state():
    cls = mlp(B, SEQ, H, F)
    frozen = dataclasses.replace(
        cls, parameters=tuple(dataclasses.replace(p, requires_grad=False) for p in cls.parameters)
    )
    sharding = Sharding((Axis("microbatch", 1, 0),), (mlp_types(DATA),))
    found, trained = (must(price_layer(c, sharding, Strategy(()), H100, "bfloat16")) for c in (frozen, cls))
    assert found.gradients_bytes == found.optimizer_bytes == 0 and found.step_s == 0
    assert found.parameters_bytes == trained.parameters_bytes and found.backward_s < trained.backward_s
    assert found.flops == pytest.approx(trained.flops * 2 / 3)


def test_transients_of_zero():
    """A trainer that fetches ahead holds two layers' parameters and gradients; an emitted program one layer's at a time."""
    ahead = OtherTrainer()
    base = must(price((DATA,), (8,), trainer=ahead)).transient_bytes
    weights, largest = 2 * 2 * H * F, 2 * H * F
    assert must(price((DATA,), (8,), zero=1, trainer=ahead)).transient_bytes == base
    assert must(price((DATA,), (8,), zero=2, trainer=ahead)).transient_bytes == base + 2 * weights
    assert must(price((DATA,), (8,), zero=3, trainer=ahead)).transient_bytes == base + 4 * weights
    assert (
        must(price((DATA,), (8,))).transient_bytes
        == must(price((DATA,), (8,), zero=1)).transient_bytes
        == base + largest
    )
    result = (
        2 * B * SEQ * H // 8
    )  # what the gather made stays beside the parameters that were copied out of it until the forward ends
    assert must(price((DATA,), (8,), zero=3, trainer=Narrow())).transient_bytes == 2 * weights + result


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_of_an_fsdp_root_come_as_activations_go(zero):
    """Large parameters and few activations: a layer's figure is what it holds after its backward, and it needs most while its
    gradients are reduced, with gloo beside a copy of them. A second microbatch finds the first one's shard."""
    rows, data = 16, 8
    cls = mlp(rows, 1, H, F, torch.float32)
    whole = 4 * 2 * H * F
    shard = whole // data
    for microbatches in (1, 2):
        sharding = Sharding((Axis("microbatch", microbatches, 0), Axis("a", data, 1)), (mlp_types(DATA),) * 2)
        found = must(
            price_layer(cls, sharding, Strategy((DATA,), zero), parse(["cpu"] * 8), "float32", TrainerModel(cpu=True))
        )
        gathered = whole if zero == 2 else 0  # counts with the parameters
        held = found.gradients_bytes + found.saved_bytes + gathered
        earlier = shard if microbatches == 2 else 0
        assert found.saved_bytes == 4 * (rows // data // microbatches) * (H + 2 * F)
        assert held == earlier + max(found.saved_bytes + gathered, shard - earlier)
        assert held + found.transient_bytes == 2 * whole + shard + earlier


@pytest.mark.parametrize("zero", [2, 3])
def test_neighbours_under_fsdp_are_gathered_ahead_and_reduced_late(zero):
    """Few activations: a layer needs most in its backward, beside the parameters of the layer before (ZeRO 3: gathered anew), or while
    its own are gathered, beside the reduction of the layer after."""
    cls = mlp(8, 1, H, F, torch.float32)
    sharding = Sharding((Axis("microbatch", 1, 0), Axis("a", 8, 1)), (mlp_types(DATA),) * 2)

    def peak(**around: int) -> int:
        strategy, cpus = Strategy((DATA,), zero), parse(["cpu"] * 8)
        found = must(
            price_layer(cls, sharding, strategy, cpus, "float32", TrainerModel(cpu=True), PrefetchContext(**around))
        )
        return found.gradients_bytes + found.saved_bytes + found.transient_bytes

    many = 10 * H * F
    alone = peak()
    assert peak(earlier=many) == alone + (4 * many if zero == 3 else 0)
    # the reduction of the layer after ends before that of the layer itself begins, and more exists then than while parameters are gathered
    running = (
        (2 if zero == 3 else 1) * 4 * 2 * H * F
    )  # parameters (ZeRO 2: in the price's figure for parameters) and gradients
    assert peak(later=many, later_trainable=many) - 4 * many == pytest.approx(running, rel=0.05)


def test_after_the_backward_passes_gradients_are_reduced_and_parameters_updated():
    """ZeRO 1 with few activations: gloo reduces a copy of the gradients into this device's piece; without ZeRO AdamW's two temporaries."""
    cls, largest = mlp(8, 1, H, F, torch.float32), 4 * H * F
    sharding = Sharding((Axis("microbatch", 1, 0), Axis("a", 8, 1)), (mlp_types(DATA),) * 2)
    for zero, needed in ((0, 2 * largest), (1, 2 * largest + 2 * largest // 8)):
        found = must(
            price_layer(cls, sharding, Strategy((DATA,), zero), parse(["cpu"] * 8), "float32", TrainerModel(cpu=True))
        )
        assert found.saved_bytes + found.transient_bytes == needed


# -- time ------------------------------------------------------------------------------------------------------------


def test_time_of_large_products_is_flops_over_rate():
    b, s, h, f = 8, 4096, 8192, 28672
    cls, gpu = mlp(b, s, h, f), H100.gpu
    sharding = Sharding((Axis("microbatch", 1, 0),), (mlp_types(DATA),))
    found = must(price_layer(cls, sharding, Strategy(()), H100, "bfloat16"))
    product = 2 * b * s * h * f / gpu.flops_per_s("bfloat16")
    moved = 2 * (b * s * h + h * f + b * s * f) / gpu.bytes_per_s
    gelu = 2 * 2 * b * s * f / gpu.bytes_per_s
    # loading and storing overlap with the arithmetic in part
    assert found.forward_s == pytest.approx(2 * math.hypot(product, moved) + gelu + 3 * gpu.kernel_s)
    assert 2 * product + gelu < found.forward_s < 2.02 * product + gelu
    # gelu's backward reads its input and its result's gradient, and writes its input's
    assert found.backward_s == pytest.approx(4 * product + 1.5 * gelu, rel=0.01)
    assert found.communication_s == 0 and found.flops == 3 * 2 * 2 * b * s * h * f


def test_small_ops_take_the_floor():
    cls = mlp(1, 1, 8, 8)
    sharding = Sharding((Axis("microbatch", 1, 0),), (mlp_types(DATA),))
    found = must(price_layer(cls, sharding, Strategy(()), H100, "bfloat16"))
    floor = H100.gpu.op_floor_s
    assert found.forward_s == pytest.approx(3 * floor) and found.backward_s == pytest.approx(5 * floor)


def test_sharding_divides_compute_and_the_rest_is_wire():
    one, four = must(price()), must(price((TENSOR,), (4,), overlap="none"))
    wire = 2 * B * SEQ * H  # bytes of the activation at the border
    reduce = time_s(Collective.ALL_REDUCE, wire, 4, 1, H100)
    assert four.communication_s == pytest.approx(2 * reduce)  # g forward, f backward
    assert four.forward_s == pytest.approx(
        max(one.forward_s / 4 + reduce, H100.host_s + 3 * H100.gpu.op_floor_s), rel=0.05
    )
    gather = time_s(Collective.ALL_GATHER, wire, 4, 1, H100)
    assert must(price((SEQUENCE,), (4,), overlap="none")).communication_s == pytest.approx(4 * gather)
    assert four.parameters_bytes == one.parameters_bytes // 4 and four.flops == one.flops


def test_two_axes_of_one_role_cost_what_their_product_costs():
    two, flat = must(price((TENSOR, TENSOR), (2, 4))), must(price((TENSOR,), (8,)))
    assert dataclasses.asdict(two) == pytest.approx(dataclasses.asdict(flat))


def test_hybrid_sharding_stays_in_the_node_and_sums_its_shards_over_the_nodes():
    """4 nodes of 8: each node has a copy of the shards, and only an eighth of the gradients leaves it."""
    cluster, mesh = parse("4x8xH100-80GB"), (Axis("a", 4, 8), Axis("b", 8, 1))
    cls, types = mlp(B * 8, SEQ, H, F), (mlp_types(DATA),) * 3
    sharding = Sharding((Axis("microbatch", 1, 0), *mesh), types)

    def found(zero: int, copies: int) -> LayerPrice:
        return must(price_layer(cls, sharding, Strategy((DATA, DATA), zero, replicate=copies), cluster, "bfloat16"))

    weights = 2 * H * F
    for zero in (1, 2, 3):
        whole, hybrid = found(zero, 1), found(zero, 4)
        assert hybrid.optimizer_bytes == 4 * whole.optimizer_bytes
        assert (hybrid.parameters_bytes == 4 * whole.parameters_bytes) == (zero == 3)
    alone, slowed = found(0, 1), constants.OVERLAP_SLOWDOWN.value
    reduce_s = time_s(Collective.REDUCE_SCATTER, 4 * weights, 8, 1, cluster)
    sum_s = time_s(Collective.ALL_REDUCE, 4 * weights // 8, 4, 8, cluster)
    gather_s = time_s(Collective.ALL_GATHER, 2 * weights, 8, 1, cluster)
    exposed_s = sum(
        max(0.0, wire_s - compute_s) + slowed * min(wire_s, compute_s)
        for wire_s, compute_s in ((reduce_s + sum_s, alone.backward_s), (gather_s, alone.forward_s))
    )
    update_s = (
        must(price_layer(cls, sharding, Strategy((DATA, DATA)), cluster, "bfloat16", Unsynchronised())).step_s / 8
    )
    assert found(1, 4).step_s == pytest.approx(update_s + exposed_s)


class Unsynchronised(TrainerModel):
    """No collective takes time."""

    def data_collective_s(self, *_: object) -> float:
        return 0.0


def test_microbatches_divide_what_a_microbatch_costs_and_nothing_else():
    one, four = must(price()), must(price(microbatches=4))
    assert four.saved_bytes == one.saved_bytes // 4 and four.flops == one.flops / 4
    assert four.parameters_bytes == one.parameters_bytes and four.step_s == one.step_s
    assert one.forward_s / 4 <= four.forward_s < one.forward_s / 3


def test_an_idle_axis_divides_nothing():
    one, idle = must(price()), must(price((IDLE,), (8,)))
    assert idle == one
    assert replicated(mlp(2, 2, 4, 8)).role is IDLE


def test_what_does_not_divide_has_no_price():
    assert price((DATA,), (32,)) is None and price((DATA,), (4,), microbatches=8) is None
    assert price((SEQUENCE,), (3,)) is None and price((DATA,), (16,)) is not None


def test_data_parallel_reductions_come_once_a_step_or_hide_under_compute():
    weights, gradients = 2 * 2 * H * F, 4 * 2 * H * F
    update = must(price()).step_s
    slowed = constants.OVERLAP_SLOWDOWN.value  # what runs beside arithmetic slows it down
    plain, sharded = must(price((DATA,), (8,))), must(price((DATA,), (8,), zero=3))

    def beside(compute_s: float, wire_s: float) -> float:
        return max(0.0, wire_s - compute_s) + slowed * min(wire_s, compute_s)

    average = time_s(Collective.ALL_REDUCE, gradients, 8, 1, H100)
    assert plain.step_s == pytest.approx(update + beside(plain.backward_s, average))
    gather = time_s(Collective.ALL_GATHER, weights, 8, 1, H100)
    reduction = time_s(Collective.REDUCE_SCATTER, gradients, 8, 1, H100)
    both = gather + reduction
    first = must(price((DATA,), (8,), zero=1))
    hidden = beside(plain.backward_s, reduction) + beside(plain.forward_s, gather)
    assert first.step_s == pytest.approx(update / 8 + hidden)
    assert sharded.step_s == pytest.approx(update / 8)
    copies = EMITTED.sharded_copies_s(weights, weights, gradients, H100)
    assert copies == pytest.approx((2 * weights / H100.gpu.bytes_per_s, (weights + gradients) / H100.gpu.bytes_per_s))
    forward = plain.forward_s + copies[0]
    assert sharded.forward_s == pytest.approx(max(forward, gather) + slowed * min(forward, gather), rel=1e-3)
    backward = plain.backward_s + sum(copies)
    assert sharded.backward_s == pytest.approx(max(backward, both) + slowed * min(backward, both), rel=1e-3)
    assert sharded.communication_s == pytest.approx(sharded.forward_s + sharded.backward_s - forward - backward)


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_are_reduced_once_a_step_overlap_the_last_backward_and_stay_whole(zero):
    parameters, parts, microbatches = 2 * H * F, 4, 4
    each = must(price((DATA,), (parts,), microbatches, zero))
    once = must(price((DATA,), (parts,), microbatches, zero, reduce="step"))
    alone = must(price((DATA,), (parts,), microbatches))  # its whole gradients add up, too
    update_s = must(price(microbatches=microbatches)).step_s / parts
    slowed = constants.OVERLAP_SLOWDOWN.value
    gather_copies_s, reduce_copies_s = EMITTED.sharded_copies_s(2 * parameters, 2 * parameters, 4 * parameters, H100)
    backward_s = alone.backward_s + gather_copies_s * (zero == 3)

    def overlapped_s(wire_s: float, arithmetic_s: float) -> float:
        return max(0.0, wire_s - arithmetic_s) + slowed * min(wire_s, arithmetic_s)

    reduce_s = time_s(Collective.REDUCE_SCATTER, 4 * parameters, parts, 1, H100)
    gather_s = time_s(Collective.ALL_GATHER, 2 * parameters, parts, 1, H100) if zero == 3 else 0.0
    assert once.forward_s == each.forward_s
    hidden_s = overlapped_s(gather_s, backward_s)
    assert once.backward_s == pytest.approx(backward_s + hidden_s)
    last_s = reduce_copies_s + overlapped_s(gather_s + reduce_s, backward_s + reduce_copies_s)
    assert once.step_s == pytest.approx(update_s + last_s - hidden_s)
    assert each.step_s == pytest.approx(update_s)
    assert (each.gradients_bytes, once.gradients_bytes) == (4 * parameters // parts, 4 * parameters)
    kept = ("parameters_bytes", "optimizer_bytes", "saved_bytes")
    assert all(getattr(each, name) == getattr(once, name) for name in kept)


def test_one_microbatch_is_reduced_once_in_any_case():
    each, once = (must(price((DATA,), (8,), zero=3, reduce=reduce)) for reduce in ("microbatch", "step"))
    assert once.backward_s + once.step_s == pytest.approx(each.backward_s + each.step_s)
    assert (once.gradients_bytes, once.transient_bytes) == (each.gradients_bytes, each.transient_bytes)


def test_precisions():
    wide, narrow = must(price(dtype="float32")), must(price())
    assert wide.saved_bytes == 2 * narrow.saved_bytes and wide.forward_s > 1.5 * narrow.forward_s
    with pytest.raises(UsageError, match="int4"):
        precision("int4")


def test_the_processes_of_a_laptop_can_be_priced():
    found = must(price((DATA, TENSOR), (2, 2), dtype="float32", cluster=parse(["cpu"] * 4)))
    assert 0.01 < found.forward_s < 60 and found.communication_s > 0


@pytest.mark.parametrize("zero", range(4))
def test_processors_hide_reductions_and_wait_for_fsdp(zero: int):
    """With free overlap, ZeRO 0 and 1 reduce under the backward pass; FSDP2 has no streams there, and on a GPU it has."""
    cpus = parse(["cpu"] * 2)

    def seconds(cluster: Cluster, slowdown: float) -> float:
        cluster = dataclasses.replace(cluster, overlap_slowdown=slowdown)
        found = must(price((DATA,), (2,), 1, zero, "keep", "float32", cluster, TrainerModel(cpu=cluster.kind == "cpu")))
        return found.forward_s + found.backward_s + found.step_s

    assert cpus.overlap_slowdown == 1.0
    gained_s = seconds(cpus, 1.0) - seconds(cpus, 0.0)
    assert gained_s > 1e-3 if zero < 2 else gained_s == 0.0
    assert seconds(H100, 1.0) > seconds(H100, 0.0)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_fused_kernel_reads_both_halves_of_a_value(name: str):
    """As in rotary positions: the second half is another view of the value, of which the kernel has read the first half alone."""
    dtype = getattr(torch, name)
    g = Builder(dtype)
    x = g.border("activations", "x", 8, 64)
    halves = [g.call(aten.slice.Tensor, x, 1, begin, begin + 32) for begin in (0, 32)]
    cls = g.done("halves", g.call(aten.mul.Tensor, *halves))
    read = [slot.forward for slot in fused_costs(cls, dtype).slots if slot.operand >= 0]
    assert sum(read) == 8 * 64 * dtype.itemsize


def test_a_fused_kernel_reads_a_value_once():
    """A view of a value that the same kernel reads completely moves nothing."""
    g = Builder()
    x = g.border("activations", "x", 8, 64)
    halves = [g.call(aten.slice.Tensor, value, 1, 0, 32) for value in (g.call(aten.exp.default, x), x)]
    cls = g.done("once", g.call(aten.mul.Tensor, *halves))
    read = [slot.forward for slot in fused_costs(cls, torch.bfloat16).slots if slot.operand >= 0]
    assert sum(read) == 8 * 64 * 2


def test_a_fused_kernel_may_have_any_number_of_ops_and_of_paths_between_them():
    """Every step doubles the paths from the input: the ops are visited once each, and without recursion."""
    g = Builder()
    x = found = g.border("activations", "x", 8, 64)
    for _ in range(500):
        found = g.call(aten.add.Tensor, g.call(aten.tanh.default, found), found)
    costs = fused_costs(g.done("long", found), torch.bfloat16)
    assert {entry.storage for entry in costs.saved} == {costs.trace.storage[x.name]}


def test_a_trace_allocates_nothing_that_has_the_batchs_size():
    """``aten.full`` without a device allocates on the processor: here 64 TiB."""
    g = Builder()
    x = g.border("activations", "x", 8, 64)
    filled = g.call(aten.full.default, [1 << 20, 1 << 24], 0.0, device="meta")
    filled.kwargs = {}
    run = trace(g.done("filled", x, filled))
    assert run.extent[run.storage[filled.name]] == (1 << 44, torch.float32)


def fused_costs(cls: LayerClass, dtype: torch.dtype) -> OpCosts:
    """The costs of a layer whose pointwise ops are fused."""
    nodes = [node for node in cls.graph.graph.nodes if node.op == "call_function"]
    costs = op_costs(nodes, trace(cls), lambda tensor: tensor.numel() * dtype.itemsize)
    merge(costs)
    return costs
