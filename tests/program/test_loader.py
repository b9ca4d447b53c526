"""Training from a data set: every rank reads its own rows, and the numbers are those of whole global batches, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from damage import as_format_1
from loading import dataset, made, order
from programs import Shape, mlp_model, mlp_plan, write_mlp
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit.ignored import ignored_labels
from autopar.emit.prelude import prelude_function, row_sums
from autopar.errors import BatchError, NonFiniteLossError, UsageError
from autopar.program.loader import Loader, Order, Synthetic, Tensors, first_key
from autopar.program.metrics import Meter, as_json
from autopar.program.spec import TensorSpec
from autopar.program.trainer import DataError
from autopar.program.weights import write_file
from autopar.run import Program
from autopar.shard import annotate


def state() -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in mlp_model().state_dict().items()}


SHAPES = [
    Shape(data=2, zero=(0, 3), microbatches=2),
    Shape(tensor=2),
    Shape(pipeline=2, microbatches=4, schedule="1f1b"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_own_rows_are_the_whole_batch(workers2: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    torch.save(made(), tmp_path / "data.pt")
    folder = write_mlp(tmp_path / "program", shape)
    ranks = workers2.run("loading:compared", str(folder), state(), made(), str(tmp_path / "data.pt"))
    for found in ranks:
        assert all(found["same"]) and all(found["evaluated"]) and len(found["evaluated"]) == 6, found
        assert re.search(
            rf"the loss of step 1 is (nan|inf|-inf); .* a result of the layer layer_1 \(stage {shape.pipeline - 1}, microbatch 0\)",
            found["stopped"],
        ), found["stopped"]
    loss, gradients = ranks[0]["padded"]
    model = mlp_model()
    wanted = model(**{name: tensor[24:] for name, tensor in made().items()})  # 6 rows
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13), name
    own = [sum(found["rows"], []) for found in ranks]
    assert sorted(set(own[0]) | set(own[1])) == sorted(order(30, True, 3, 0)[:24].tolist())
    if shape.data == 2:
        assert len(own[0]) == len(own[1]) == 12 and not set(own[0]) & set(own[1])
    if shape.tensor == 2:
        assert all("have different values of 'labels'" in found["uneven"] for found in ranks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loss_that_nobody_reads_costs_no_wait_and_no_collective(
    workers2: WorkerPool, tmp_path: Path, shape: Shape
) -> None:
    for found in workers2.run("loading:unread", str(write_mlp(tmp_path / "program", shape)), state(), made()):
        assert found["same"], found
        assert found["waits"][0] == 0 < found["waits"][1], found
        assert found["undone"] == 0  # losses of steps that a load undid
        of_advance, of_step = found["scalars"]
        assert len(of_step) == len(of_advance) + (shape.data > 1), (
            found
        )  # three losses at once; the pipeline broadcasts them
        assert (3 in of_step) == (shape.data > 1) and 3 not in of_advance
        assert re.fullmatch(
            r"the loss of step 5 is (nan|inf|-inf), which was not read before 5 steps were done; True", found["late"]
        )


def test_training_goes_on_at_the_next_row_under_another_batch(
    tmp_path: Path, workers1: WorkerPool, workers2: WorkerPool
) -> None:
    """Batches of 8 rows, then of 12 under another plan: rows 8 to 19 follow, then the next epoch's."""
    torch.save(made(), tmp_path / "data.pt")
    files = ["--dataset", f"{tmp_path}/data.pt", "--checkpoint", f"{tmp_path}/saved", "--resume"]
    found: dict[int, float] = {}
    for pool, steps, shape in ((workers1, "1", Shape()), (workers2, "3", Shape(data=2, microbatches=2, batch=12))):
        folder = write_mlp(tmp_path / f"to{steps}", shape)
        write_file(folder / "initial.safetensors", state())
        options = ["--shuffle", "--seed", "3", "--lr", "0.01", "--steps", steps]
        found |= pool.run("programs:ran", str(folder), *files, *options)[0][0]

    model, wanted = mlp_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first, second = order(30, True, 3, 0), order(30, True, 3, 1)
    for step, rows in enumerate((first[:8], first[8:20], second[:12]), 1):
        optimizer.zero_grad()
        loss = model(**{name: tensor[rows] for name, tensor in made().items()})
        loss.backward()
        optimizer.step()
        wanted.append((step, pytest.approx(loss.item(), rel=1e-10)))
    assert list(found.items()) == wanted


def test_a_resume_with_other_data_of_the_same_size_is_refused(tmp_path: Path, workers2: WorkerPool) -> None:
    folder = write_mlp(tmp_path / "program", Shape(data=2))
    data, saved = tmp_path / "data.pt", tmp_path / "saved"

    def train(steps: int) -> tuple[dict[int, float], str]:
        args = ("--data", str(data), "--checkpoint", str(saved), "--resume", "--draw-init", "--steps", str(steps))
        found: tuple[dict[int, float], str] = workers2.run("programs:ran", str(folder), *args)[0]
        return found

    torch.save(made(), data)
    assert list(train(1)[0]) == [1]
    torch.save({name: tensor.flip(0) for name, tensor in made().items()}, data)
    losses, talk = train(2)
    assert not losses and "Traceback" not in talk
    assert re.search(
        r"trained with 30 rows in order, with checksum (\w{8}), and this data set is 30 rows in order, with checksum (?!\1)",
        talk,
    )
    # read by name: another column changes nothing
    torch.save({**made(), "notes": torch.zeros(30)}, data)
    assert list(train(2)[0]) == [2]
    facts = as_format_1(saved / "step-2") / "checkpoint.json"
    facts.write_text(re.sub(r", with checksum \w{8}", "", facts.read_text()))  # of before data sets had checksums
    losses, talk = train(3)
    assert list(losses) == [3] and "step-2 was written without checksums, and is read unverified" in talk


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_that_are_drawn_have_no_checksum_and_drawing_goes_on_as_before(
    drawn: bool, workers1: WorkerPool, tmp_path: Path
) -> None:
    assert workers1.run("loading:keys", str(write_mlp(tmp_path / "program", Shape())), drawn)[0] == [drawn, True]


def test_records_and_the_comparison_with_the_prediction(tmp_path: Path) -> None:
    plan = mlp_plan(Shape()).to_json() | {"step_time_s": 10.0, "mfu": 0.5}
    meter = Meter(plan, tmp_path / "log")
    tables = []
    for step in range(25):
        meter.begin()
        record = meter.end(step, 1.5, 2000, {"gradient_norm": None, "loss_scale": 4.0})
        tables.append(meter.comparison(2000, 1000))
    meter.close()
    assert [bool(table) for table in tables] == [step == 19 for step in range(25)]
    assert "10,000.0 ms" in tables[19] and "The prediction has compute" in tables[19]
    # on CPUs the measured memory includes Python and torch: no ratio to the prediction
    assert ("2.00" in tables[19]) is torch.cuda.is_available()
    assert record == json.loads((tmp_path / "log").read_text().splitlines()[24])
    assert set(record) == {
        "step",
        "loss",
        "step_time_s",
        "rows_per_s",
        "tokens_per_s",
        "peak_memory_bytes",
        "mfu",
        "loss_scale",
    }
    assert record["mfu"] == pytest.approx(5 / record["step_time_s"])
    assert record["rows_per_s"] == pytest.approx(8 / record["step_time_s"])
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
            Meter(plan, tensorboard=tmp_path / "board")


def test_records_go_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"step_time_s": 1.0, "tokens_per_s_per_device": 1.0, "global_batch": 8, "mfu": 0, "model": "MLP"}
    plan["stages"] = [{"devices": [0, 2]}]
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match="the W&B project tests needs a package: pip install wandb"):
        Meter(plan, wandb="tests")
    said: list[Any] = []
    run = SimpleNamespace(log=lambda record, step: said.append((step, record)), finish=lambda: said.append("end"))
    fake = SimpleNamespace(init=lambda project, config: said.append((project, config["model"])) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    meter = Meter(plan, wandb="tests")
    records = [meter.end(7, 1.5, 2000, {"gradient_norm": 2.0}), meter.write({"step": 7, "eval_loss": 1.0})]
    meter.close()
    assert said == [("tests", "MLP"), *((7, record) for record in records), "end"]
    assert records[0]["gradient_norm"] == 2.0


class Weighted(nn.Module):
    """Losses that need of the whole batch: an integer sum over rows, a sum of floating numbers, or the order of the rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        losses = self.layer(x).square().sum(-1)
        if self.kind == "count":
            return (losses * (weights > 0)).sum() / (weights > 0).sum()
        if self.kind == "weights":
            return (losses * weights).sum() / weights.sum()
        if self.kind == "order":
            return losses.sum() / (weights[1:] > weights[:-1]).sum()
        return losses.sum() / (weights.view(8, 1) > 0).sum()


@pytest.mark.parametrize(("kind", "sums"), [("count", 1), ("weights", None), ("order", None), ("rows", None)])
def test_a_prelude_is_computed_by_rows_where_rules_prove_it(kind: str, sums: int | None) -> None:
    graph = capture(Weighted(kind), (torch.randn(8, 4), torch.rand(8)))
    assert graph.prelude is not None
    found = row_sums(graph.prelude)
    assert (None if found is None else len(found)) == sums


class Labelled(nn.Module):
    """Cross entropies, some of which a row with ignored labels would change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.table = kind, nn.Linear(4, 5), nn.Embedding(6, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2, 1, 1, 3]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.kind == "coupled":
            x = x - x.mean(0)
        if self.kind == "read twice":
            x = x + self.table(labels.clamp(min=0))
        logits = self.layer(x)
        weight = self.weights if self.kind == "weights" else None
        if self.kind == "two losses":
            return nn.functional.cross_entropy(logits, labels) + logits.square().mean()
        return nn.functional.cross_entropy(logits, labels, weight=weight, ignore_index=-7)


@pytest.mark.parametrize("kind", ["plain", "coupled", "read twice", "weights", "two losses"])
def test_rows_are_padding_where_the_graph_proves_that_the_loss_leaves_them_out(kind: str) -> None:
    graph = annotate(capture(Labelled(kind), (torch.randn(8, 4), torch.randint(5, (8,)))))
    assert ignored_labels(graph) == ({"labels": -7} if kind == "plain" else {})


def test_a_prelude_reads_the_devices_of_its_own_inputs() -> None:
    """A rank that reads a data set has only those inputs of the whole batch."""
    graph = annotate(capture(Labelled("weights"), (torch.randn(8, 4), torch.randint(5, (8,)))))
    source, record = prelude_function(graph)
    assert 'batch["labels"].device' in source and 'batch["x"]' not in source
    assert 'reads=("labels",)' in record


def test_complex_activations_get_a_gradient_from_the_next_stage() -> None:
    spec = TensorSpec((2, 3), torch.complex64, {})
    assert spec.on_meta().requires_grad and not TensorSpec((2, 3), torch.int64, {}).on_meta().requires_grad


@pytest.mark.parametrize("options", [{"replacement": True}, {"num_samples": 4}], ids=str)
def test_a_sampler_that_does_not_read_each_row_once_is_refused(options: dict[str, Any]) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8))
    loader = torch.utils.data.DataLoader(data, sampler=torch.utils.data.RandomSampler(data, **options))
    reader: Any = SimpleNamespace(batch=1, _order=Order(), _collate=None)
    with pytest.raises(DataError, match="num_samples or replacement"):
        Loader._adopt_loader(reader, loader)


def changed(odd: str) -> dict[str, Tensor]:
    rows = made()
    ids = rows.pop("input_ids")
    others = {"row": {"input_ids": ids[:, :2]}, "dtype": {"input_ids": ids.double()}, "name": {}}
    return rows | others[odd]


def test_a_program_trains_from_a_data_set(tmp_path: Path) -> None:
    """With a pipeline of two processes: epochs, a checkpoint in the middle of one, records, evaluation, and what is refused."""
    shape, records = Shape(pipeline=2, microbatches=2, schedule="1f1b"), list[dict[str, float]]()
    options = {"state": state(), "type_check": False, "optimizer": "loading:sgd", "max_norm": 1.0}
    with Program(mlp_plan(shape), write_mlp(tmp_path / "program", shape), **options) as program:
        data = program.loader("loading:dataset", shuffle=True, seed=5, workers=1)
        file = program.loader(made(), shuffle=True, seed=5)
        before = program.evaluate(file)
        assert program.evaluate(data) == before and len(data) == len(before) == 3
        losses = program.train(data, steps=4, log=tmp_path / "log", on_step=lambda *step: records.append(step[2]))
        program.save(tmp_path / "saved")
        rest = program.train(data)
        assert len(rest) == 2  # of the second epoch
        program.load(tmp_path / "saved")
        assert program.train(file) == rest  # the same rows in the same order
        assert records == [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        assert [record["loss"] for record in records] == losses
        assert all(record["gradient_norm"] > 0 for record in records)

        with pytest.raises(BatchError, match=r"rank \d: rows 8 to 15 of epoch 0: OSError: row 11 is on a bad sector"):
            program.train(program.loader("loading:broken"), on_step=lambda *step: losses.append(step[1]))
        assert len(losses) == 5  # the step before it was trained
        program.save(tmp_path / "after")  # and the training can go on
        for source, why in {
            "loading:stream": "Stream cannot be read by row",
            "loading:missing": "there is no data set loading:missing",
            "nothing.pt": "there is no file",
        }.items():
            with pytest.raises(UsageError, match=why):
                program.loader(source)
        (tmp_path / "tokens.bin").write_bytes(bytes(64))
        with pytest.raises(BatchError, match=r"tokens.bin cannot be read \(RuntimeError\)") as unreadable:
            program.loader(str(tmp_path / "tokens.bin"))
        assert "torch.save" in str(unreadable.value.hint)
        with pytest.raises(BatchError, match="has 5 rows, and one global batch takes 8"):
            program.loader({name: tensor[:5] for name, tensor in made().items()})
        with pytest.raises(BatchError, match="the rows of tensors are read as they are, without a collate function"):
            program.loader(made(), collate="loading:stream")
        with pytest.raises(UsageError, match="cannot import the data set a Counting"):
            program.loader(dataset())
        for odd, why in {
            "row": r"a row of 'input_ids' has shape \(2,\) and dtype torch.int64, and the program takes \(3,\) and torch.int64",
            "dtype": "dtype torch.float64, and the program takes",
            "name": "the batch has no 'input_ids'",
        }.items():
            with pytest.raises(BatchError, match=why):
                program.loader(changed(odd))
        again = program.loader("loading:dataset")
        assert program.train(again, steps=1)
        ids = program.state_dict()
        ids["layers.1.down.bias"][2] = float("nan")
        program.load_state_dict(ids)
        with pytest.raises(NonFiniteLossError, match=r"the loss of step 9 is nan; .* the parameter layers.1.down.bias"):
            program.train(again, steps=1)
        assert len(program.train(again, steps=1, on_nan="skip")) == 1


def test_records_are_json_whatever_the_numbers() -> None:
    """JSON has no NaN: a strict reader would refuse the whole line."""
    text = as_json({"step": 1, "loss": float("nan"), "gradient_norm": float("inf"), "mfu": 0.5})
    assert json.loads(text) == {"step": 1, "loss": None, "gradient_norm": None, "mfu": 0.5}


def test_any_seed_has_keys() -> None:
    """Dates are seeds, too; the keys of a seed stay below 2**63, and those of small seeds are what they were."""
    assert [first_key(seed) for seed in (0, 3)] == [0, 3 << 40]
    for seed in (2**23 - 1, 2**23, 20261126, 2**31 - 1, -1):
        assert 0 <= first_key(seed) <= 2**63 - 2**40
        torch.arange(first_key(seed), first_key(seed) + 2)
        assert len(Synthetic({"x": TensorSpec((2, 3), torch.float32, {})}, seed)[2**40 - 1]["x"]) == 3


def test_rows_are_made_up_of_every_shape() -> None:
    """Labels have one number in a row, which is a tensor without dims."""
    inputs = {
        "tokens": TensorSpec((16, 32), torch.int64, {}),
        "labels": TensorSpec((16,), torch.int64, {}),
        "weight": TensorSpec((16,), torch.float32, {}),
    }
    rows = Synthetic(inputs, seed=1).__getitems__([0, 5])
    assert {name: tuple(value.shape) for name, value in rows.items()} == {
        "tokens": (2, 32),
        "labels": (2,),
        "weight": (2,),
    }
    assert rows["labels"].dtype == torch.int64 and rows["weight"].dtype == torch.float32


UNREADABLE = {
    "there is no file": None,
    "cannot be read": "no tensors",
    "has no dict of tensors, but a list": [1, 2],
    "has entries that are no tensors with rows: inputs, loss": {
        "x": torch.ones(2),
        "inputs": {"x": torch.ones(2)},
        "loss": torch.ones(()),
    },
    "different numbers of rows": {"x": torch.ones(2), "y": torch.ones(3)},
}


@pytest.mark.parametrize("message", UNREADABLE)
def test_a_file_without_rows_is_refused(message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    if isinstance(UNREADABLE[message], str):
        path.write_text(UNREADABLE[message])
    elif UNREADABLE[message]:
        torch.save(UNREADABLE[message], path)
    with pytest.raises(DataError, match=message):
        Tensors.read(path)
