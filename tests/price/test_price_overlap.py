"""Prices of collectives that run while gradients of weights are computed: what is left of them, and what waits in memory."""

from __future__ import annotations

import dataclasses

import pytest
from price_models import chain, llama_block, time_s

from autopar.devices import Cluster, parse
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Role, Strategy
from autopar.price import Pricer
from autopar.price.collectives import overlapped_s
from autopar.price.trainer import EMITTED, TrainerModel
from autopar.trainers.model import OtherTrainer
from autopar.types import Collective

H100 = parse("8xH100-80GB")
NODE = dataclasses.replace(
    H100, host_s=0.0, gpu=dataclasses.replace(H100.gpu, op_floor_s=0.0)
)  # its host never delays it
BATCH, LENGTH, WIDTH, INNER = 4, 512, 1024, 4096
MESH = (Axis("t", 4, 1),)


def block(
    overlap: str,
    cluster: Cluster = NODE,
    role: Role = Role.TENSOR,
    activations: str = "keep",
    trainer: TrainerModel = EMITTED,
) -> LayerPrice:
    graph = chain(llama_block(BATCH, LENGTH, WIDTH, 8, 4, INNER), 2)
    found = Pricer(graph, cluster, "bfloat16", trainer=trainer).layer(
        "block", MESH, Strategy((role,), activations=activations, overlap=overlap), 1
    )
    assert found is not None
    return found


@pytest.mark.parametrize("activations", ["keep", "selective"])
@pytest.mark.parametrize("slower", [1, 100])
def test_a_reduction_is_exposed_where_it_is_longer_than_the_gradients_of_weights(slower: int, activations: str) -> None:
    """A block has two: under query's, key's and value's gradients, and under gate's and up's."""
    link = dataclasses.replace(NODE.intra, bytes_per_s=NODE.intra.bytes_per_s / slower)
    cluster = dataclasses.replace(NODE, intra=link)
    waiting, early = (block(overlap, cluster, activations=activations) for overlap in ("none", "tensor"))
    reduce_s = time_s(Collective.ALL_REDUCE, 2 * BATCH * LENGTH * WIDTH, 4, 1, cluster)
    rows, flops_s = BATCH * LENGTH, cluster.gpu.peak_flops["bfloat16"]
    hidden = 0.0
    for outputs in (WIDTH + WIDTH, 2 * INNER):  # query has 8 heads, key and value 4 each
        least_s = 2 * rows * WIDTH * outputs / 4 / flops_s  # the products at peak
        hidden += reduce_s - overlapped_s(least_s, reduce_s, cluster.overlap_slowdown)
    gained = waiting.backward_s - early.backward_s
    assert gained == pytest.approx(waiting.communication_s - early.communication_s)
    assert waiting.forward_s == early.forward_s and waiting.weight_s == pytest.approx(early.weight_s)
    if slower == 1:  # both reductions are shorter than their products, except for the slow-down
        assert hidden <= gained <= 2 * reduce_s * (1 - cluster.overlap_slowdown) * (1 + 1e-9)
    else:  # the products are shorter: they take longer than at peak, so more is hidden
        assert hidden < gained < 2 * reduce_s * (1 - cluster.overlap_slowdown)
        assert early.communication_s > 2 * reduce_s  # forward, nothing is


def test_sequence_parallelism_hides_its_reduce_scatters_alone() -> None:
    waiting, early = (block(overlap, role=Role.TENSOR_SEQUENCE) for overlap in ("none", "tensor"))
    scatter_s = time_s(Collective.REDUCE_SCATTER, 2 * BATCH * LENGTH * WIDTH, 4, 1, NODE)
    gained = waiting.communication_s - early.communication_s
    assert 0 < gained <= 2 * scatter_s * (1 - NODE.overlap_slowdown) * (1 + 1e-9)


def test_gradients_that_wait_for_each_other_count_as_memory() -> None:
    """Of gate and up, and of key and value: no more than those."""
    waiting, early = block("none"), block("tensor")
    of_up = 2 * BATCH * LENGTH * INNER // 4
    assert 0 <= early.transient_bytes - waiting.transient_bytes <= of_up
    assert dataclasses.replace(
        early, transient_bytes=0, backward_s=0, communication_s=0, weight_s=0, deferred_bytes=0
    ) == dataclasses.replace(waiting, transient_bytes=0, backward_s=0, communication_s=0, weight_s=0, deferred_bytes=0)


def test_data_parallelism_has_nothing_to_start_early() -> None:
    assert block("tensor", role=Role.DATA) == block("none", role=Role.DATA)


def test_on_cpus_nothing_is_hidden_unless_it_was_measured() -> None:
    cluster = parse("8")
    assert cluster.kind == "cpu"
    blind = dataclasses.replace(cluster, collective_times=None)
    assert block("tensor", blind).backward_s == block("none", blind).backward_s


def test_other_trainers_say_themselves_how_much_they_hide() -> None:
    other = OtherTrainer(overlap_tensor=0.5)
    assert block("tensor", trainer=other) == block("none", trainer=other)


@pytest.mark.parametrize("activations", ["keep", "full"])
@pytest.mark.parametrize("role", [Role.TENSOR, Role.TENSOR_SEQUENCE])
def test_halves_are_reported_with_the_collectives_that_they_run(role: Role, activations: str) -> None:
    """Two of half the size; a parameter's (under sequence parallelism, the sums of the norms' gradients) runs once for both halves."""
    pricer = Pricer(chain(llama_block(BATCH, LENGTH, WIDTH, 8, 4, INNER), 2), NODE, "bfloat16")
    whole, found = (
        pricer.collectives("block", MESH, Strategy((role,), activations=activations, overlap=overlap), 1)
        for overlap in ("tensor", "halves")
    )
    assert len(whole) == len(found)
    for one, each in zip(whole, found, strict=True):
        parts = 1 if one.bytes < BATCH * LENGTH * WIDTH else 2
        assert (each.collective, each.count, each.bytes) == (one.collective, parts * one.count, one.bytes / parts)
        assert each.seconds == pytest.approx(time_s(each.collective, each.bytes, 4, 1, NODE))
    assert {2} <= {each.count / one.count for one, each in zip(whole, found, strict=True)} <= {1, 2}
