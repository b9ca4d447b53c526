"""The report of expert parallelism: the hand-written program computes loss and gradients of transformers' model on one device, and the page
is what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import experts
import pytest
import torch
from experts_by_hand import VARIANTS, ByHand, Variant
from mixture import batch, config, loss_fn
from transformers import Qwen3MoeForCausalLM
from workers import WorkerPool

from autopar.capture.float64 import Float64Everywhere

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a report is no part of the product

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 8}


def trained(variant: dict[str, Any], state: str) -> dict[str, Any]:
    """In a worker: loss and gradients of the variant in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        program = ByHand(Variant(**variant), config(**SMALL), torch.load(state), 1e-3)
    finally:
        torch.set_default_dtype(torch.float32)
    with Float64Everywhere():  # ``grouped_mm`` takes no float64
        return {"loss": program.backward(*batch(0)), "gradients": dict(program.gradients())}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_by_hand_computes_the_loss_and_gradients_of_one_device(variant: Variant, workers4: WorkerPool, tmp_path: Path):
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config(**SMALL, experts_implementation="eager")).double()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    ids, labels = batch(0)
    with Float64Everywhere():
        loss = loss_fn(model(ids), labels)
        loss.backward()
    found = workers4.run("test_experts_report:trained", variant.to_dict(), str(tmp_path / "state.pt"))
    assert statistics.fmean(each["loss"] for each in found) == pytest.approx(float(loss.detach()), rel=1e-12)
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        scale = max(float(parameter.grad.abs().max()), 1e-6 * largest)
        for rank in found:
            assert float((rank["gradients"][name] - parameter.grad).abs().max()) <= 1e-9 * scale, name


def test_the_page_is_what_was_measured():
    assert experts.PAGE.read_text() == experts.page(experts.read())
