"""Models of other trainers, each switch against a count by hand or against the emitted program's price."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from exactness import subject
from price_models import Builder, aten, gpt_block, llama_block, mlp, mlp_types, price_layer, time_s
from torch import nn

from autopar.capture import capture
from autopar.devices import parse
from autopar.layer_price import LayerPrice
from autopar.ops.experts import Experts
from autopar.ops.operands import operands
from autopar.ops.routing import Routing
from autopar.plan import Axis, Role, Strategy
from autopar.price import Pricer
from autopar.price.state import precision
from autopar.price.table import build
from autopar.price.trainer import EMITTED, TrainerModel
from autopar.search.manual import make_mesh
from autopar.sharding import Sharding
from autopar.trainers import MEGATRON, OtherTrainer
from autopar.trainers.choose import TrainerPricers
from autopar.trainers.megatron import overlaps_experts, paired_passes
from autopar.trainers.reading import setting_of
from autopar.trainers.trainer import Reading
from autopar.types import Collective

H100 = parse("2x8xH100-80GB")
B, SEQ, H, F = 16, 512, 1024, 4096
PLAIN = OtherTrainer()


def price(trainer: TrainerModel, role: Role = Role.DATA, zero: int = 0, activations: str = "keep") -> LayerPrice:
    """An MLP's price on 8 devices."""
    sharding = Sharding((Axis("a", 8, 1), Axis("microbatch", 1, 0)), (mlp_types(role), mlp_types(Role.DATA)))
    strategy = Strategy((role,), zero, activations=activations)
    found = price_layer(mlp(B, SEQ, H, F), sharding, strategy, H100, "bfloat16", trainer)
    assert found is not None
    return found


def saved_bytes(trainer: OtherTrainer, cls) -> float:
    table, _ = build(cls, precision("bfloat16"), trainer)
    entries = zip(table.saved, table.saved_bytes, table.plain, strict=True)
    return sum({entry.storage: n for entry, n, plain in entries if plain}.values())


def test_attention_without_flash_saves_its_scores():
    b, s, h, heads = 2, 64, 128, 4
    cls = gpt_block(b, s, h, heads)
    # Korthikanti et al. 2022: 2 a s^2 b for the softmax, without dropout; not the result (2 sbh), nor a float per row of scores
    scores = 2 * heads * s * s * b
    flash, plain = saved_bytes(PLAIN, cls), saved_bytes(OtherTrainer(flash=False), cls)
    rows = 4 * b * heads * s
    assert plain == flash + scores - rows
    tables = [build(cls, precision("bfloat16"), OtherTrainer(flash=flash))[0] for flash in (True, False)]
    assert (
        tables[0].forward_flops.sum() < tables[1].forward_flops.sum() and tables[0].model_flops == tables[1].model_flops
    )
    assert tables[1].slot_forward.sum() == tables[0].slot_forward.sum() + 4 * scores


def test_fused_kernels_are_fewer_and_save_less():
    cls = llama_block(2, 64, 128, 8, 2, 384)
    assert saved_bytes(OtherTrainer(fused=True), cls) < saved_bytes(PLAIN, cls)
    fused, plain = (build(cls, precision("bfloat16"), OtherTrainer(fused=f))[0] for f in (True, False))
    assert fused.forward_kernels.sum() < plain.forward_kernels.sum()
    assert fused.slot_forward.sum() < plain.slot_forward.sum() and fused.model_flops == plain.model_flops


@pytest.mark.parametrize(
    ("trainer", "figures"),
    [
        (PLAIN, (2, 12, 2, 2, 6)),  # read and written by the product, and read
        (OtherTrainer(gradient_bytes=4), (4, 12, 4, 4, 0)),
        (OtherTrainer(gradient_bytes=4, accumulation_fusion=True), (4, 12, 4, 4, 0)),
        (OtherTrainer(gradient_bytes=6, fresh_bytes=2), (6, 12, 4, 2, 12)),  # DDP reduces its bucket
        (OtherTrainer(gradient_bytes=6, fresh_bytes=2, reduces_sums=True), (6, 12, 4, 4, 12)),
        (OtherTrainer(gradient_bytes=4, fsdp=True), (4, 8, 4, 4, 0)),
    ],
)
def test_copies_of_gradients(trainer, figures):
    found = trainer.precision("bfloat16")
    assert (found.gradient, found.optimizer, found.reduced, found.averaged, found.accumulated) == figures
    assert found.at_rest == 0 and found.shard == (4 if trainer.fsdp else 2)
    assert trainer.precision("float32") == EMITTED.precision("float32")


def test_overlap_hides_communication():
    reduce_s = time_s(Collective.ALL_REDUCE, 2 * 2 * H * F, 8, 1, H100)
    plain, hidden = price(PLAIN), price(OtherTrainer(overlap_data=100))
    # the latency of batched collectives is hidden in any case
    assert 0 < plain.step_s - hidden.step_s < reduce_s
    tensor = price(PLAIN, Role.TENSOR).communication_s
    assert price(OtherTrainer(overlap_tensor=0.25), Role.TENSOR).communication_s == pytest.approx(0.75 * tensor)


def test_zero_1_may_sum_whole_gradients_and_gather_into_copies():
    plain, whole, copies = (
        price(OtherTrainer(**terms), zero=1)
        for terms in ({}, {"stage1_reduction": Collective.ALL_REDUCE}, {"gather_bytes": 1000})
    )
    sent_s = 7 / 8 * 2 * 2 * H * F / H100.intra.bytes_per_s  # the latency of batched collectives is hidden
    assert whole.step_s - plain.step_s == pytest.approx(sent_s)
    assert copies.gradients_bytes - plain.gradients_bytes == pytest.approx(1000 * 2 * H * F - plain.saved_bytes)


def test_gathering_again_saves_the_shard_and_sends_more():
    plain, again = (price(OtherTrainer(regather=r), Role.TENSOR_SEQUENCE) for r in (False, True))
    assert plain.saved_bytes - again.saved_bytes == 2 * B * SEQ * H * 7 / 8  # the first product's input
    gather = time_s(Collective.ALL_GATHER, 2 * B * SEQ * H, 8, 1, H100)
    assert again.communication_s - plain.communication_s == pytest.approx(gather)


def test_gathering_parameter_by_parameter_pays_every_latency():
    assert price(OtherTrainer(gathers_by_parameter=True), zero=1).step_s > price(PLAIN, zero=1).step_s


@pytest.mark.parametrize("zero", [0, 1])
def test_the_optimizer_step_allocates_when_activations_are_free(zero):
    plain, stepping = (price(OtherTrainer(step_bytes=size), zero=zero) for size in (0, 400))
    allocated = 400 * 2 * H * F / (8 if zero else 1)
    assert stepping.gradients_bytes - plain.gradients_bytes == pytest.approx(allocated - plain.saved_bytes)
    assert (
        price(OtherTrainer(step_bytes=1), zero=zero).gradients_bytes == plain.gradients_bytes
    )  # less than activations
    assert stepping.transient_bytes == plain.transient_bytes


def test_passes_over_float32_gradients_once_a_step():
    plain, passes = (
        price(OtherTrainer(gradient_bytes=4, prepared_bytes=before, update_bytes=after), zero=1)
        for before, after in ((0, 0), (16, 14))
    )
    moved = 2 * H * F * (16 + 14 / 8)  # ZeRO-1 updates an eighth
    assert passes.step_s - plain.step_s == pytest.approx(moved / H100.gpu.bytes_per_s)
    narrow = OtherTrainer(prepared_bytes=16, update_bytes=14).precision("bfloat16")
    assert (narrow.prepared, narrow.converted) == (0, 0)


def test_nothing_is_allocated_at_stage_borders():
    assert price(PLAIN).boundary_bytes == 0 < price(EMITTED).boundary_bytes


def test_copies_of_the_logits():
    g = Builder()
    logits, labels = g.border("activations", "logits", 8, 100), g.border("inputs", "labels", 8, dtype=torch.int64)
    cls = g.done("loss", g.call(aten.cross_entropy_loss.default, logits, labels))
    emitted, plain, copies = (
        build(cls, precision("bfloat16"), t)[0] for t in (EMITTED, PLAIN, OtherTrainer(loss_copies=2))
    )
    assert emitted.live.unsharded_loss.sum() > 0 == plain.live.unsharded_loss.sum()
    more = copies.live.gradient.sum() - plain.live.gradient.sum()
    assert more == 2 * 2 * 8 * 100


def test_selective_recomputation_saves_every_second_product():
    found, plain = price(PLAIN, activations="selective"), price(PLAIN)
    assert found.saved_bytes == 2 * B * SEQ * F / 8 < plain.saved_bytes  # the first product's result


class Routed(nn.Module):
    """A mixture of experts that are stacks of ``products`` linear layers, in the style of loops over the experts that tokens chose."""

    def __init__(self, products: int, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.inside, self.router, self.outside = nn.Linear(4, width), nn.Linear(width, experts), nn.Linear(width, 4)
        stacks = ([nn.Linear(width, width), nn.ReLU()] * products for _ in range(experts))
        self.experts = nn.ModuleList(nn.Sequential(*copy.deepcopy(stack)) for stack in stacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inside(x))
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        mask, out = (
            nn.functional.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0),
            torch.zeros_like(flat),
        )
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            choice, token = torch.where(mask[expert].squeeze(0))
            rows = self.experts[expert](flat[None, token].reshape(-1, flat.shape[-1]))
            out.index_add_(0, token, rows * weights[token, choice, None])
        return self.outside(out.view_as(hidden)).pow(2).mean()


def test_experts_of_any_number_of_products_are_priced_and_exchanges_need_another_microbatch():
    steps = []
    for products in (1, 2, 3):
        graph = capture(Routed(products), torch.randn(8, 6, 4))
        pricers = TrainerPricers(graph, parse("8xH100-80GB"), MEGATRON)
        reading = Reading({"global_batch": 8, "microbatch": 1}, MEGATRON.facts_of(1, 1), ())
        steps.append(pricers.plan(setting_of(MEGATRON, reading, 8, 8, "float32")).prediction.step_time_s)
    assert steps[0] < steps[1] < steps[2]
    values = {"global_batch": 8, "microbatch": 1, "expert": 4}
    one = setting_of(MEGATRON, Reading(values, MEGATRON.facts_of(1, 4), ()), 8, 8, "bfloat16")
    assert one.microbatches == 1 and not overlaps_experts(one)
    assert overlaps_experts(dataclasses.replace(one, global_batch=16))
    interleaved = dataclasses.replace(one, pipeline=4, chunks=2, data=2, expert=2, global_batch=88)
    shares = {n: paired_passes(dataclasses.replace(one, global_batch=8 * n)) for n in (1, 2, 4, 16)}
    assert shares == {1: 0, 2: 1 / 2, 4: 3 / 4, 16: 15 / 16}
    # Megatron warms up with 2 * 3 + 4 + 1 of 88 chunks' passes, here with all
    assert (
        paired_passes(interleaved) == 14 / 16 and paired_passes(dataclasses.replace(interleaved, global_batch=8)) == 0
    )


def test_exchanges_hide_in_pairs_only():
    none, half, all_pairs = (
        OtherTrainer(overlap_experts=share).exposed_exchange_s(2.0, 3.0, 0.1) for share in (0, 0.5, 1)
    )
    assert (none, half, all_pairs) == pytest.approx((2.0, 1.1, 0.2))


def test_rows_of_experts_by_hand():
    """Two products and an activation, all of one width: what a kernel reads and writes, as multiples of the rows' bytes."""
    graph = capture(Routed(2), torch.randn(8, 6, 4))
    cls = next(cls for cls in graph.classes.values() if cls.mixtures)
    rows = 8 * 6 * 2 * 64 * 2  # tokens, choices, width, bytes
    moved = {}
    for name, fused, experts in (("plain", False, False), ("grouped", True, False), ("rounding", True, True)):
        trainer = OtherTrainer(fused=fused, fused_experts=experts, dispatches=True)
        table, _ = build(cls, precision("bfloat16"), trainer)
        mixture = [
            table.index[name] == op and i == 0
            for op, i in zip(table.slot_op, table.slot_operand, strict=True)
            for name in table.mixtures
        ]
        moved[name] = table.slot_forward[mixture].item(), table.slot_backward[mixture].item()
    more = {name: tuple((n - m) / rows for n, m in zip(moved[name], moved["plain"], strict=True)) for name in moved}
    # two products and the activation between them each read and write; the backward pass computes two gradients of each
    assert more["grouped"] == (6, 12)
    # forward: the rows are read, written and read in 8 bits, results written; twice the rows are written in 16 bits or two times 8
    assert more["rounding"] == (6, 8)


def test_rows_are_permuted_around_dispatch_kernels():
    graph, mesh, passes = subject("mixtral").graph, make_mesh(("expert", 4)), 3.0
    layer = next(layer for layer in graph.layers if graph.classes[layer.cls].experts)
    node = next(node for node in graph.classes[layer.cls].graph.graph.nodes if isinstance(node.target, Experts))
    tokens, choices = (operand.meta["val"] for operand in operands(node)[:2])
    router = Routing(node.target.count, choices.shape[-1])
    cluster = parse("2x2xH100-80GB")
    cluster = dataclasses.replace(cluster, host_s=0.0, gpu=dataclasses.replace(cluster.gpu, op_floor_s=0.0))

    def compute_s(consecutive: bool, **terms: float) -> float:
        trainer = OtherTrainer(fused=True, dispatches=True, consecutive_experts=consecutive, **terms)
        found = Pricer(graph, cluster, "float32", None, trainer).layer(layer.cls, mesh, Strategy((Role.EXPERT,)), 1)
        assert found is not None
        return found.forward_s + found.backward_s - found.communication_s

    for consecutive in (False, True):
        copied = dataclasses.replace(router, consecutive=consecutive).reached(4) + router.choices
        more = compute_s(consecutive, permutation_passes=passes) - compute_s(consecutive)
        # before and after the experts, in both passes; each of 4 devices has a quarter of the tokens, of 4 bytes each
        assert more == pytest.approx(4 * passes * copied * tokens.numel() / cluster.gpu.bytes_per_s)
