"""Writes in place: the captured graph is eager's in loss, gradients and buffers, for two steps, or the write is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import in_place_modules
import pytest
import torch
from in_place import PATTERNS, REFUSED, Model, batch
from tiers import in_short
from torch import nn
from torch.nn import functional as F
from workers import WorkerPool

from autopar.capture import capture, flatten_batch
from autopar.capture.reference import run
from autopar.errors import CaptureError
from autopar.graph import Graph
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import check_plan, make_subject


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    """What a forward makes has the model's dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_two_steps_equal_eager(model: nn.Module, given: Any, loss_fn: Any = F.mse_loss) -> Graph:
    """Loss, every gradient and every written buffer, in two steps, so that what the first leaves in buffers shows in the second."""
    model = model.double().train()
    graph = capture(model, given, loss_fn, precision="float64")
    eager, written = copy.deepcopy(model), {}
    parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    for _ in range(2):
        inputs, target = copy.deepcopy(given)
        expected = loss_fn(eager(*inputs) if isinstance(inputs, tuple) else eager(inputs), target)
        eager.zero_grad()
        expected.backward()
        for tensor in parameters.values():
            tensor.grad = None
        loss = run(graph, parameters, flatten_batch(graph.structure, copy.deepcopy(given)), buffers=written)
        loss.backward()
        assert abs(loss - expected) <= 1e-12 * max(abs(expected), 1e-6), (float(loss), float(expected))
        for name, parameter in eager.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found = parameters[name].grad
            assert (
                (0 if found is None else found - wanted).abs().max() <= 1e-12 if found is not None else not wanted.any()
            ), name
        state = dict(model.state_dict(keep_vars=True)) | dict(model.named_buffers())
        frozen = {name: p for name, p in eager.named_parameters() if not p.requires_grad}
        for name, buffer in (dict(eager.named_buffers()) | frozen).items():
            now = written.get(name, state[name])
            assert now.dtype == buffer.dtype and now.shape == buffer.shape, name
            assert torch.allclose(now, buffer, rtol=1e-12, atol=1e-12), (name, now, buffer)
    return graph


@pytest.mark.parametrize("name", list(PATTERNS))
def test_right(name: str) -> None:
    torch.manual_seed(0)
    assert_two_steps_equal_eager(Model(PATTERNS[name]), batch())


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name: str) -> None:
    write, words = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=words) as raised:
        capture(Model(write).double(), batch(), F.mse_loss, precision="float64")
    assert "in_place.py" in str(raised.value), "the user's line"
    assert raised.value.hint


@pytest.mark.parametrize("name", list(in_place_modules.RIGHT))
def test_modules_that_write_are_right(name: str) -> None:
    factory, sizes, written = in_place_modules.RIGHT[name]
    torch.manual_seed(0)
    graph = assert_two_steps_equal_eager(factory(), in_place_modules.batch(*sizes))
    assert len(graph.buffers) == written and not graph.notes


@pytest.mark.parametrize("name", list(in_place_modules.REFUSED))
def test_modules_that_write_where_they_may_not_are_refused(name: str) -> None:
    factory, words = in_place_modules.REFUSED[name]
    with pytest.raises(CaptureError, match=words) as raised:
        capture(factory().double(), in_place_modules.batch(), F.mse_loss, precision="float64")
    assert "line " in str(raised.value) and raised.value.hint


SHARDED = (
    *(
        "diagonal_fill",
        "diagonal_of_similarities",
        "strided_uneven",
        "mask_of_rows",
        "rows_in_a_loop",
        "rows_of_the_batch",
    ),
    *(
        "older_view_reads_the_new",
        "index_put_rows",
        "scatter_of_values",
        "corrected_moving_average",
        "rows_of_a_buffer",
    ),
    *("buffers_filled_with_constants", "counter_that_nothing_reads", "momentum_teacher"),
)


@pytest.mark.parametrize(
    "name",
    in_short(
        SHARDED,  # the first: strided views, rows in a loop, an older view, a scatter, a buffer that is read, one that is not
        *("diagonal_fill", "strided_uneven", "rows_in_a_loop", "older_view_reads_the_new", "scatter_of_values"),
        *("rows_of_a_buffer", "counter_that_nothing_reads"),
    ),
)
def test_writes_survive_sharding(name: str, workers2: WorkerPool) -> None:
    """The batch cut in time as well, where the graph lets it."""
    torch.manual_seed(0)
    subject = make_subject(Model(PATTERNS[name]), batch(), F.mse_loss, name=name)
    cut = 1 if annotate(subject.graph).unmicrobatchable else 2
    for options in ({"data": 2, "microbatches": cut}, {"tensor": 2}):
        outcome = check_plan(subject, manual_plan(subject.graph, **options), workers2)
        assert outcome.error.exact and outcome.stages_typed == 1


def test_layer_that_only_writes_a_buffer_is_emitted(workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    subject = make_subject(in_place_modules.Watched(), in_place_modules.batch(), F.mse_loss)
    assert any(not layer.outputs for layer in subject.graph.layers)
    outcome = check_plan(subject, manual_plan(subject.graph, data=2), workers2)
    assert outcome.error.exact and outcome.stages_typed == 1
