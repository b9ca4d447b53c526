"""MODEL on the command line: factories, configurations, zoo names, and every way to get them wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from autopar.cli.load import SizeOptions, load_model
from autopar.errors import BatchError, ModelError, UsageError

FACTORIES = """
import torch
from torch import nn

def module():
    return nn.Linear(4, 4)

def pair(global_batch=8):
    return nn.Linear(4, 4), (torch.zeros(global_batch, 4),)

def triple():
    return nn.Linear(4, 1), (torch.zeros(8, 4),), lambda out: out.sum()

def quadruple():
    return nn.Linear(4, 1), (), None, 3

def number():
    return 7

def broken():
    x = 1
    return nn.Linear(4, "four")

def leaves():
    raise SystemExit("no data")

def bad_loss():
    return nn.Linear(4, 1), (torch.zeros(8, 4),), 3

def _hidden():
    return None

def names():
    return "a", "b"

WIDTH = 4
"""


@pytest.fixture
def factories(tmp_path):
    path = tmp_path / "factories_for_test.py"
    path.write_text(FACTORIES)
    return str(path)


def test_a_factory_in_a_file(factories):
    loaded = load_model(f"{factories}:pair", SizeOptions())
    assert isinstance(loaded.model, torch.nn.Linear) and loaded.name == "pair"
    assert loaded.batch[0].shape == (8, 4) and loaded.loss_fn is None
    assert load_model(f"{factories}:triple", SizeOptions()).loss_fn(torch.ones(3)) == 3


def test_a_factory_in_a_package(tmp_path, monkeypatch):
    package = tmp_path / "package_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_model("package_for_test.models:pair", SizeOptions()).batch[0].shape == (8, 4)


TITLES = """
import torch
from torch import nn

class Forecaster(nn.Linear):
    pass

def model():
    return Forecaster(4, 4), (torch.zeros(8, 4),)

def build_model():
    return nn.Sequential(nn.Linear(4, 4)), (torch.zeros(8, 4),)

def small_model():
    return Forecaster(4, 4), (torch.zeros(8, 4),)
"""


def test_a_plan_has_a_title_that_says_something(tmp_path):
    path = tmp_path / "titles_for_test.py"
    path.write_text(TITLES)
    names = {"model": "Forecaster", "build_model": "titles_for_test", "small_model": "small_model"}
    assert {factory: load_model(f"{path}:{factory}", SizeOptions()).name for factory in names} == names


def test_sizes_reach_the_factory(factories):
    assert load_model(f"{factories}:pair", SizeOptions(global_batch=6)).batch[0].shape == (6, 4)
    with pytest.raises(BatchError, match="a batch of 8 x 1 tokens, and seq is to be 16") as caught:
        load_model(f"{factories}:pair", SizeOptions(seq=16))
    assert caught.value.hint == "give the factory a parameter seq: def pair(seq=1)"


def test_a_fixed_batch_has_the_sizes_that_a_trainers_file_sets(factories):
    assert load_model(f"{factories}:triple", SizeOptions(global_batch=8, seq=1)).batch[0].shape == (8, 4)
    with pytest.raises(BatchError, match="global_batch is to be 9"):
        load_model(f"{factories}:triple", SizeOptions(global_batch=9))


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        ("module", BatchError, "a module without a batch"),
        ("quadruple", ModelError, "returned 4 values"),
        ("number", ModelError, "returned int, not a torch.nn.Module"),
        ("broken", ModelError, r"factories_for_test.py:22: .*raised TypeError"),
        ("leaves", ModelError, r"factories_for_test.py:25: .*raised SystemExit: no data"),
        ("bad_loss", ModelError, "returned int as its loss_fn"),
        ("names", ModelError, "returned str as its first value, not a torch.nn.Module"),
        ("WIDTH", ModelError, r"WIDTH of .*factories_for_test.py is of type int, not a function"),
        ("missing", ModelError, "has no function 'missing'"),
    ],
)
def test_what_a_factory_can_do_wrong(factories, factory, error, words):
    with pytest.raises(error, match=words):
        load_model(f"{factories}:{factory}", SizeOptions())


def test_a_file_without_a_factory_names_the_candidates(factories):
    with pytest.raises(ModelError) as caught:
        load_model(factories, SizeOptions())
    assert f"{factories}:pair" in caught.value.hint and "_hidden" not in caught.value.hint


def test_functions_that_need_no_arguments_are_named_first(tmp_path):
    path = tmp_path / "several.py"
    path.write_text(
        "def rotate(x, angle): ...\ndef tables(size, base=2): ...\ndef norm(x): ...\ndef make(seq=8): ...\n"
    )
    with pytest.raises(ModelError) as caught:
        load_model(str(path), SizeOptions())
    assert caught.value.hint == f"did you mean {path}:make or {path}:tables or {path}:norm?"


def test_a_misspelt_factory_is_answered_in_the_users_spelling(factories, monkeypatch):
    monkeypatch.chdir(Path(factories).parent)
    with pytest.raises(ModelError) as caught:
        load_model("factories_for_test.py:numbr", SizeOptions())
    assert caught.value.hint.startswith("did you mean factories_for_test.py:number or ")


def test_a_file_that_does_not_parse(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def f(:\n")
    with pytest.raises(ModelError, match=r"wrong.py:1: "):
        load_model(f"{path}:f", SizeOptions())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no_such_file.py:f", "there is no file no_such_file.py"),
        ("no_such_file.py", "there is no file no_such_file.py"),
        ("no_such_package.models:f", "there is no Python module 'no_such_package'"),
        ("llama3-7b", "no model called 'llama3-7b' in the zoo"),
        ("no_such_config.json", "cannot be read: No such file"),
    ],
)
def test_models_that_are_not_there(model, words):
    with pytest.raises(ModelError, match=words):
        load_model(model, SizeOptions())


def test_a_module_that_is_not_there_inside_the_users_package(tmp_path):
    path = tmp_path / "needs_more.py"
    path.write_text("import a_package_that_is_missing\n")
    with pytest.raises(ModelError, match=r"needs_more.py:1: .*a_package_that_is_missing"):
        load_model(f"{path}:f", SizeOptions())


def test_configuration_files(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "small.json"
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 2}
    path.write_text(json.dumps(config))
    loaded = load_model(str(path), SizeOptions(seq=32, global_batch=4, precision="fp32"))
    assert loaded.name == "small" and loaded.batch["input_ids"].shape == (4, 32)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    for text, words in (
        ("{", r"small.json is no configuration: line 1 is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "no model_type"),
    ):
        path.write_text(text)
        with pytest.raises(ModelError, match=words):
            load_model(str(path), SizeOptions())


def test_a_transformers_module_gets_a_batch(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "hf_factory.py"
    path.write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "def model():\n    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31))\n"
    )
    loaded = load_model(f"{path}:model", SizeOptions(global_batch=2), device="cpu")
    assert loaded.batch["input_ids"].shape == (2, 1024) and loaded.batch["input_ids"].max() < 31


@pytest.mark.parametrize("sizes", [{"seq": 0}, {"global_batch": -1}, {"precision": "int3"}, {"precision": "float8"}])
def test_sizes_that_make_no_sense(sizes):
    with pytest.raises(UsageError):
        load_model("gpt2", SizeOptions(**sizes))
