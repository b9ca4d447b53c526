"""What ranks must be given alike is held against each other; numbers that no training can be done with are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Shape, mlp_batch, mlp_model, mlp_plan, write_mlp
from torch import Tensor
from workers import WorkerPool

from autopar.cli import main
from autopar.errors import UsageError
from autopar.program.agree import digest
from autopar.run import Program
from autopar.run.folder import import_runtime, program_modules


def attempts(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, str]:
    """What a rank that is given something else than the others is told, by what it is."""
    odd = torch.distributed.get_rank() == 1
    said = {}
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)

        def attempt(name: str, act: Any) -> None:
            try:
                act()
                said[name] = ""
            except ValueError as error:
                said[name] = str(error)

        trainer = runtime.Trainer(program, world, state=state)
        attempt("the same", lambda: trainer.step(batch))
        other = {**batch, "labels": batch["labels"].flip(0)} if odd else batch
        attempt("labels", lambda: trainer.step(other))
        extra = {**batch, "weights": torch.ones(8) * odd}
        attempt("else", lambda: trainer.forward_backward(extra))
        moved = {**state, "norm.bias": state["norm.bias"] + 1e-9 * odd}
        attempt("state", lambda: trainer.load_state_dict(moved))
        attempt("seed", lambda: runtime.Trainer(program, world, state=state, seed=int(odd)))
        attempt("max_norm", lambda: runtime.Trainer(program, world, state=state, max_norm=-1.0))
        attempt("the same again", lambda: trainer.step(batch))
    return said


@pytest.mark.parametrize("shape", [Shape(data=2), Shape(tensor=2), Shape(pipeline=2)], ids=str)
def test_ranks_that_are_given_different_things_are_told(workers2: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    state = {name: value.detach() for name, value in mlp_model().state_dict().items()}
    for said in workers2.run("test_run_agree:attempts", str(write_mlp(tmp_path, shape)), state, mlp_batch()):
        assert not said["the same"] and not said["the same again"]
        assert (
            "different batches: rank 1 differs from rank 0 in 'labels'; every rank takes the full global batch"
            in said["labels"]
        )
        assert "different batches: rank 1 differs from rank 0 in the other entries" in said["else"]
        assert "different values: rank 1 differs from rank 0 in norm.bias" in said["state"]
        assert "different values: rank 1 differs from rank 0 in the seed" in said["seed"]
        assert "max_norm is -1.0" in said["max_norm"]


def test_a_digest_is_of_bytes_order_shape_and_dtype() -> None:
    x = torch.arange(6, dtype=torch.float32)
    same = [x, x.clone(), x.repeat_interleave(2)[::2]]
    others = [x.flip(0), x.view(2, 3), x.double(), x + 1e-6, x[:5], torch.complex(x, x), torch.ones(())]
    assert {digest(each) for each in same} == {digest(x)}
    assert len({digest(each) for each in (x, *others)}) == 1 + len(others)
    assert digest(torch.ones(3, dtype=torch.bool)) != digest(torch.tensor([True, False, True]))
    assert digest(torch.ones(4, dtype=torch.bfloat16)) == digest(torch.ones(4, dtype=torch.bfloat16))
    large = torch.zeros(5 * 2**20, dtype=torch.int64)  # 40 MiB
    changed = large.clone()
    changed[-1] = 1
    assert digest(large, 2**24) != digest(changed, 2**24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"max_norm": 0.0}, "max_norm is 0.0"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf"),
    ],
)
def test_numbers_that_nothing_can_be_trained_with(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    folder = write_mlp(tmp_path, Shape())
    with pytest.raises(UsageError, match=message) as error:
        Program(mlp_plan(Shape()), folder, type_check=False, **options)
    assert error.value.hint


def test_the_command_line_refuses_a_negative_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "nothing.py:model", "--devices", "2", "--lr", "-1"])
    assert ended.value.code == 2 and "--lr" in capsys.readouterr().err
