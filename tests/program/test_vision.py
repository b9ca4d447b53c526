"""Batch norm over parts of a batch, recurrent kernels, buffers: on real processes, against PyTorch on one device."""

from __future__ import annotations

import pytest
import spmd_types as spmd
import torch
import vision_models
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.capture import capture
from autopar.emit import emit
from autopar.program import kernels_norm, kernels_rnn
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify.remote import open_trainer


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor) -> list[Tensor]:
    """In a worker: the kernel's result, statistics and gradients on this rank's rows of ``x``."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("data",))
    own = x.chunk(count)[rank].clone().requires_grad_()
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    with spmd.set_current_mesh(mesh):
        statistics = kernels_norm.batch_statistics(own, axis="data")
        mean, var, _ = spmd.convert(statistics, "data", src=spmd.I, dst=spmd.R).unbind(0)
        out = kernels_norm.normalise(own, mean, var, weight, bias, 1e-5)
        out.backward(upstream.chunk(count)[rank])
    assert own.grad is not None and weight.grad is not None and bias.grad is not None
    return [out.detach(), statistics.detach(), own.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 2, 4)])
def test_statistics_are_the_whole_batch_s(workers2, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 50 for _ in range(2))
    weight, bias = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2))
    results = workers2.run("test_vision:_normalised", x, weight, bias, upstream)
    whole = x.clone().requires_grad_()
    leaves = [whole, weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    mean, var = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    out = nn.functional.batch_norm(whole, mean, var, leaves[1], leaves[2], training=True, momentum=1.0)
    gradients = torch.autograd.grad(out, leaves, upstream)
    parts = [torch.cat([result[i] for result in results]) for i in (0, 2)]
    sums = [sum(result[i] for result in results) for i in (3, 4)]
    wanted = [out.detach(), gradients[0], *gradients[1:], mean, var]
    for got, want in zip([*parts, *sums, results[0][1][0], results[1][1][2]], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12 * float(want.abs().max()))


def test_low_precision_statistics_are_wide() -> None:
    x = torch.randn(64, 2, 8).bfloat16()
    statistics = kernels_norm.batch_statistics(x)
    assert statistics.dtype == torch.float32
    torch.testing.assert_close(statistics[1], x.float().var((0, 2), correction=0))
    assert kernels_norm.normalise(x, statistics[0], statistics[1]).dtype == torch.bfloat16


def test_running_statistics_of_16_bits_are_applied_in_32() -> None:
    x, weight, bias = torch.randn(64, 2, 8).bfloat16() * 3 + 40, torch.randn(2).bfloat16(), torch.randn(2).bfloat16()
    mean, var = torch.tensor([40.1, 39.7]).bfloat16(), torch.tensor([9.3, 8.8]).bfloat16()
    expected = nn.functional.batch_norm(x.float(), mean.float(), var.float(), weight.float(), bias.float())
    found = kernels_norm.normalise(x, mean, var, weight, bias)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2**-8)


def test_recurrent_states_follow_the_outputs() -> None:
    torch.manual_seed(0)
    module = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(5, 6, 3)
    out, (hidden, cell) = module(x)
    packed = kernels_rnn.recurrent(x, [], module._flat_weights, "lstm", True, 2, 0.0, True)  # type: ignore[arg-type]
    torch.testing.assert_close(packed[:, :6], out)
    for start, states in ((6, hidden), (8, cell)):
        torch.testing.assert_close(packed[:, start : start + 2].reshape(5, 4, 4).transpose(0, 1), states)


def _steps(folder: str, state: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """In a worker: the state after two steps that leave the parameters alone, with a look at the gradients in between, which writes
    nothing."""
    trainer = open_trainer(folder, state)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.step(batch)
    trainer.forward_backward(batch)
    trainer.step(batch)
    return trainer.state_dict()


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_move_once_a_step(workers2, tmp_path, recompute) -> None:
    model, (x, y), loss_fn = vision_models.resnet()
    model = model.double().train()
    graph = annotate(capture(model, (x, y), loss_fn, precision="float64"))
    emit(graph, manual_plan(graph, data=2, recompute=recompute), tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = workers2.run("test_vision:_steps", str(tmp_path), str(tmp_path / "state.pt"), {"x": x, "targets": y})[0]
    model(x), model(x)
    assert state.keys() == model.state_dict().keys()
    assert int(state["bn1.num_batches_tracked"]) == 2
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(state[name], buffer, rtol=1e-12, atol=1e-12)


def test_local_batch_norm_is_said_and_takes_microbatches(workers2, tmp_path) -> None:
    model, (x, y), loss_fn = vision_models.resnet()
    model = model.double().train()
    graph = annotate(capture(model, (x, y), loss_fn, precision="float64", local_batch_norm=True))
    assert graph.unmicrobatchable == "" and any("local_batch_norm" in note for note in graph.notes)
    emit(graph, manual_plan(graph, data=2, microbatches=2), tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    batch = {"x": x, "targets": y}
    loss, _, state = workers2.run("autopar.verify.remote:gradients", str(tmp_path), str(tmp_path / "state.pt"), batch)[
        0
    ]
    parts = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)]
    assert loss == pytest.approx(sum(float(loss_fn(model(a), b).detach()) for a, b in parts) / 4, rel=1e-12)
    assert int(state["bn1.num_batches_tracked"]) == 1  # once a step
