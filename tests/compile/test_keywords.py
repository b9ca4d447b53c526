"""One table of pins: keywords, options and records have its names, types and defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.devices import parse
from autopar.errors import AutoparError, UsageError
from autopar.keywords import Request, Training, as_keywords, keywords, read_keywords
from autopar.pins import OF_LAYER, OF_PLAN, PINS, LayerPins, checked, read_pin
from autopar.planning import plan_model
from autopar.precision import normalise
from autopar.run.recipe import TrainingRecipe
from autopar.search import SearchOptions
from autopar.techniques import LAYER
from autopar.workload import Workload


def test_keywords_are_those_of_the_table():
    assert list(PINS) == [*OF_PLAN, *OF_LAYER] == list(keywords())[: len(PINS)]
    assert set(OF_LAYER) == {f.name for f in fields(LayerPins)}
    for technique in LAYER:
        assert {technique.name, *(pin.name for pin in technique.former_pins)} <= set(OF_LAYER)


def test_keywords_of_compile_are_those_of_the_records():
    written = {f.name: (f.type, f.default) for record in (Request, Training) for f in fields(record)}
    assert {name: kind for name, kind in keywords().items() if name not in PINS} == written


def test_help_shows_every_keyword_and_its_default():
    shown = inspect.signature(autopar.compile).parameters
    assert {name: shown[name].default for name in keywords()} == {name: kind[1] for name, kind in keywords().items()}
    assert all(name in (autopar.compile.__doc__ or "") for name in shown)
    program = inspect.signature(autopar.Program).parameters
    left_out = {"lr": None, "seed": None}  # those of the folder's recipe
    assert as_keywords(Training()) | left_out == {f.name: program[f.name].default for f in fields(Training)}


def test_keywords_are_sorted_into_records():
    request, training, pins = read_keywords({"tensor": 2, "precision": "float32", "lr": 0.1, "recompute": True})
    assert request == Request(precision="float32") and training == Training(lr=0.1)
    assert pins == {"tensor": 2, "recompute": True}


def test_a_keyword_that_does_not_exist_is_an_error_of_the_call():
    with pytest.raises(TypeError, match="unexpected keyword argument 'tensr'; did you mean tensor"):
        autopar.compile(nn.Linear(1, 1), 1, (torch.zeros(1, 1),), tensr=2)
    with pytest.raises(UsageError, match="tensor is 0, it must be a whole number from 1"):
        autopar.compile(nn.Linear(1, 1), 1, (torch.zeros(1, 1),), tensor=0)


@pytest.mark.parametrize("name", PINS)
def test_examples_of_the_table_are_pins(name: str):
    key, value = read_pin(PINS[name].example)
    assert key.endswith(name) and checked(key, value) == value
    with pytest.raises(UsageError, match=f"{name} is 'nothing', it must be "):
        checked(name, "nothing")


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"pin": ["pipeline=2"]}, "pins must be a mapping"),
        ({"memory_limit_bytes": "40GB"}, "it must be a number of bytes"),
        ({"time_limit_s": "long"}, "it must be a number of seconds"),
        ({"time_limit_s": True}, "time_limit_s is True, but its type is float"),
        ({"memory_limit_bytes": False}, "memory_limit_bytes is False, but its type is int"),
        ({"expert_loads": True}, "expert_loads is True"),
        ({"precision": True}, "precision is True"),
        ({"lr": True}, "lr is True"),
        ({"max_norm": True}, "max_norm is True"),
        ({"seed": False}, "seed is False"),
        ({"port": True}, "port is True"),
        ({"loss_fn": "cross_entropy"}, "cannot be called"),
        ({"precision": torch.int8}, "no precision torch.int8"),
        ({"folder": Path(__file__).parent}, "has files that are not a program's"),
        ({"folder": 3}, "is no path"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_by_name(keywords: dict[str, Any], words: str):
    with pytest.raises(AutoparError, match=words) as error:
        autopar.compile(nn.Linear(1, 1), 1, (torch.zeros(1, 1),), **keywords)
    assert error.value.hint


def test_booleans_are_no_numbers_of_a_search_or_of_a_recipe():
    with pytest.raises(UsageError, match="the time limit is True"):
        SearchOptions(time_limit_s=True)
    for name in ("lr", "max_norm", "seed"):
        with pytest.raises(UsageError, match=f"{name} is True, which is no "):
            TrainingRecipe(**{name: True})


def test_a_precision_may_be_a_dtype():
    assert [normalise(torch.bfloat16), normalise("bf16"), normalise("torch.float64")] == [
        "bfloat16",
        "bfloat16",
        "float64",
    ]


def test_only_modules_are_opaque():
    with pytest.raises(UsageError, match="opaque takes a torch.nn.Module, not 3"):
        autopar.opaque(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "precision", "noted"),
    [("8xH100-80GB", None, True), ("8xH100-80GB", "float32", False), (2, None, False)],
)
def test_a_plan_in_float32_for_gpus_notes_the_faster_dtype(devices, precision, noted):
    workload = Workload(nn.Linear(4, 1), (torch.ones(8, 4),), lambda out: out.sum(), "linear", precision=precision)
    plan = plan_model(workload, parse(devices), SearchOptions(), capture_check=False)[1]
    assert any("--precision bfloat16" in note for note in plan.notes) is noted
