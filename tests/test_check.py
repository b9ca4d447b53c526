"""The type checker over emitted programs: right ones pass, broken ones are refused, and what it cannot see is said."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import KINDS, subject
from matrix import check_at_64
from workers import WorkerPool

from autopar.check import check_program
from autopar.emit import emit
from autopar.errors import ProgramError
from autopar.measure import compare
from autopar.search.hand import hand_plan, make_mesh

Programs = Callable[[str], Path]

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tensor": ("llama", {"tensor": 2}),
    "llama sequence": ("llama", {"tensor": 2, "sequence": True}),
    "llama data x tensor": ("llama", {"data": 2, "tensor": 2}),
    "llama two data axes": ("llama", {"mesh": make_mesh(("outer", 2), ("inner", 2))}),
    "llama pipeline": ("llama", {"pipeline": 2, "data": 2, "microbatches": 2}),
    "gpt2 tensor": ("gpt2", {"tensor": 2}),
    "mlp data": ("mlp", {"data": 2}),
}


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    """The folder of each of ``PLANS``, emitted once."""
    made: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as root:

        def program(name: str) -> Path:
            if name not in made:
                model, options = PLANS[name]
                made[name] = Path(root) / name.replace(" ", "_")
                emit(subject(model).graph, hand_plan(subject(model).graph, **options), made[name])
            return made[name]

        yield program


def broken(folder: Path, to: Path, pattern: str, replacement: str) -> Path:
    """A copy of the program in which ``pattern`` is replaced everywhere in ``model.py``; it must be there, and change."""
    shutil.copytree(folder, to)
    text = (to / "model.py").read_text()
    changed, count = re.subn(pattern, replacement, text)
    assert count and changed != text, pattern
    (to / "model.py").write_text(changed)
    return to


@pytest.mark.parametrize("name", ["llama data x tensor", "llama pipeline", "mlp data"])
def test_emitted_programs_are_well_typed(programs: Programs, name: str) -> None:
    pipeline = PLANS[name][1].get("pipeline", 1)
    assert check_program(programs(name)) == pipeline


SIXTY_FOUR = ["data 4", "pipeline 4, gpipe", "data 2 x tensor+sequence 2, zero 1", "mixed: tensor 1, 2 and 4"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in SIXTY_FOUR], ids=lambda kind: kind.name)
def test_programs_for_64_devices_are_well_typed(kind: Any) -> None:
    """The fake process group costs nothing per rank; ``tests/matrix.py`` does this for every model and kind."""
    assert check_at_64("llama", kind) == kind.options.get("pipeline", 1)


# Every line is a program, what is wrong with it, and how the wrong program is made: a pattern and its replacement.
REDUCED = (
    r'spmd\.all_reduce\((F\.linear\(reshape, self\.self_attn\.o_proj\.weight\)), "tensor", src=spmd\.P, dst=spmd\.I\)'
)
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "partial sum is not reduced": ("llama tensor", REDUCED, r"\1"),
    "partial sum is reduced to R, read as I": (
        "llama tensor",
        REDUCED,
        r'spmd.all_reduce(\1, "tensor", src=spmd.P, dst=spmd.R)',
    ),
    "partial sum is reduced twice": (
        "llama tensor",
        REDUCED,
        r'spmd.all_reduce(spmd.all_reduce(\1, "tensor", src=spmd.P, dst=spmd.I), "tensor", src=spmd.P, dst=spmd.I)',
    ),
    "gelu of a partial sum": (
        "llama tensor",
        REDUCED,
        r'spmd.all_reduce(F.gelu(\1), "tensor", src=spmd.P, dst=spmd.I)',
    ),
    "gradient of a column-parallel input is not reduced": (
        "llama tensor",
        r'= spmd\.convert\((mul_7), "tensor", src=spmd\.I, dst=spmd\.R\)',
        r"= \1",
    ),
    "softmax over a sharded dim": ("llama tensor", r"F\.linear\(mul_8,", "F.linear(torch.softmax(mul_8, -1),"),
    "mean over a sharded dim": (
        "llama tensor",
        r"F\.linear\(mul_8,",
        "F.linear(mul_8 - mul_8.mean([-1], keepdim=True),",
    ),
    "loss over a slice of the vocabulary": (
        "llama tensor",
        r'kernels\.vocab_parallel_cross_entropy_sum\((.*), "tensor",',
        r"kernels.cross_entropy_sum(\1,",
    ),
    "bias added to a partial sum on every rank": (
        "gpt2 tensor",
        r"F\.linear\(reshape, self\.attn\.c_proj\.weight\.t\(\)\)",
        "F.linear(reshape, self.attn.c_proj.weight.t(), self.attn.c_proj.bias)",
    ),
    "lookup in a slice of the vocabulary": (
        "gpt2 tensor",
        r'kernels\.masked_embedding\((\w+), (\w+), axis="tensor"\)',
        r"F.embedding(\1, \2)",
    ),
    "reduce-scatter along the wrong dim": (
        "llama sequence",
        r"(reduce_scatter\(.*)dst=spmd\.S\(1\)",
        r"\1dst=spmd.S(0)",
    ),
    "all-to-all from the wrong dim": (
        "llama sequence",
        r"all_to_all\((.*)src=spmd\.S\(2\)",
        r"all_to_all(\1src=spmd.S(0)",
    ),
    "gradient of a norm's weight on a slice of the sequence is not reduced": (
        "llama sequence",
        r'= spmd\.convert\((self\.\w+layernorm\.weight), "tensor", src=spmd\.I, dst=spmd\.R\)',
        r"= \1",
    ),
    "loss on slices of the batch is not a term": (
        "llama data x tensor",
        r'partial_axes=\("data",\)',
        "partial_axes=()",
    ),
    "loss divided by the number of valid labels of a slice": (
        "llama data x tensor",
        r"cross_entropy_sum / valid_labels",
        "cross_entropy_sum / (labels != -100).sum()",
    ),
    "mean loss of a slice of the batch": (
        "mlp data",
        r"torch\.ops\.aten\.mse_loss\.default\((.*), 2\)",
        r"torch.ops.aten.mse_loss.default(\1, 1)",
    ),
    "statistics over a slice of the batch": ("mlp data", r"F\.linear\(x, self", "F.linear(x - x.mean(0), self"),
    "labels are taken whole": ("llama data x tensor", r'"labels": \{"data": 0\}', '"labels": {}'),
    "border declared in another type": ("llama pipeline", r'("model\.layers\.1": \{"data": )"S\(0\)"', r'\1"R"'),
    "slices of two axes taken in the wrong order": (
        "llama two data axes",
        r"( +)for layer in \(",
        r'\1hidden = spmd.all_gather(hidden, "outer", src=spmd.S(0), dst=spmd.I)\n'
        r'\1hidden = spmd.convert(hidden, "outer", src=spmd.I, dst=spmd.S(0))\n'
        r"\1for layer in (",
    ),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_broken_program_is_refused(programs: Programs, tmp_path: Path, what: str) -> None:
    name, pattern, replacement = MUTATIONS[what]
    folder = broken(programs(name), tmp_path / "broken", pattern, replacement)
    with pytest.raises(ProgramError, match=r"stage \d of broken is ill-typed"):
        check_program(folder)


# What no type tells: values. The types of these programs are right, and the checker lets them pass; the exactness matrix does not.
UNSEEN: dict[str, tuple[str, str, str]] = {
    "mean divided by the wrong count": ("mlp data", r"\* 0\.001953125", "* 0.00390625"),
    "attention that is not causal": ("llama tensor", r", is_causal=True", ""),
    "attention with another scale": ("llama tensor", r"scale=0\.5", "scale=0.25"),
    "masked labels are counted": ("llama data x tensor", r"!= -100", "!= -101"),
    "a norm's epsilon": ("llama sequence", r"1e-06", "1e-03"),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_the_checker_does_not_see_values(programs: Programs, tmp_path: Path, what: str) -> None:
    name, pattern, replacement = UNSEEN[what]
    assert check_program(broken(programs(name), tmp_path / "broken", pattern, replacement)) == 1


@pytest.mark.parametrize("what", ["mean divided by the wrong count", "attention that is not causal"])
def test_the_exactness_run_sees_values(programs: Programs, tmp_path: Path, workers2: WorkerPool, what: str) -> None:
    name, pattern, replacement = UNSEEN[what]
    given = subject(PLANS[name][0])
    state = tmp_path / "initial.pt"
    torch.save(given.state, state)

    def exact(folder: Path) -> bool:
        loss, gradients, _ = workers2.run("autopar.verify.remote:gradients", str(folder), str(state), given.batch)[0]
        return compare(loss, gradients, given.loss, given.gradients).exact

    assert exact(programs(name))
    assert not exact(broken(programs(name), tmp_path / "broken", pattern, replacement))
