"""What capture says to a batch or a model that it cannot take, and how batches map to names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workers import WorkerPool

from autopar.capture import Float64Everywhere, capture, check_capture, flatten_batch, rebuild_batch, reference
from autopar.errors import BatchError, CaptureError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        y = self.linear(x)
        return y if scale is None else (y * scale).mean()


class Branches(Linear):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


class Selects(Linear):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.linear(x[x.sum(-1) > 0]).max()


class Reads(Linear):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.linear(x).mean() * x.sum().item()


class Returns(Linear):
    """Returns what it is told to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        loss, y = self.linear(x).mean(), self.linear(x)
        kinds = {
            "loss": loss,
            "tuple": (loss, y),
            "second": (y, loss),
            "dict": {"loss": loss, "y": y},
            "two": (y, loss, loss),
        }
        return kinds[self.kind]


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model", [Branches(), Selects(), Reads()])
def test_data_dependence_names_the_line_and_the_way_out(model: nn.Module) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, X)
    assert __file__ in caught.value.message
    expected = "depends on values that differ" if isinstance(model, Branches) else "depends on the data"
    assert expected in caught.value.message
    assert "autopar.opaque" in str(caught.value.hint)


def test_nothing_is_printed_when_export_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(Branches(), X)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["loss", "tuple", "second", "dict"])
def test_where_the_loss_may_be(kind: str) -> None:
    graph = capture(Returns(kind), X)
    assert graph.values[graph.loss].shape == ()
    ops = [str(n.target) for cls in graph.classes.values() for n in cls.graph.graph.nodes if n.op == "call_function"]
    assert ops == [
        "aten.linear.default",
        "aten.add.Tensor",
        "aten.sum.default",
        "aten.mul.Tensor",
    ]  # the other linear is dead


def test_no_loss() -> None:
    with pytest.raises(CaptureError, match=r"a tensor float32\[6, 4\].*no 0-d floating loss"):
        capture(Linear(), X)
    with pytest.raises(CaptureError, match="a tuple"):
        capture(Returns("two"), X)
    with pytest.raises(CaptureError, match="loss_fn returned a tensor"):
        capture(Linear(), (X, X), lambda output, target: output - target)


def test_the_loss_must_depend_on_a_parameter() -> None:
    model = Returns("loss")
    model.requires_grad_(False)
    with pytest.raises(CaptureError, match="does not depend on any trainable parameter"):
        capture(model, X)


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        (X, F.mse_loss, "must be the pair"),
        ((X, X[:3]), F.mse_loss, "disagree on dim 0"),
        ({"x": 1}, None, "contains no tensor"),
        ((X, X, X), None, "3 positional tensors"),
    ],
)
def test_batches_that_are_none(batch: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        capture(Linear(), batch, loss_fn)


def test_unknown_precision() -> None:
    with pytest.raises(CaptureError, match="float31"):
        capture(Linear(), (X, X), F.mse_loss, precision="float31")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, X[:3]), r"takes targets: float32\[6, 4\], and this is targets: float32\[3, 4\]"),
        ((X, X.long()), r"this is targets: int64\[6, 4\]"),
        ((X,), "must be a tuple of 2, but is a tuple of 1"),
        ((X, None), "but is a NoneType"),
        (
            (X, X.numpy()),
            r"the batch\[1\] is a numpy array, float32\[6, 4\], not a tensor\n.*hint: torch.from_numpy",
        ),
    ],
)
def test_later_batches_must_fit(batch: Any, message: str) -> None:
    graph = capture(Linear(), (X, X), F.mse_loss)
    with pytest.raises(BatchError, match=message):
        flatten_batch(graph.structure, batch)


def test_names_follow_the_arguments() -> None:
    graph = capture(Linear(), {"x": X, "scale": X[:, :1]})
    assert [value.name for value in graph.inputs] == ["x", "scale"]
    assert list(flatten_batch(graph.structure, {"scale": X[:, :1], "x": X})) == ["x", "scale"]
    graph = capture(Linear(), (X, X[:, :1]))
    assert [value.name for value in graph.inputs] == ["x", "scale"]
    with pytest.raises(BatchError, match=r"keys \['scale', 'x'\]"):
        flatten_batch(capture(Linear(), {"x": X, "scale": X}).structure, {"x": X})


def test_one_tensor_given_twice_is_two_inputs() -> None:
    graph = capture(Linear(), (X, X), F.mse_loss)
    (layer,) = graph.layers
    assert layer.inputs == ("x", "targets")


def test_precision_casts_floating_tensors() -> None:
    graph = capture(Linear(), (X, X), F.mse_loss, precision="bfloat16")
    assert graph.dtype == torch.bfloat16
    assert {value.dtype for value in graph.inputs} == {torch.bfloat16}
    dtypes = {name: value.dtype for name, value in graph.values.items()}
    assert dtypes.pop(graph.loss) == torch.float32  # what is added up over the batch
    assert set(dtypes.values()) <= {torch.bfloat16}
    assert flatten_batch(graph.structure, (X, X))["x"].dtype == torch.bfloat16


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x).bfloat16()).double() * self.scale).square().mean()


def test_parameters_of_several_dtypes_keep_them_and_the_most_elements_name_the_precision() -> None:
    graph = capture(Mixed(), torch.randn(2, 4))
    assert graph.dtype == torch.float32
    assert {p.original: p.dtype for p in graph.parameters.values()} == {
        n: p.dtype for n, p in Mixed().named_parameters()
    }
    (note,) = (note for note in graph.notes if "several dtypes" in note)
    assert "40 of float32, 36 of bfloat16, 1 of float64" in note
    with Float64Everywhere():  # the cast to bfloat16 is widened, too
        whole = capture(Mixed(), torch.randn(2, 4), precision="float64")
    assert not any("several dtypes" in note for note in whole.notes)
    assert {value.dtype for value in whole.values.values()} == {torch.float64}


def test_a_loss_fn_of_one_argument_takes_the_output_alone() -> None:
    model = nn.Linear(3, 2)
    graph = capture(model, (torch.randn(4, 3),), lambda output: output.square().mean())
    assert [value.name for value in graph.inputs] == ["input"]
    x = torch.randn(4, 3)
    loss = reference.run(graph, dict(model.named_parameters()), {"input": x})
    torch.testing.assert_close(loss, model(x).square().mean())


def test_a_keyword_that_forward_does_not_take() -> None:
    with pytest.raises(BatchError, match="Linear.forward has no parameter y") as error:
        capture(Linear(), {"x": torch.zeros(2, 4), "y": torch.zeros(2, 4)})
    assert error.value.hint == "it takes x, scale"


def test_a_shape_that_does_not_fit_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match="test_capture_batch.py"):
        capture(Linear(), (torch.zeros(2, 3), torch.ones(2, 4)))
    assert "Traceback" not in capfd.readouterr().err


class Shared(nn.Module):
    """Takes a number, and a row that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, scale: torch.Tensor, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return (self.last((self.second(self.first(x + position).tanh()) * scale).tanh()) ** 2).mean()


def shared_batch() -> dict[str, torch.Tensor]:
    return {"scale": torch.tensor(0.5), "x": X, "position": torch.linspace(0, 1, 4)[None]}


@pytest.mark.parametrize(
    "options", [{"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2, "microbatches": 2}], ids=str
)
def test_what_all_examples_share_is_exact(options: dict[str, Any], workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    subject = make_subject(Shared(), shared_batch())
    assert [value.shape for value in subject.graph.inputs] == [(6,), (6, 4), (6, 4)]
    assert len(subject.graph.scalars) == 1
    assert check_plan(subject, manual_plan(subject.graph, **options), workers2).error.exact


def test_what_all_examples_share_is_compared() -> None:
    class Summing(Shared):
        def forward(self, scale: torch.Tensor, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return super().forward(scale, x, position) * position.sum()

    model = Summing()
    graph = capture(model, shared_batch())
    with pytest.raises(CaptureError, match="does not compute what the model computes"):
        check_capture(graph, model, shared_batch(), None)


def test_what_all_examples_share_keeps_its_shape() -> None:
    structure: Any = capture(Shared(), shared_batch()).structure
    flat = flatten_batch(structure, shared_batch())
    rebuilt = rebuild_batch(structure, list(flat.values()))
    assert {name: tensor.shape for name, tensor in rebuilt.items()} == {n: t.shape for n, t in shared_batch().items()}
    with pytest.raises(BatchError, match=r"it takes scale: float32\[\], and this is scale: float32\[1\]"):
        flatten_batch(structure, shared_batch() | {"scale": torch.ones(1)})


class Writes(Linear):
    """Writes to its batch, and branches, so that capture runs it on the batch's values."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        x.div_(255)
        return self.linear(x).mean() * (2 if x.sum() > 0 else 1)


def test_a_forward_that_writes_to_its_batch_leaves_the_users_batch_alone() -> None:
    batch = X.abs()
    capture(Writes(), batch)
    assert torch.equal(batch, X.abs())


def test_a_list_in_a_batch_stays_a_list() -> None:
    class Keeps(Linear):
        def forward(self, x: torch.Tensor, keep: list[int], more: list[torch.Tensor]) -> Any:  # type: ignore[override]
            return (self.linear(x + more[0]) @ self.linear.weight[keep].T).square().mean()

    batch = {"x": X, "keep": [0, 2], "more": [X, X[:1]]}
    graph = capture(Keeps(), batch)
    flat = flatten_batch(graph.structure, batch)
    rebuilt = rebuild_batch(graph.structure, list(flat.values()))
    assert rebuilt["keep"] == [0, 2] and type(rebuilt["more"]) is list
    loss = reference.run(graph, dict((model := Keeps()).named_parameters()), flat)
    torch.testing.assert_close(loss, model(**batch))


def test_a_loss_module_of_one_argument_takes_the_output_alone() -> None:
    class Norm(nn.Module):
        def forward(self, output: torch.Tensor) -> torch.Tensor:
            return output.square().mean()

    graph = capture(nn.Linear(3, 2), (torch.randn(4, 3),), Norm())
    assert [value.name for value in graph.inputs] == ["input"]
