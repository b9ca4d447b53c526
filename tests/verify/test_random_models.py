"""The generator of random models: what it draws, that some of it is exact, and that a fault put in on purpose is found and made small."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from model_outcome import InvalidError, outcome, runs
from model_shrink import shrink
from model_text import Text, _draw, draw
from random_models import kept, reason, summary
from tiers import in_short
from torch import fx
from workers import WorkerPool

from autopar.capture import pipeline

SEEDS = range(16)


@pytest.mark.parametrize("first", in_short(map(str, range(0, len(SEEDS), 4)), "0"))
def test_random_models_are_exact_or_refused(first: str, workers2: WorkerPool) -> None:
    seeds = SEEDS[int(first) : int(first) + 4]
    found = {seed: outcome(draw(seed, runs), seed, workers2, typed=seed % 4 == 0) for seed in seeds}
    bad = [
        f"seed {seed}: {o.kind} ({o.stage}): {o.message}" for seed, o in found.items() if o.kind in ("wrong", "crash")
    ]
    assert not bad, "\n".join(["python tests/reports random-models --shrink SEED makes them smaller", *bad])
    assert sum(o.kind == "exact" for o in found.values()) >= 3


def test_a_seed_is_one_model_and_every_feature_is_drawn_often() -> None:
    assert draw(3, runs) == draw(3, runs) != draw(4, runs)
    features: Counter[str] = Counter()
    for seed in range(500):
        features.update(_draw(random.Random(f"model {seed} 0")).features)
    assert min(features[name] for name in ("tie", "mask", "in-place", "equal blocks", "coincide", "constant")) >= 75
    assert len(features) >= 20 and min(features.values()) >= 2, features


# -- a fault on purpose -----------------------------------------------------------------------------------------------

LINES = """B, S, D, H, V, E = 4, 6, 8, 2, 11, 4

class Block(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.up = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        h = self.norm(x)
        x = x + F.gelu(self.up(h))
        h = x.tanh()
        x = x + h
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block(i) for i in range(3)])

    def forward(self, x):
        x = self.embed(x)
        x = x * (torch.arange(x.shape[1]) + 1)[:, None]
        for block in self.blocks:
            x = block(x)
        x = x.cumsum(1)
        return x.square().mean()

model = Model()
vary(model)
batch = torch.randn(B, S, D)"""


def fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture takes every tanh for a sigmoid."""
    right = pipeline.simplify_constants

    def wrong(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
        right(gm, constants)
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sigmoid.default

    monkeypatch.setattr(pipeline, "simplify_constants", wrong)


@pytest.mark.slow
def test_a_fault_in_capture_is_found_and_the_model_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(tuple(LINES.split("\n")))
    assert outcome(text, 0, None).kind == "exact"
    fault(monkeypatch)
    found = outcome(text, 0, None)
    # the comparison that stands before every plan refuses it
    assert (found.kind, found.stage) == (
        "refused",
        "check",
    ) and "does not compute what the model computes" in found.message

    def fails(candidate: Text) -> bool:
        try:
            return runs(candidate) and outcome(candidate, 0, None).like == found.like
        except InvalidError:
            return False

    small = shrink(text, fails)
    lines = [line for line in small.lines if line.strip()]
    assert any("tanh" in line for line in lines) and fails(small)
    assert len(lines) <= 22 and not any(word in small.source for word in ("gelu", "LayerNorm", "cumsum", "arange"))


def test_what_does_not_run_is_no_outcome() -> None:
    text = Text(("model = nn.Linear(2, 2)", "batch = torch.randn(3, 5)"))
    assert not runs(text)
    with pytest.raises(InvalidError, match="RuntimeError"):
        outcome(text, 0, None)


def test_an_error_that_is_not_autopars_own_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(pipeline, "simplify_constants", broken)
    found = outcome(Text(tuple(LINES.split("\n"))), 0, None)
    assert (found.kind, found.stage) == ("crash", "capture") and found.message.startswith(
        "KeyError: 'nothing' (pipeline.py:"
    )


# -- results ----------------------------------------------------------------------------------------------------------


def test_results_are_counted_and_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import random_models

    monkeypatch.setattr(random_models, "code", lambda: "now")
    of = {
        "outcomes": {"exact": 98, "refused": 1, "wrong": 1},
        "planned": 60,
        "features": {"tie": {"exact": 9, "wrong": 1}},
    }
    lines: list[dict[str, Any]] = [
        {"seeds": [0, 99], **of, "code": "now"},
        {"seed": 7, "outcome": "refused", "message": "torch.export refused /a/b.py:12 `x[0]`: blocks.0.fc1 has 3 rows"},
        {"seed": 8, "outcome": "wrong", "stage": "capture", "message": "head.weight, step 1 is off by 1.0e+00"},
        {"seeds": [100, 199], **of, "code": "before"},
        {"seed": 107, "outcome": "refused", "message": "torch.export refused /c.py:9 `y`: blocks.1.fc12 has 4 rows"},
    ]
    assert kept(lines, [(0, 100), (100, 100)]) == {(0, 100): lines[:3]}
    lines.append(
        {"seeds": [200, 299], "outcomes": {"exact": 99, "refused": 1}, "planned": 60, "features": {}, "code": "before"}
    )
    assert kept(lines, [(100, 100), (200, 100)], of_any_code=True) == {(200, 100): lines[5:]}
    del lines[5:]
    assert reason(lines[1]["message"]) == reason(lines[4]["message"])
    words = summary(lines)
    assert "200 models: 196 exact, 2 refused, 2 wrong; 120 of them run" in words and "tie: 18 exact, 2 wrong" in words
    assert "refused 2: torch.export refused ... `...`: ... has N rows" in words and "wrong: seed 8 (capture)" in words
