"""Experts as loops over what tokens chose: one computation for all experts, exactly, or refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import slow
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture, check_capture
from autopar.capture.backward import NotTraceableError
from autopar.devices import parse
from autopar.errors import CaptureError
from autopar.graph import Graph
from autopar.price import Pricer
from autopar.search import SearchOptions, search
from autopar.search.manual import manual_plan
from autopar.verify import Subject, check_plan, make_subject
from autopar.verify.attacks import compare_with_eager

WIDTH, COUNT, ROWS, SEQUENCE = 8, 4, 8, 6

Run = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """``run(self, x, index, weights)`` gives the mixture of the tokens ``x``. No token chooses the last expert."""

    def __init__(self, run: Run, chosen: int) -> None:
        super().__init__()
        self.run, self.chosen = run, chosen
        self.router = nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(COUNT)
        )
        self.stacked = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH) * 0.1)
        self.bias = nn.Parameter(torch.linspace(0.5, 1.5, COUNT))
        self.vectors = nn.Parameter(torch.randn(COUNT, COUNT))
        self.squares = nn.Parameter(torch.randn(COUNT, COUNT, COUNT))
        with torch.no_grad():
            self.router.bias[-1] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, index = self.router(flat).softmax(-1).topk(self.chosen)
        return self.run(self, flat, index, weights).view_as(x)


class Model(nn.Module):
    def __init__(self, run: Run, chosen: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.mixture = Mixture(run, chosen)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return F.mse_loss(self.b(h + self.mixture(h)), t)


def model(run: Run, chosen: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Model(run, chosen).double()


def batch() -> dict[str, Tensor]:
    x = torch.linspace(-2, 3, ROWS * SEQUENCE * 4, dtype=torch.float64).reshape(ROWS, SEQUENCE, 4)
    return {"x": (7 * x).sin(), "t": x.cos()}


@functools.cache
def captured(run: Run) -> Graph:
    return capture(model(run), batch(), precision="float64")


@functools.cache
def subject_of(run: Run, chosen: int = 2) -> Subject:
    return make_subject(model(run, chosen), batch())


def hit_loop(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As the first Mixtral of transformers."""
    out = torch.zeros_like(x)
    mask = F.one_hot(index, num_classes=COUNT).permute(2, 1, 0)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        choice, token = torch.where(mask[expert].squeeze(0))
        rows = x[None, token].reshape(-1, WIDTH)
        out.index_add_(0, token, m.experts[expert](rows) * weights[token, choice, None])
    return out


def numbers(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Positions as numbers, ``any`` as the condition, stored matrices."""
    out = torch.zeros_like(x)
    mask = F.one_hot(index, num_classes=COUNT).permute(2, 1, 0)
    for expert in mask.any(dim=(1, 2)).nonzero().flatten().tolist():
        choice, token = torch.where(mask[expert])
        out.index_add_(0, token, (x[token] @ m.stacked[expert]).tanh() * weights[token, choice, None])
    return out


def capacity(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As transformers' Switch: choices beyond an expert's capacity are dropped."""
    out = torch.zeros_like(x)
    one_hot = F.one_hot(index, num_classes=COUNT)
    mask = (one_hot * (one_hot.cumsum(0) <= 9)).permute(2, 1, 0)
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, m.experts[int(expert[0])](x[token]) * weights[token, choice, None])
    return out


def segments(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As JetMoe."""
    gates = torch.zeros(len(x), COUNT, dtype=x.dtype).scatter(1, index, 1)
    sizes = gates.long().sum(0).tolist()
    _, order = index.flatten().sort(0)
    token = order.div(index.shape[1], rounding_mode="trunc")
    parts = x[token].split(sizes, dim=0)
    rows = torch.cat([F.linear(part, m.stacked[i]) for i, part in enumerate(parts)], dim=0)
    return torch.zeros_like(x).index_add(0, token, rows * weights.flatten()[order][:, None])


def compared(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As nanoGPT's relatives: a loop over modules, and choices that are compared with the module's number."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def indexed(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As mistral-inference: a sum by index, in place."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out[token] += weights[token, choice, None] * expert(x[token])
    return out


def skipped(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A loop that skips experts without tokens."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def skipped_by_mask(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        mask = index == number
        if mask.any():
            token, choice = torch.where(mask)
            out[token] += weights[token, choice, None] * expert(x[token])
    return out


def own_bias(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A vector and a number of each expert, in pointwise ops, on rows as wide as there are experts."""
    x = x[:, :COUNT].contiguous()
    out = torch.zeros_like(x)
    for number in range(COUNT):
        token, choice = torch.where(index == number)
        rows = F.relu(x[token] @ m.squares[number] + m.vectors[number]) * m.bias[number]
        out.index_add_(0, token, rows * weights[token, choice, None])
    return torch.cat([out, out], -1)


def fused_gate(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU whose gate and up are one product."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        gate, up = expert[0](x[token]).chunk(2, dim=-1)
        inner = torch.cat([F.silu(gate) * up, gate], dim=-1)
        out[token] += weights[token, choice, None] * expert[2](inner)
    return out


def other_width(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The results are wider than the tokens."""
    out = torch.zeros(len(x), 12, dtype=x.dtype)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out[token] += weights[token, choice, None] * expert[0](x[token])
    return out[:, :WIDTH]


@pytest.mark.parametrize(("run", "experts"), [(own_bias, COUNT), (fused_gate, COUNT), (other_width, 0)])
def test_bodies_are_exact(run: Run, experts: int) -> None:
    subject = subject_of(run)
    error = compare_with_eager(subject)
    assert error.exact, error
    assert max(cls.experts for cls in subject.graph.classes.values()) == experts


@pytest.mark.parametrize(
    ("run", "chosen"),
    [
        *itertools.product([hit_loop, numbers, capacity, segments, compared, indexed], (1, 2)),
        *((skipped, 2), (skipped_by_mask, 2)),  # each traced six times
        *(slow(skipped, 1), slow(skipped_by_mask, 1)),
    ],
)
def test_loops_become_mixtures(run: Run, chosen: int) -> None:
    subject = subject_of(run, chosen)
    error = compare_with_eager(subject)
    assert error.exact, error
    assert COUNT in {cls.experts for cls in subject.graph.classes.values()}


@pytest.mark.parametrize("run", [hit_loop, slow(capacity), skipped])
def test_skipped_experts_get_a_gradient_of_zeros_and_a_note(run: Run) -> None:
    graph = captured(run)
    parameters = {
        f"mixture.experts.{i}.{n}" for i in range(COUNT) for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    assert graph.possibly_unused == parameters
    assert any("no token chooses them" in note for note in graph.notes)
    assert "equals the model" in check_capture(graph, model(run), batch(), None).note
    assert "mixture.experts.3.0.weight" in subject_of(run).gradients  # eager PyTorch has none


def test_loops_that_ask_for_their_positions_need_no_comparison() -> None:
    assert not captured(hit_loop).assumed
    assert captured(numbers).assumed
    assert captured(skipped).assumed


@pytest.mark.parametrize("run", [compared, numbers])
def test_a_plan_says_how_many_experts_each_device_has(run: Run) -> None:
    graph, cluster = captured(run), parse("2xH100-80GB")
    plan = search(graph, cluster, Pricer(graph, cluster, "bfloat16"), SearchOptions(expert=2))
    assert not any("has the parameters of all" in note for note in plan.notes)
    assert any(f"each device has 2 of {COUNT} experts" in note for note in plan.notes)


def test_experts_that_all_run_are_not_possibly_unused() -> None:
    assert not captured(segments).possibly_unused


@pytest.mark.parametrize(
    "options",
    [{"data": 2, "zero": 3}, {"expert": 2}, {"tensor": 2}],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("run", [hit_loop, segments, indexed, skipped], ids=lambda run: run.__name__)
def test_programs_are_exact(run: Run, options: dict[str, Any], workers2: WorkerPool) -> None:
    subject = subject_of(run)
    outcome = check_plan(subject, manual_plan(subject.graph, **options), workers2)
    assert outcome.error.exact, outcome.error


# -- what isn't proved stays refused -----------------------------------------------------------------------------------


def _hits(m: Any, index: Tensor) -> tuple[Tensor, Tensor]:
    mask = F.one_hot(index, num_classes=COUNT).permute(2, 1, 0)
    return mask, (mask.sum(dim=(-1, -2)) > 0).nonzero()


def busy_only(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), F.one_hot(index, num_classes=COUNT).permute(2, 1, 0)
    for expert in (mask.sum(dim=(-1, -2)) > 3).nonzero():  # skips experts with tokens
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, m.experts[expert](x[token]) * weights[token, choice, None])
    return out


def negative(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out, one_hot = torch.zeros_like(x), F.one_hot(index, num_classes=COUNT)
    mask = (one_hot * (2 * (one_hot.cumsum(0) % 2) - 1)).permute(2, 1, 0)  # sums of 1 and -1 may be zero
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, m.experts[expert](x[token]) * weights[token, choice, None])
    return out


def more_than_rows(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out, (mask, hits) = torch.zeros_like(x), _hits(m, index)
    for expert in hits:
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, m.experts[expert](x[token]) * weights[token, choice, None])
        out.add_(m.bias[expert])  # for every expert that was hit, to all tokens
    return out


def mixed_rows(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out, (mask, hits) = torch.zeros_like(x), _hits(m, index)
    for expert in hits:
        choice, token = torch.where(mask[expert].squeeze(0))
        rows = m.experts[expert](x[token])
        out.index_add_(0, token, (rows - rows.mean(0)) * weights[token, choice, None])
    return out


def onto_itself(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    x = x.clone()
    out, (mask, hits) = x.view(-1, WIDTH), _hits(m, index)
    for expert in hits:  # a later expert reads what an earlier one added
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, m.experts[expert](x[token]) * weights[token, choice, None])
    return out


def unequal(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out, (mask, hits) = torch.zeros_like(x), _hits(m, index)
    for expert in hits:
        choice, token = torch.where(mask[expert].squeeze(0))
        scale = 2.0 if int(expert) == 1 else 1.0
        out.index_add_(0, token, m.experts[expert](x[token]) * scale * weights[token, choice, None])
    return out


def other_order(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    counts = F.one_hot(index.flatten(), COUNT).sum(0)
    token = index.flatten().argsort(stable=True) // index.shape[1]
    parts = x[token].split(counts.tolist())
    rows = torch.cat([part @ m.stacked[i] for i, part in reversed(list(enumerate(parts)))])
    return torch.zeros_like(x).index_add(0, token, rows)


def sizes_read(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return x * max(F.one_hot(index.flatten(), COUNT).sum(0).tolist())


def stops(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out, (mask, hits) = torch.zeros_like(x), _hits(m, index)
    for expert in hits:
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, m.experts[expert](x[token]) * weights[token, choice, None])
        if int(expert) == 2:
            break
    return out


def one_class_more(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As transformers' DBRX: no expert has the last position, for which the body cannot run."""
    out, mask = torch.zeros_like(x), F.one_hot(index, num_classes=COUNT + 1).permute(2, 1, 0)
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, (x[token] @ m.stacked[expert[0]]) * weights[token, choice, None])
    return out


def fewer_experts(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Tokens may choose an expert that is not there."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts[:-1]):
        token, choice = torch.where(index == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def perhaps_twice(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A token may have an expert twice, so that only one of its terms is written back."""
    out, index = torch.zeros_like(x), index // 2
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out[token] += weights[token, choice, None] * expert(x[token])
    return out


def written_back_doubled(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out[token] = 2 * out[token] + weights[token, choice, None] * expert(x[token])
    return out


def added_meanwhile(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What the right side adds to the rows is overwritten."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out[token] += weights[token, choice, None] * expert(x[token]) + out.add_(1)[token]
    return out


def changed_choices(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """An expert's tokens choose the next one, too."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        index.view(-1).masked_fill_(index.view(-1) == number, number + 1)  # through a view
    return out


def read_meanwhile(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A view of the sum is read when some experts are added."""
    both, part = torch.cat([x * 0, x]), torch.zeros(())
    out = both[: len(x)]
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        if number == 2:
            part = both.tanh().sum()
    return out + part


def changed_meanwhile(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The sum of some experts is doubled, through a view."""
    out = x * 0
    view = out.view(-1)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        if number == 1:
            view.mul_(2)
    return out


def common_peak(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """An op with two results."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        rows = expert(x[token])
        out[token] += weights[token, choice, None] * rows / rows.max(-1, keepdim=True)[0]
    return out


def skipping(
    without: Callable[[Tensor], Tensor | None] = lambda out: out,
    branch: Callable[[Tensor, Tensor], bool] = lambda token, _: token.numel() == 0,
    after: Callable[[Tensor, int], Tensor] = lambda out, _: out,
) -> Run:
    """A loop that skips experts: ``without`` changes the sum, or leaves the loop by ``None``; ``after`` gets the number of iterations."""

    def run(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out, hits = torch.zeros_like(x), 0
        for number, expert in enumerate(m.experts):
            token, choice = torch.where(index == number)
            if branch(token, index == (number + 1) % COUNT):
                changed = without(out)
                if changed is None:
                    break
                out = changed
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
            hits += 1
        return after(out, hits)

    return run


def skips_all_later(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """All branches are there, and an expert is skipped if an earlier one has no tokens."""
    out, done = torch.zeros_like(x), False
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(index == number)
        done = (token.numel() == 0) or done
        if not done:
            out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def skips_the_last(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The last expert is also skipped if expert 1 has no tokens."""
    out, rows = torch.zeros_like(x), [torch.where(index == number) for number in range(COUNT)]
    skipped = [token.numel() == 0 for token, _ in rows]
    for number, (token, choice) in enumerate(rows):
        if not (skipped[number] or number == 3 and skipped[1]):
            out.index_add_(0, token, m.experts[number](x[token]) * weights[token, choice, None])
    return out


SKIPPING = {
    "skips all later experts": skips_all_later,
    "skips the last expert": skips_the_last,
    "leaves the loop": skipping(without=lambda out: None),
    "adds without tokens": skipping(without=lambda out: out + 1),
    "adds in place": skipping(without=lambda out: out.add_(1)),
    "skips few tokens": skipping(branch=lambda token, _: token.numel() < 3),
    "skips experts with tokens": skipping(branch=lambda token, _: token.numel() > 0),
    "another expert's tokens": skipping(branch=lambda _, other: not other.any()),
    "counts": skipping(after=lambda out, hits: out / max(hits, 1)),
    "counts as a tensor": skipping(after=lambda out, hits: out / torch.tensor(float(max(hits, 1)), dtype=out.dtype)),
    "one is skipped": skipping(after=lambda out, hits: out * 2 if hits == COUNT - 1 else out),
    "one is chosen": skipping(after=lambda out, hits: out * 2 if hits == 1 else out),
}


@pytest.mark.parametrize("why", SKIPPING)
def test_other_branches_in_loops_are_refused(why: str) -> None:
    with pytest.raises(CaptureError, match=r"test_expert_loops\.py"):
        capture(model(SKIPPING[why]), batch(), precision="float64")


def test_a_loop_that_only_skips_is_a_mixture() -> None:
    """The control of the test above."""
    assert (
        max(cls.experts for cls in capture(model(skipping()), batch(), precision="float64").classes.values()) == COUNT
    )


REFUSED = [
    common_peak,
    read_meanwhile,
    changed_meanwhile,
    added_meanwhile,
    changed_choices,
    fewer_experts,
    perhaps_twice,
    written_back_doubled,
    busy_only,
    negative,
    more_than_rows,
    mixed_rows,
    onto_itself,
    unequal,
    other_order,
    sizes_read,
]


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_what_is_not_proved_is_refused(run: Run) -> None:
    with pytest.raises(CaptureError, match=r"test_expert_loops\.py"):
        capture(model(run), batch(), precision="float64")


def test_a_count_of_iterations_is_no_expert() -> None:
    def run(m: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out, (mask, hits) = torch.zeros_like(x), _hits(m, index)
        for number, expert in enumerate(hits):
            choice, token = torch.where(mask[expert].squeeze(0))
            out.index_add_(0, token, m.experts[number](x[token]) * weights[token, choice, None])
        return out

    graph = captured(run)
    with pytest.raises(
        CaptureError, match="taken not to count its iterations, and the captured graph does not compute"
    ):
        check_capture(graph, model(run), batch(), None)


@pytest.mark.parametrize(
    ("run", "reason"),
    [(stops, "loops over nonzero"), (one_class_more, "control flow depends on the data")],
)
def test_a_loop_that_stops_or_cannot_run_may_be_kept_whole(run: Run, reason: str) -> None:
    """An error that names the module: where its inputs and results allow it, capture makes it one opaque op."""
    with pytest.raises(NotTraceableError, match=reason) as caught:
        capture(model(run), batch(), precision="float64")
    assert "mixture" in caught.value.paths
