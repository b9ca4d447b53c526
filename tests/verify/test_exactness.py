"""The exactness matrix's default tier: every pair of features on some model, every model under some kinds, on real processes; and its page.

The slow tests have every kind on some model, the report every kind on every model.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matrix
import pytest
from exactness import KINDS, MODELS, subject
from matrix import RESULTS, Case, arguments, chosen, kind_cases, mixture_cases, results_in
from matrix_page import page, passed
from results import fingerprint
from test_text_exactness import KINDS_PER_MODEL, PAIRS
from tiers import pair_cover, slow
from workers import WorkerPool

from autopar.errors import UsageError
from autopar.verify import PlanKind, check_plan
from autopar.verify.mixtures import draw

# Pairs that strain most: tied weights across stages and under ZeRO on gpt2, grouped heads on llama, biases and padding on bert.
# Degrees above two: rings of several hops, stages with a neighbour on both sides, numbers of devices that divide little.
STRAINS = {
    ("gpt2", "pipeline 2"),
    ("gpt2", "data 2, zero 3"),
    ("gpt2", "recompute, data 4, zero 3"),
    ("gpt2", "pipeline 2 x data 2, zero 2"),
    ("llama", "tensor 4"),
    ("llama", "pipeline 2 x data 2, zero 3, recompute"),
    ("gpt2", "recompute in part, tensor+sequence 4"),
    ("bert", "tensor+sequence 4"),
    ("bert", "pipeline 2, gpipe"),
    ("mlp", "mixed: tensor 1, 2 and 4"),
    ("packed", "ring 4"),
    ("masked", "ulysses 4"),
    ("mixtral", "expert 4"),
    ("odd_llama", "pipeline 4"),
    ("odd_gpt2", "tensor+sequence 3"),
    ("gated", "data 3, zero 3"),
    ("with_empty", "data 2"),
    ("with_empty", "tensor 2"),
}
COMPILED = "compiled, "
# Models that are under two kinds or more elsewhere: in tests/verify/test_text_exactness.py and tests/compile/test_microbatch_statistics.py.
ELSEWHERE = {*PAIRS, *(name for name in MODELS if name.endswith(" by microbatch"))}
MIXTURES_HERE = 3
RECORDED = results_in().read()
# Models whose cases take three times as long as the others'.
LARGE = {
    "deepseek",
    "dit",
    "mixtral",
    "mixtral_balanced",
    "qwen3_moe",
    "resnet-bottleneck",
    "unet",
    "unet-group-norm",
    "vit",
}


def admitted(case: Case) -> bool:
    """As far as is recorded: a case that was never tried is tried."""
    return "reason" not in RECORDED.get(case.key, {})


DEGREES = ("data", "tensor", "ring", "ulysses", "expert", "pipeline", "microbatches", "chunks", "segment")


def features(kind: PlanKind) -> set[Any]:
    """Return the decisions of a kind: its roles, the values of its options, and that layers differ; degrees are among the strains."""
    found: set[Any] = {kind.name} if kind.mixed else set()
    for name, value in kind.options.items():
        if name == "mesh":
            roles = [axis.name.rstrip("0123456789") for axis in value]
            found |= {*roles} | ({"a role on two axes"} if len({*roles}) < len(roles) else set())
        elif name in DEGREES:
            found |= {name} if value > 1 else set()
        else:
            found.add((name, value))
    return found


def tier() -> list[tuple[Case, bool]]:
    """Cases, and whether they are in the default tier.

    The strains; then kinds that have every pair of features of any kind, each on the model that has had least so far, one of this module's
    own if any admits the kind, and seldom a large one; then more for its models with fewer than ``KINDS_PER_MODEL`` (large ones: than one);
    then the other kinds, which are slow tests.
    """
    cases = {case.key: case for case in kind_cases() if case.devices <= 4 and admitted(case)}
    # a compiler works for half a minute on some of these; tests/program/test_compiled.py has others without it
    cases = {key: case for key, case in cases.items() if not case.kind.startswith(COMPILED)}
    picked = {key: cases[key] for key in sorted(STRAINS) if key in cases}
    kinds = {kind.name: features(kind) for kind in KINDS if any(kind.name == name for _, name in cases)}

    def load(key: tuple[str, str]) -> tuple[bool, bool, int]:
        """A case that was never tried comes last: the model may not admit the kind."""
        model, _ = key
        return key not in RECORDED, model in ELSEWHERE, count[model] * (3 if model in LARGE else 1)

    def pick(kinds: Iterable[str]) -> None:
        for kind in kinds:
            if not any(name == kind for _, name in picked):
                key = min((key for key in cases if key[1] == kind), key=load)
                picked[key] = cases[key]
                count[key[0]] += 1

    count = Counter(model for model, _ in picked)
    pick(pair_cover(kinds, dict.fromkeys(kind for _, kind in picked)))
    for number, model in enumerate(model for model in MODELS if model not in ELSEWHERE):
        mine = [key for key in cases if key[0] == model and key not in picked]
        wanted = 1 if model in LARGE else KINDS_PER_MODEL
        for step in range(max(0, min(wanted - count[model], len(mine)))):
            key = mine[(number * 7 + step * 11) % len(mine)]
            picked[key] = cases[key]
    default = set(picked)
    pick(kinds)
    return [(picked[key], key in default) for key in sorted(picked, key=lambda key: list(MODELS).index(key[0]))]


TIER = tier()


@pytest.mark.parametrize(
    "case",
    [case if default else slow(case) for case, default in TIER],
    ids=lambda case: f"{case.model}: {case.kind}",
)
def test_exact(case: Case, request: pytest.FixtureRequest) -> None:
    given = subject(case.model)
    try:
        plan = case.plan(given.graph)
    except UsageError as error:
        pytest.skip(error.message)
    pool: WorkerPool = request.getfixturevalue(f"workers{case.devices}")
    outcome = check_plan(given, plan, pool)
    assert outcome.error.exact, outcome.error
    assert outcome.stages_typed == len(plan.stages)


@pytest.mark.parametrize("number", range(MIXTURES_HERE))
def test_a_plan_drawn_at_random_is_exact(number: int, request: pytest.FixtureRequest) -> None:
    case = [
        case for case in mixture_cases(200, 3) if case.devices <= 4 and case.model in ("mlp", "gpt2", "llama", "bert")
    ][number]
    given = subject(case.model)
    outcome = check_plan(given, case.plan(given.graph), request.getfixturevalue(f"workers{case.devices}"))
    assert outcome.error.exact, outcome.error


def test_draws_are_a_function_of_the_seed_and_differ() -> None:
    import random

    graph = subject("gpt2").graph
    plans = [draw(graph, 4, random.Random(number)) for number in (1, 1, 2, 3, 4, 5)]
    assert plans[0] == plans[1] and len(set(plans)) >= 4
    assert all(plan.device_count == 4 for plan in plans)


def test_every_pair_of_features_and_every_model_is_tried() -> None:
    """By default; the slow tests have every kind."""
    wanted = {kind.name: kind for kind in KINDS if kind.devices <= 4 and not kind.name.startswith(COMPILED)}
    assert {case.kind for case, _ in TIER} == set(wanted)
    default = [case for case, default in TIER if default]
    here, everywhere = (
        {pair for name in names for pair in itertools.product(features(wanted[name]), repeat=2)}
        for names in ({case.kind for case in default}, wanted)
    )
    assert here == everywhere
    counts = Counter(case.model for case in default)
    assert set(counts) | ELSEWHERE >= set(MODELS) and len(default) < len(TIER) * 0.6
    assert all(counts[model] >= (1 if model in LARGE else KINDS_PER_MODEL) for model in set(MODELS) - ELSEWHERE), counts


# -- the full matrix's results, which are kept with the code ----------------------------------------------------------


def test_the_results_are_exact() -> None:
    assert [json.dumps(line) for line in RECORDED.values() if not passed(line)] == []


def test_the_page_is_what_the_results_say() -> None:
    lines = list(RECORDED.values())
    assert RESULTS.with_suffix(".md").read_text() == page(lines, [kind.name for kind in KINDS])


def line(**changes: Any) -> dict[str, Any]:
    base = {"model": "m", "kind": "k", "devices": 2, "error": 1e-15, "where": "loss", "seconds": 1.0, "torch": "2"}
    return base | {"stages_typed": 1, "code": "c"} | changes


def test_a_case_that_is_not_exact_shows_on_the_page() -> None:
    lines = [
        line(),
        line(kind="l", error=1e-3, where="w"),
        line(kind="n", failure="ProgramError: a|b"),
        line(kind="o", reason="m has no o"),
        line(kind="mixture 1.0", plan="a mesh"),
    ]
    text = page(lines, ["k", "l", "n", "o"])
    assert "2 of 4 cases" in text and "**1.0e-03** in w" in text and "ProgramError: a/b" in text
    assert "| o | [1] |" in text and "1. m has no o" in text and "| m | 2 | a mesh | 1.0e-15 |" in text
    assert not passed(line(error=float("nan"))) and not passed(line(error=float("inf")))


def test_a_run_does_what_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    code, results = fingerprint(), results_in(path)
    for changes in (
        {"kind": "a", "error": 1.0},
        {"kind": "a"},
        {"kind": "b", "code": "old"},
        {"kind": "c", "error": 1.0},
    ):
        results.append(line(**({"code": code} | changes)))
    args = ["--results", str(path)]
    assert results.kept(arguments(args)) == {("m", "a")}
    assert results.kept(arguments([*args, "--keep"])) == {("m", "a"), ("m", "b")}
    assert results.kept(arguments([*args, "--fresh"])) == set()
    assert [each["error"] for each in results.tidy([("m", "c"), ("m", "a"), ("m", "d")])] == [1.0, 1e-15]


def test_parts_make_a_whole() -> None:
    whole = {case.key for case in chosen(arguments([]))}
    halves = [{case.key for case in chosen(arguments(["--part", part]))} for part in ("1/2", "2/2")]
    assert halves[0] | halves[1] == whole and not halves[0] & halves[1]


def test_a_case_that_cannot_be_run_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any) -> Any:
        raise UsageError("m has no such thing")

    def hang(graph: Any) -> Any:
        import time

        time.sleep(5)

    subject("mlp")  # its capture may take longer than a second
    monkeypatch.setattr(matrix, "CASE_S", 1)
    assert matrix.case_line(Case("mlp", "k", 2, refuse), {})["reason"] == "m has no such thing"
    assert "TimeoutError" in matrix.case_line(Case("mlp", "k", 2, hang), {})["failure"]
