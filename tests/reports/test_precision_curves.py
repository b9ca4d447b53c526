"""The page of precisions says what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from precision_curves import FP8_WAYS, SIZES, STATES, WAYS, WINDOW, batches, draw, furthest, page, smoothed

pytestmark = pytest.mark.slow  # a report is no part of the product


def line(precision: str, shift: float, at: int, seed: int = 0) -> dict[str, Any]:
    losses = [4.0 - 0.01 * step + shift * (step == at) for step in range(60)]
    scale = 16384.0 if precision == "float16" else None
    return {
        "precision": precision, "seed": seed, "losses": losses, "loss_scale": scale, "parameters": 2_000_000, "tokens_per_step": 64,
        "text_bytes": 3_000_000, "device": "cpu", "torch": "2", "python": "3",
    }  # fmt: skip


def test_the_largest_difference_is_that_of_the_smoothed_curves() -> None:
    lines = [line(way.name, shift, 30) for way, shift in zip(WAYS, (0.0, 1.0, -2.0, 4.0), strict=True)]
    assert smoothed(lines[0]["losses"])[40] == pytest.approx(sum(lines[0]["losses"][21:41]) / WINDOW)
    step, difference = furthest(lines[2], lines[0])
    assert 30 <= step < 30 + WINDOW and difference == pytest.approx(-2.0 / WINDOW)
    states = [line(way.name, shift, 59) for way, shift in zip(STATES, (0.0, 0.341, -0.341, 0.0), strict=True)]
    shifts = {"mixture in fp8_blockwise": (0.682, 0.341)}
    fp8 = [line(way.name, shifts.get(way.name, (0.0, 0.0))[seed], 59, seed) for seed in range(2) for way in FP8_WAYS]
    text = page(lines, states, fp8)
    assert "| mixture in fp8_blockwise | 3.9215 | +15.00% ± 5.00% | 3.5306 | +0.73% ± 0.24% |" in text
    assert "| mixture in mxfp8 | 3.4100 | +0.00% ± 0.00% |" in text
    assert "With fp8_dispatch" in text and "With fp8_dispatch" not in page(lines, states, fp8[:1])
    assert "Means of 2 runs" in text and "Means of 1 runs" not in text
    assert "| bfloat16 moments | 3.7510 | +10.00% | 3.5221 | +0.49% |" in text
    assert "| bfloat16 | 4.0000 | 3.4100 | +0.0500 |" in text and "| float32 | 4.0000 | 3.4100 | - | - | - |" in text
    assert "16,384 in the last step: 2 steps were skipped" in text and "2.0 million parameters" in text


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw([line(way.name, 0.1, 5) for way in WAYS], tmp_path / "precision.svg")
    assert "<svg" in (tmp_path / "precision.svg").read_text()


def test_every_precision_reads_the_same_text() -> None:
    size = SIZES["cpu"]
    first, again = (list(batches(size, 2)) for _ in range(2))
    assert all(
        torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    inputs, targets = first[0]
    assert inputs.shape == (size.rows, size.length) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(first[0][0], first[1][0]) and int(inputs.max()) < 256
