"""``autopar verify`` and ``autopar.verify``: what is checked, what is refused, and where a wrong program is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import rewriting
from click.testing import CliRunner
from exactness import mlp, subject
from in_place_modules import ParameterTeacher
from tiers import in_short, slow
from torch import Tensor, nn
from workers import WorkerPool

import autopar
import autopar.emit.program as program
from autopar import zoo
from autopar.capture import capture, reference
from autopar.cli.app import cli
from autopar.cli.verify import verdict
from autopar.emit.runtime import copy_runtime
from autopar.errors import BatchError, LaunchError, ModelError, UsageError
from autopar.measure import compare
from autopar.plan import Role
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate
from autopar.types import P, R
from autopar.verify import Difference, attack, check_plan, kinds, locate, make_subject, shrink_config, shrink_plan
from autopar.verify import run as verify_run
from autopar.verify.attacks import compare_with_eager
from autopar.verify.case import compare_step
from autopar.verify.locate import _assemble, _difference
from autopar.verify.remote import UPDATE_LR
from autopar.zoo.hf import build_config

KEYS = ["exact", "max_relative_difference", "plans_checked", "typechecked", "replicated_ops", "failures"]


class Dropping(nn.Module):
    """Dropout in three forms, a buffer, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.inner[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = self.drop(torch.relu(layer(x))) * self.scale
            x = nn.functional.dropout(x, 0.3, self.training)
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            x = nn.functional.scaled_dot_product_attention(q, q, q, None, 0.1).transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.parametrize("every", [8, slow(1)])
def test_every_kind_that_a_model_admits_is_checked(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default one kind in eight: the exactness tier has all pairs of their features."""
    some = kinds(2)[::every]
    monkeypatch.setattr(verify_run, "kinds", lambda devices: some)
    model, batch, loss_fn = mlp()
    told: list[str] = []
    report = autopar.verify(model, batch, loss_fn, progress=lambda what, done, total: told.append(what))
    assert report.exact and 0 < report.max_relative_difference < 1e-12
    names = [check.kind for check in report.checked]
    assert {*names, *report.skipped} == {kind.name for kind in some} and len(names) >= 12 / every
    assert report.typechecked == len(names) and told[:2] == ["capture", "attacks on one device"]
    assert told[2:-1] == [kind.name for kind in some]
    assert list(report.to_json())[:6] == KEYS


def test_dropout_is_off_and_the_model_is_not_touched() -> None:
    torch.manual_seed(0)
    model = Dropping()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan_batch = (torch.randn(8, 6, 16),)
    given = make_subject(model, plan_batch)
    assert given.dropout and given.loss == make_subject(model, plan_batch).loss
    assert "inner.0.bias" not in given.gradients
    assert model.drop.p == 0.5 and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_that_draws_numbers_is_refused() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + torch.randn_like(input)).square().mean()

    with pytest.raises(ModelError, match=r"draws random numbers \(normal ones, in "):
        make_subject(Noisy(4, 4), (torch.randn(8, 4),))


def test_what_has_no_values_or_no_room_is_refused() -> None:
    model, batch, loss_fn = mlp()
    with pytest.raises(UsageError, match=r"float64 on 4 processes takes about 425 kB, and 10 B are allowed") as refused:
        autopar.verify(model, batch, loss_fn, devices=4, memory_limit_bytes=10)
    assert "give a smaller model" in str(refused.value)
    with pytest.raises(ModelError, match="on meta"):
        autopar.verify(model.to("meta"), batch, loss_fn)
    with pytest.raises(BatchError, match="on meta"):
        autopar.verify(mlp()[0], tuple(tensor.to("meta") for tensor in batch), loss_fn)


# -- attacks ----------------------------------------------------------------------------------------------------------


class Masking(nn.Module):
    """Labels, a mask, a floating input, a buffer that is written, and a number that is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
        self.register_buffer("seen", torch.zeros(8))
        self.factor = 1.0

    def forward(self, ids: Tensor, keep: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) * weight[:, None, None] * self.factor
        x = x.masked_fill(~keep.bool()[..., None], 0.0) - self.seen
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


def masking() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(1, 11, (4, 6))
    keep = (torch.arange(6) < torch.tensor([6, 3, 2, 6])[:, None]).long()
    return Masking(), {"ids": ids, "keep": keep, "weight": torch.rand(4), "labels": ids.clone()}


def test_the_batch_is_made_harder_in_every_way_that_the_model_admits() -> None:
    model, batch = masking()
    found = attack(model, None, make_subject(model, batch))
    assert not found.broken and all(error.exact for error in found.tried.values()), found
    assert list(found.tried) == [
        "the given batch",
        "two steps in a row",
        "unevenly ignored labels in labels",
        "a fully masked row in keep",
        "integers at the ends of their range",
        "extreme values",
        "another number of rows",
        "as many rows as positions in a sequence",
        "eval()",
    ]
    assert list(found.skipped) == ["unevenly ignored labels in ids", "train()"]
    assert found.skipped["unevenly ignored labels in ids"].startswith("eager PyTorch raises IndexError: index out of")
    labels = found.subjects["unevenly ignored labels in labels"].batch["labels"]
    assert [int((row == -100).sum()) for row in labels] == [3, 0, 0, 6]
    edges = found.subjects["integers at the ends of their range"].batch["ids"]
    assert set(edges[0].tolist()) == {int(batch["ids"].min())} and set(edges[-1].tolist()) == {int(batch["ids"].max())}
    assert not found.subjects["a fully masked row in keep"].batch["keep"][0].any()


def test_what_makes_eager_pytorch_answer_nan_is_skipped() -> None:
    class Rooted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).square().sum() / input.sum(1).prod()

    found = attack(model := Rooted(3, 2), None, make_subject(model, torch.rand(4, 3) + 1.0))
    assert found.skipped["extreme values"] == "eager PyTorch's loss or gradients are not finite"


class BiasBeforeNorm(nn.Module):
    """Batch norm takes a constant away, so that the gradient of the convolution's bias is zero: what is left of it is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(nn.functional.relu(self.norm(self.conv(image))).mean((2, 3))).square().mean()


def test_a_gradient_that_is_rounding_alone_is_known_as_such() -> None:
    torch.manual_seed(0)
    model = BiasBeforeNorm()
    given = make_subject(model, torch.rand(16, 3, 24, 24) * 255)
    zero, gradient = given.rounding["conv.bias"], given.gradients["conv.bias"]
    assert 0 < float(gradient.abs().max()) < 100 * zero
    assert max(given.rounding[n] / float(g.abs().max()) for n, g in given.gradients.items() if n != "conv.bias") < 1e-12
    assert all(error.exact for error in attack(model, None, given).tried.values())
    noisy = given.gradients | {"conv.bias": gradient + 8 * zero}
    wrong = given.gradients | {"conv.bias": gradient + 32 * zero}
    how: Any = {"floor": 0.0, "rounding": given.rounding}
    assert compare(given.loss, noisy, given.loss, given.gradients, **how).exact
    assert compare(given.loss, wrong, given.loss, given.gradients, **how).where == "conv.bias"
    assert not compare(given.loss, wrong, given.loss, given.gradients, **how).exact
    assert not compare(given.loss, noisy, given.loss, given.gradients, floor=0.0).exact


class Nothing(nn.Linear):
    """A parameter, integers and numbers without elements, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor, more: Tensor) -> Tensor:
        rest = self.nothing.sum() + ids.sum() + more.sum()
        return super().forward(x * self.scale).square().mean() + rest


def test_tensors_without_elements_are_verified() -> None:
    model, batch = Nothing(), (torch.randn(4, 4), torch.zeros(4, 0, dtype=torch.long), torch.zeros(4, 0))
    given = make_subject(model, batch)
    assert "nothing" not in given.gradients  # it has no elements to train
    found = attack(model, None, given)
    assert not found.broken and all(error.exact for error in found.tried.values()), found
    assert found.skipped["integers at the ends of their range"] == "no input has integers"


def test_a_parameter_without_a_gradient_must_stay_as_it_is() -> None:
    given = make_subject(Nothing(), (torch.randn(4, 4), torch.zeros(4, 0, dtype=torch.long), torch.zeros(4, 0)))
    after = {n: t - UPDATE_LR * given.gradients[n] if n in given.gradients else t for n, t in given.state.items()}
    assert compare_step(given, given.loss, given.gradients, after).exact
    wrong = compare_step(given, given.loss, given.gradients, after | {"scale": 2 * after["scale"]})
    assert wrong.value == 1.0 and wrong.where == "the value of scale after the update"
    del after["scale"]
    assert not compare_step(given, given.loss, given.gradients, after).exact


class Masked(nn.Linear):
    """A mask with infinities beside a buffer that is written, and a frozen parameter with an infinity."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.limit = nn.Parameter(torch.tensor([1.0, float("inf")]), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -float("inf")]))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1.0)
        return ((super().forward(x) + self.mask).softmax(-1) * self.limit[0]).square().mean() * self.steps


def test_the_infinities_of_a_mask_are_no_error() -> None:
    found = attack(model := Masked(), None, make_subject(model, torch.randn(4, 4)))
    assert not found.broken and all(error.exact for error in found.tried.values()), found


def test_a_frozen_parameter_that_forward_writes_counts_as_a_buffer() -> None:
    model, batch = ParameterTeacher(), (torch.randn(4, 6), torch.randn(4, 4))
    found = attack(model, nn.functional.mse_loss, make_subject(model, batch, nn.functional.mse_loss))
    assert not found.broken and all(error.exact for error in found.tried.values()), found


class Clamping(nn.Module):
    """Writes to its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids.clamp_(max=2))).square().mean()


def test_attacks_leave_the_batch_of_a_model_that_writes_to_it_alone() -> None:
    ids = torch.arange(8)
    attack(Clamping(), None, make_subject(Clamping(), ids))
    assert torch.equal(ids, torch.arange(8))


def test_a_graph_that_is_not_the_model_is_said_to_be_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.run

    def wrong(graph: Any, parameters: Any, batch: Any, **rest: Any) -> Tensor:
        return right(graph, parameters, {name: tensor.clamp(max=5.0) for name, tensor in batch.items()}, **rest)

    model, batch, loss_fn = mlp()
    assert max(float(tensor.abs().max()) for tensor in batch) < 5.0
    monkeypatch.setattr(reference, "run", wrong)
    report = autopar.verify(model, batch, loss_fn, devices=1)
    assert not report.exact and report.max_relative_difference > 1e-3
    assert [(failure.kind, failure.plan) for failure in report.failures] == [("extreme values", "one device")]
    assert "the captured graph is not the model: " in report.failures[0].message
    data = report.to_json()
    assert data["exact"] is False and "extreme values" in [each["name"] for each in data["attacks"]]
    assert set(data["attacks_in_plans"].values()) == {"extreme values"}
    assert data["attacks_skipped"]["train()"] == "the model is in this mode"


@pytest.mark.parametrize("buffer", [float("nan"), 1.0])
def test_a_buffer_that_the_graph_writes_otherwise_is_no_exact_result(
    buffer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = masking()
    given = make_subject(model, batch)
    right = reference.run

    def wrong(*arguments: Any, buffers: dict[str, Tensor], **rest: Any) -> Tensor:
        loss = right(*arguments, buffers=buffers, **rest)
        buffers["seen"] = torch.full_like(buffers["seen"], buffer)
        return loss

    assert compare_with_eager(given).exact
    monkeypatch.setattr(reference, "run", wrong)
    assert not (error := compare_with_eager(given)).exact and error.where == "the new value of seen"


def test_every_plan_is_run_with_another_batch(workers2: WorkerPool) -> None:
    model, batch = masking()
    given = make_subject(model, batch)
    other = attack(model, None, given).subjects["unevenly ignored labels in labels"]
    assert abs(other.loss - given.loss) > 1e-3
    plan = manual_plan(given.graph, data=2, zero=3)
    outcome = check_plan(given, plan, workers2, attack=other)
    assert outcome.error.exact and outcome.attacked is not None and outcome.attacked.exact
    false = dataclasses.replace(other, loss=given.loss)
    assert not check_plan(given, plan, workers2, typed=False, attack=false).attacked.exact  # type: ignore[union-attr]


# -- where it is wrong ------------------------------------------------------------------------------------------------

# A model, the plan, what is wrong with the program's text, and the first difference: what, op, layer.
ALONE = "a parameter's gradient that is not reduced"
WRONG: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "attention that is not causal": (
        "llama", {"tensor": 2}, r", is_causal=True", "",
        r"value of scaled_dot_product_attention .* in model\.layers\.0: .*S\(1\) on tensor, local \[8, 4, 16, 4\] of \[8, 8, 16, 4\]",
    ),
    "a norm's epsilon, on slices of the sequence, recomputed": (
        "llama", {"tensor": 2, "sequence": True, "recompute": True}, r"1e-06", "1e-03",
        r"value of add \(aten\.add\) in model\.layers\.0",
    ),
    "a gradient that is not reduced": (
        "llama", {"tensor": 2, "overlap": "none"},
        r'(hidden_states_r_2 =) kernels\.dense_gradient\(spmd\.convert\((\w+), "tensor", src=spmd\.I, dst=spmd\.R\)\)',
        r"\1 \2", r"gradient of mul_7 \(aten\.mul\) in model\.layers\.3: .*I on tensor",
    ),
    "a gradient of joined products that is not reduced": (
        "llama", {"tensor": 2}, r'(kernels_overlap\.linears\([^()]*gate_proj[^()]*)axis="tensor"', r"\1axis=()",
        r"gradient of mul_7 \(aten\.mul\) in model\.layers\.3: .*I on tensor",
    ),
    ALONE: (
        "llama", {"tensor": 2, "sequence": True},
        r'= kernels\.dense_gradient\(spmd\.convert\((self\.\w+layernorm\.weight), "tensor", src=spmd\.I, dst=spmd\.R\)\)',
        r"= \1", r"gradient of (model\.layers\.\d)\.post_attention_layernorm\.weight \(parameter\) in \1: I on tensor",
    ),
    "the second of two stages": (
        "mlp", {"pipeline": 2, "microbatches": 4}, r"\* 0\.001953125", "* 0.00390625",
        r"value of mul \(aten\.mul\) in out: P on microbatch",
    ),
    "the second of two stages, each with a copy": (
        "mlp", {"pipeline": 2, "microbatches": 4, "schedule": "chimera"}, r"\* 0\.001953125", "* 0.00390625",
        r"value of mul \(aten\.mul\) in out: P on microbatch",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", in_short(WRONG, "attention that is not causal", ALONE, "the second of two stages, each with a copy")
)
def test_the_first_node_that_differs_is_named(what: str, workers2: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options, pattern, replacement, found = WRONG[what]
    given = subject(model)
    plan = manual_plan(given.graph, **options)
    right = check_plan(given, plan, workers2, typed=False).error
    assert right.exact
    monkeypatch.setattr(program, "model_source", rewriting(pattern, replacement))
    error = check_plan(given, plan, workers2, typed=False).error
    assert not error.exact
    difference = locate(given, plan, workers2, error)
    assert isinstance(difference, Difference) and re.search(found, str(difference)), str(difference)
    # parameters' gradients are in no order: of those that are summed wrongly, the one that is farthest off
    assert difference.op != "parameter" or difference.node == error.where


def test_a_nan_is_a_difference_between_ranks_and_from_the_reference() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    for parts in ([one, one, one, nan], [one, nan, one, one], [nan, one, one, one]):
        assert math.isnan(_assemble(parts, [2, 2], (P, R))[1])
    assert (
        _assemble([one, 2 * one, nan, nan], [2, 2], (P, R))[1] == 1.0
    )  # a NaN that all have is no difference between them
    assert math.isnan(_difference(nan, one)) and _difference(nan, nan) == 0.0
    assert _difference(torch.tensor([1j]), torch.tensor([2j])) == 0.5


def test_a_plan_with_local_steps_is_not_called_exact(tmp_path: Path) -> None:
    model, batch, loss_fn = mlp()
    graph = annotate(capture(model.double(), batch, loss_fn, precision="float64"))
    plan = manual_plan(graph, data=2, sync="local-steps:3", allow={"local_steps"})
    report = autopar.verify(model, batch, loss_fn, plan=plan)
    assert report.agrees and not report.exact and report.max_relative_difference < 1e-9
    assert report.to_json()["exact"] is False and "the first step of one device" in report.to_json()["reference"]
    assert verdict(report).startswith("matches its reference (not exact): 1 plan of") and "first step" in verdict(
        report
    )


def test_replicas_that_differ_after_an_update_are_found(workers2: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, and what the first replica reads, are right."""
    given = subject("mlp")
    plan = manual_plan(given.graph, data=2, sync="parameter-server")
    assert check_plan(given, plan, workers2, typed=False).error.exact

    def faulty(folder: Path, *uses: Any) -> None:
        copy_runtime(folder, *uses)
        file = Path(folder) / "runtime" / "parameters.py"
        text, count = re.subn(r"self\._sending = dist\.broadcast\(.*\)", "pass", file.read_text())
        assert count == 1
        file.write_text(text)

    monkeypatch.setattr(program, "copy_runtime", faulty)
    with pytest.raises(LaunchError, match="is not the same on the ranks of data"):
        check_plan(given, plan, workers2, typed=False)


@pytest.mark.parametrize("error", [AttributeError("no such thing"), KeyError("layer")])
def test_a_bug_in_a_plan_is_a_failure_of_that_plan(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(verify_run, "check_plan", broken)
    monkeypatch.setattr(verify_run, "kinds", lambda devices: kinds(devices)[:1])
    model, batch, loss_fn = mlp()
    (failure,) = autopar.verify(model, batch, loss_fn).failures
    assert failure.message == f"{type(error).__name__}: {error}"


def test_a_failure_is_reported_with_its_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, batch, loss_fn = mlp()
    graph = annotate(capture(model.double(), batch, loss_fn, precision="float64"))
    plan = tmp_path / "plan.json"
    plan.write_text(manual_plan(graph, data=2).dumps())
    monkeypatch.setattr(program, "model_source", rewriting(r"\* 0\.001953125", "* 0.00390625"))
    report = autopar.verify(model, batch, loss_fn, plan=plan)
    assert not report.exact and len(report.failures) == 1
    failure = report.to_json()["failures"][0]
    assert failure["first_difference"]["op"] == "aten.mul" and failure["first_difference"]["layer"] == "out"
    assert "data 2" in failure["plan"] and "off by" in failure["message"]


# -- smaller things ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", zoo.CATALOGUE, ids=lambda entry: entry.name)
def test_every_zoo_model_shrinks(entry: Any) -> None:
    small = shrink_config(entry.config)
    model, _ = build_config(small, 16, 8, "float32", "meta")
    assert sum(p.numel() for p in model.parameters()) < 2e6
    assert set(small) >= {key for key, value in entry.config.items() if value is not None}
    if "num_key_value_heads" in small:
        ratio = entry.config["num_attention_heads"] / entry.config["num_key_value_heads"]
        assert small["num_attention_heads"] / small["num_key_value_heads"] == min(ratio, 8)


def test_a_plan_for_many_devices_shrinks_to_few() -> None:
    graph = subject("llama").graph
    large = manual_plan(graph, pipeline=3, data=2, tensor=4, zero=3, microbatches=4, recompute=True)
    on_4 = shrink_plan(large, graph, 4)
    assert on_4.device_count == 4 and [axis.name for axis in on_4.mesh] == ["tensor"] and on_4.pipeline == 2
    assert {layer.strategy.options.recomputes for layer in on_4.layers} == {"all"}
    on_8 = shrink_plan(large, graph, 8)
    assert on_8.device_count == 8 and on_8.layers[0].strategy.roles == (Role.DATA, Role.TENSOR)
    assert on_8.layers[0].strategy.zero == 3
    assert shrink_plan(large, graph, 1).device_count == 1
    assert shrink_plan(on_8, graph, 8) is on_8
    grid = manual_plan(graph, mesh=make_mesh(("tensor0", 2), ("tensor1", 4)))
    assert shrink_plan(grid, graph, 2).device_count == 2


def test_a_plan_with_copies_of_shards_shrinks() -> None:
    graph = subject("llama").graph
    mesh = make_mesh(("data0", 4), ("data1", 2), ("tensor", 2))
    large = manual_plan(graph, mesh=mesh, zero=3, replicate=4)
    found = {n: shrink_plan(large, graph, n) for n in (8, 4, 2, 1)}
    assert {n: plan.device_count for n, plan in found.items()} == {n: n for n in found}
    assert found[8].layers[0].strategy.replicate == 2
    assert all(found[n].layers[0].strategy.replicate == 1 for n in (4, 2, 1))


def test_a_plan_that_reduces_once_a_step_shrinks() -> None:
    graph = subject("llama").graph
    large = manual_plan(graph, data=4, tensor=2, zero=2, reduce="step", microbatches=2)
    found = {n: shrink_plan(large, graph, n).layers[0].strategy for n in (4, 2, 1)}
    assert {n: (s.zero, s.options.by_name["reduce"]) for n, s in found.items()} == {
        4: (2, "step"),
        2: (0, "microbatch"),
        1: (0, "microbatch"),
    }


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_ends_with_zero(tmp_path: Path) -> None:
    factory = tmp_path / "own_model.py"
    factory.write_text(
        "import torch\n"
        "class Talkative(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        print('forward')\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    print('a model')\n"
        "    torch.manual_seed(1)\n"
        "    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]\n"
        "    return Talkative(*layers), (torch.randn(6, 8), torch.randn(6, 8)), torch.nn.functional.mse_loss\n"
    )
    result = CliRunner().invoke(cli, ["verify", f"{factory}:make", "--devices", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert "a model" in result.stderr and "forward" in result.stderr
    data = json.loads(result.stdout)
    assert list(data)[:6] == KEYS and data["exact"] is True and data["failures"] == [] and data["plans_checked"] == 2


def test_a_zoo_model_is_shrunk_and_its_plan_checked_at_its_own_size(tmp_path: Path) -> None:
    model, batch = zoo.build("gpt2", 64, 64)
    graph = annotate(capture(model, batch, precision="bfloat16"))
    plan = tmp_path / "plan.json"
    plan.write_text(manual_plan(graph, data=8, tensor=4, zero=1, microbatches=2, precision="bfloat16").dumps())
    arguments = ["verify", "gpt2", "--devices", "2", "--plan", str(plan), "--seq", "64"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "n_layer 4" in result.stdout and "32 devices type-checks (1 stages)" in result.stdout
    assert re.search(r"^exact: 1 plan of gpt2", result.stdout, re.MULTILINE)


class Stack(nn.Module):
    """Linear layers, of which the last is the first one's module under another name."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.last = self.inner[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def test_a_plan_that_does_not_fit_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What needs no capture is compared before it, the layers before the attacks, and a zoo model's before it is shrunk."""

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("this was not to be reached")

    batch = torch.randn(4, 8)
    plan = manual_plan(annotate(capture(Stack(3), batch)), data=2)
    monkeypatch.setattr(verify_run, "attack", never)
    with pytest.raises(UsageError, match="for a model of 3 layers .* this one has 4"):
        autopar.verify(Stack(5), batch, plan=plan)
    monkeypatch.setattr(verify_run, "make_subject", never)
    with pytest.raises(UsageError, match=r"Stack has no module inner.2 \(1 of the plan's 3 layers"):
        autopar.verify(Stack(2), batch, plan=plan)
    with pytest.raises(UsageError, match="for a global batch of 4, this one has 6"):
        autopar.verify(Stack(3), torch.randn(6, 8), plan=plan)
    with pytest.raises(UsageError, match="Sequential has no module inner.0 "):
        autopar.compile(nn.Sequential(nn.Linear(8, 8)), 2, (batch, batch), nn.functional.mse_loss, plan=plan)
    (tmp_path / "plan.json").write_text(plan.dumps())
    monkeypatch.setattr("autopar.cli.verify._load", never)
    result = CliRunner().invoke(cli, ["verify", "gpt2", "--plan", str(tmp_path / "plan.json"), "--seq", "16"])
    assert isinstance(result.exception, UsageError) and "for a model of 3 layers" in result.exception.message


def test_requests_that_make_no_sense_end_with_two(tmp_path: Path) -> None:
    for words in (
        ["nothing-like-it"],
        ["gpt2", "--plan", str(tmp_path / "none.json")],
        ["gpt2", "--memory-limit", "1KB"],
    ):
        result = CliRunner().invoke(cli, ["verify", *words])
        assert isinstance(result.exception, UsageError) and result.exception.exit_status == 2, (words, result.exception)
