"""A file never runs code: plans, configurations, calibrations and cluster files from elsewhere are data."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from places import ROOT
from plan_attacks import EVIL, FACTORY, KINDS, MARK, TEXTS, read_attacks

from autopar.cli.app import cli
from autopar.cli.commands import cluster_and_options
from autopar.cli.load import SizeOptions, load_model
from autopar.cli.options import PlanRequest
from autopar.cli.recorded import command_line, recorded_options, with_recorded_options
from autopar.data_files import MAX_BYTES, MAX_LEVELS, MalformedFileError, parse_json, read_json
from autopar.devices import calibration, parse
from autopar.emit.names import identifier, quoted, remark
from autopar.emit.program import model_source
from autopar.errors import AutoparError, DeviceError, ModelError, UsageError
from autopar.plan import Plan
from autopar.plan_files import read_plan
from autopar.plan_schema import MAX_DEVICES, MAX_LAYERS, check_plan
from autopar.search import SearchOptions
from autopar.shard import plan_shardings
from autopar.zoo.hf import build_config
from passes.stages import cut_stages

SEEDS = len(KINDS) * 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Plan]:
    """The graph of the attacked model and its plan, written down by hand."""
    from autopar.search.manual import manual_plan
    from autopar.shard import annotate

    file = tmp_path_factory.mktemp("victim") / "victim.py"
    file.write_text(FACTORY)
    workload = load_model(f"{file}:model", SizeOptions())
    graph = annotate(workload.capture())
    plan = manual_plan(graph, data=2, zero=2)
    request = {"model": "victim.py:model", "devices": "2", "global_batch": 8}
    return graph, dataclasses.replace(plan, notes=("a note",), request=request)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: tuple[Any, Plan]) -> Path:
    """A working folder with the model, its plan, and a module that marks its import."""
    (tmp_path / "victim.py").write_text(FACTORY)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "base.json").write_text(base[1].dumps())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path / "attacked"))
    return tmp_path


def test_the_plan_that_attacks_are_drawn_from_is_read(here: Path, base: tuple[Any, Plan]):
    assert read_plan(here / "base.json") == base[1]


def test_the_limits_of_files_are_documented():
    text = " ".join((ROOT / "SECURITY.md").read_text().split())
    assert f"Files are limited to {MAX_BYTES // 2**20} MiB and {MAX_LEVELS} levels of nesting" in text
    assert f"a plan to {MAX_LAYERS:,} layers and {MAX_DEVICES:,} devices" in text


def test_random_attacks_are_refused_by_a_sentence_with_assertions_and_without(here: Path, base: tuple[Any, Plan]):
    found = read_attacks(Path("base.json"), SEEDS)
    assert found["refused"] > 0.9 * SEEDS, found
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/models")))
    code = f"import json, pathlib, plan_attacks as p; print(json.dumps(p.read_attacks(pathlib.Path('base.json'), {SEEDS})))"
    done = subprocess.run(
        [sys.executable, "-O", "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == found
    assert not (here / "attacked").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh": [{"name": 'data": 1, "x', "size": 2, "stride": 1}]}, "mesh[0].name is"),
        ({"mesh": [{"name": "pipeline", "size": 2, "stride": 1}]}, "every program has itself"),
        ({"mesh": [{"name": "data", "size": 2, "stride": 2}]}, "has stride 2"),
        ({"mesh": [{"name": "data", "size": 1, "stride": 1}] * 2000}, "mesh has 2,000 items"),
        ({"model": '"""\nimport evil\n"""'}, "model is"),
        ({"devices": "\x1b[2J"}, "devices is"),
        ({"prefetch": 10**9}, "prefetch is 1000000000"),
        ({"microbatches": 3}, "a global batch of 8 does not divide"),
        ({"global_batch": 2**32, "microbatches": 2**24}, "microbatches is 16777216"),
        ({"layers": [{}] * 1_000_000}, "layers has 1,000,000 items"),
        ({"pipeline": 2}, "pipeline is 2, and there are 1 stages"),
        ({"schedule": "zbv"}, "zbv is a pipeline schedule"),
        ({"sync": "parameter-server"}, "has ZeRO 2"),
        ({"imports": ["os; evil"]}, "imports[0] is"),
        ({"request": {"init": "evil.pt"}}, "request has 'init', which is not a field"),
        ({"request": {"tensor": "8"}}, "request.tensor is '8'"),
        ({"request": {"pins": ["tensor"]}}, "request.pins: 'tensor' is not a pin"),
        ({"surprise": 1}, "it has 'surprise', which is not a field"),
        ({"gap": 1.5}, "gap is 1.5"),
        ({"step_time_s": 10**400}, "step_time_s is"),
        ({"feasible": "yes"}, "feasible is 'yes', not true or false"),
    ],
)
def test_what_no_plan_has_is_named(base: tuple[Any, Plan], change: dict[str, Any], words: str):
    with pytest.raises(MalformedFileError) as refused:
        check_plan(base[1].to_json() | change)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": 4}, "data is 4, and the roles of its axes make 2"),
        ({"replicate": 3}, "not a product of its outermost data axes"),
        ({"replicate": 2}, "not a product of its outermost data axes"),  # of all: no axis is left for the shards
        ({"zero": 2, "activations": "int8"}, "activations is int8, which is not exact, and allow lacks"),
        ({"zero": 0, "replicate": 2}, "replicate 2 without ZeRO"),
        ({"zero": 1, "reduce": "step"}, "reduce step under ZeRO 1"),
        ({"activations": "selective", "overlap": "halves"}, "overlap halves and activations selective"),
        ({"activations": "int8", "roles": ["tensor+weights"], "data": 1}, "activations int8, and also saves"),
        ({"activations": "full:1"}, "is 'full:1', not one of keep, selective, full"),
        ({"activations": "keep:2"}, "is 'keep:2', not one of"),
        ({"recomputation": {"kind": "full", "layers": 1}}, "both 'activations' and 'recomputation'"),
        ({"roles": ["data", "data"]}, "has 2 roles, and the mesh has 1 axes"),
    ],
)
def test_a_strategy_that_no_layer_can_have_is_named(base: tuple[Any, Plan], change: dict[str, Any], words: str):
    data = base[1].to_json()
    data["layers"][0] |= change
    with pytest.raises(MalformedFileError) as refused:
        check_plan(data)
    assert words in str(refused.value)


def test_what_a_plan_does_inexactly_must_be_allowed(base: tuple[Any, Plan]):
    data = base[1].to_json() | {"sync": "stale:2"}
    for layer in data["layers"]:
        layer["zero"] = 0
    with pytest.raises(MalformedFileError, match="sync is stale:2, which is not exact, and allow lacks"):
        check_plan(data)
    check_plan(data | {"allow": ["stale_gradients"]})


def test_plans_that_autopar_writes_are_read(tmp_path: Path, base: tuple[Any, Plan]):
    """Notes quote lines of code with tabs and other spaces; time limits and pins are recorded as they are given."""
    request = recorded_options(PlanRequest("victim.py:model", "2", time_limit=100_000.0, pins=("prefetch=16384",)))
    notes = ("one microbatch only: (line 5 of m.py: x = self.bn(x)\t# a\u00a0norm\u3000\u200b)",)
    written = dataclasses.replace(base[1], notes=notes, request=request, prefetch=2**14)
    path = tmp_path / "plan.json"
    path.write_text(written.dumps())
    assert read_plan(path) == written and "x = self.bn(x) # a norm  )" in written.notes[0]
    for longest in (1e9, 1e10):
        data = written.to_json() | {"request": {"time_limit": longest}}
        if longest > 1e9:
            with pytest.raises(MalformedFileError, match="request.time_limit is 1"):
                check_plan(data)
            with pytest.raises(UsageError, match="the time limit is 1"):
                SearchOptions(time_limit_s=longest)
        else:
            check_plan(data)
            SearchOptions(time_limit_s=longest)


OLDER = {"recomputation": {"kind": "none", "layers": 1}, "offload": "none", "saved": "exact", "compiled": True}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recomputation": {"kind": "none", "layers": 2}}, "segments of 2 layers, and its recomputation is none"),
        ({"recomputation": {"kind": "full", "layers": 2}, "offload": "activations"}, "and offloads its activations"),
        (
            {"recomputation": {"kind": "full", "layers": 1}, "saved": "int8"},
            "saved as int8, and its recomputation is full",
        ),
        ({"saved": "int8", "offload": "both"}, "saved as int8, and offloads them"),
        ({"recomputation": {"kind": "selective", "layers": 1}, "overlap": "halves"}, "overlap halves and activations"),
        ({"compile": "layers"}, "both 'compile' and 'compiled'"),
    ],
)
def test_fields_of_older_plans_that_contradict_each_other_are_named(
    base: tuple[Any, Plan], change: dict[str, Any], words: str
):
    data = base[1].to_json()
    for name in ("activations", "compile"):
        del data["layers"][0][name]
    data["layers"][0] |= OLDER
    check_plan(data)
    data["layers"][0] |= change
    with pytest.raises(MalformedFileError) as refused:
        check_plan(data)
    assert words in str(refused.value)


def test_the_text_of_a_plan_is_no_code_in_a_program(base: tuple[Any, Plan]):
    """The emitter writes literals and words, whatever a plan that was made in Python holds."""
    graph, plan = base
    expected = None
    for text in [*TEXTS, 'a"b', "a'b", "a\\", '"', "'''", '"""', "\\N{DIGIT ONE}"]:
        text = text[:100]
        axis = dataclasses.replace(plan.mesh[0], name=text)
        hostile = dataclasses.replace(plan, model=text, devices=text, mesh=(axis,))
        source = model_source(cut_stages(graph, hostile, plan_shardings(graph, hostile)))
        tree = ast.parse(source.encode("utf-8", "backslashreplace"))
        found = [type(node).__name__ for node in ast.walk(tree)]
        expected = expected or found
        assert found == expected, text  # nothing but constants differs
        assert ast.literal_eval(quoted(text)) == text
        assert identifier(text).isidentifier()
        assert ast.get_docstring(ast.parse(f'"""{remark(text)}"""'), clean=False) is not None


@pytest.mark.parametrize(
    "command", ["report", "explain", "report --trace", "price", "emit", "run", "verify", "dev rehearse"]
)
@pytest.mark.parametrize("name", ["evil.py:model", "evil:model", "./victim.py:attacked", "evil.py"])
def test_a_factory_that_a_file_names_is_not_imported(here: Path, base: tuple[Any, Plan], command: str, name: str):
    request = {"model": name, "devices": "2"}
    (here / "plan.json").write_text(dataclasses.replace(base[1], request=request).dumps())
    page, trace = ["plan.json", "-o", "out.html"], ["plan.json", "--trace", "out.json"]
    options = {"report": page, "explain": ["plan.json"], "report --trace": trace, "emit": ["-o", "out"]}.get(
        command, []
    )
    before, options = ([name], ["--plan", "plan.json", *options]) if "plan.json" not in options else ([], options)
    words = command.removesuffix(" --trace").split()
    done = CliRunner().invoke(cli, [*words, *options], prog_name="autopar")
    assert not (here / "attacked").exists()
    if command == "report":
        assert done.exit_code == 0
        assert "autopar runs no code that a plan file names" in (here / "out.html").read_text()
        return
    assert isinstance(done.exception, UsageError)
    assert (
        f"names the model {name}, which is code, and autopar runs no code that a plan file names"
        in done.exception.message
    )
    with_model = [*words, *before, *options, *([] if before else ["--model", name])]
    assert done.exception.hint == f"write `autopar {shlex.join(with_model)}`"


def test_a_model_that_is_data_is_taken_from_a_file(base: tuple[Any, Plan]):
    for name in ("gpt2", "config.json", "saved"):
        plan = dataclasses.replace(base[1], request={"model": name, "devices": "2"})
        assert with_recorded_options(plan, PlanRequest()) == PlanRequest(model=name, devices="2")
        assert with_recorded_options(plan, PlanRequest(model="own.py:model")).model == "own.py:model"


def test_a_command_takes_model_devices_and_sizes_from_the_plan(tmp_path: Path):
    """All of them differ from the defaults, so a value that is not taken gives another model or batch, which is refused."""
    (tmp_path / "small.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64})
    )
    file, runner = tmp_path / "plan.json", CliRunner()
    sizes = ("--seq", "8", "--global-batch", "4", "--precision", "float64")
    asked = (
        "plan",
        str(tmp_path / "small.json"),
        "--devices",
        "2",
        *sizes,
        "--pin",
        "data=2",
        "--allow",
        "stale-gradients",
    )
    assert runner.invoke(cli, [*asked, "-o", str(file)], catch_exceptions=False).exit_code == 0
    found = json.loads(file.read_text())
    priced = json.loads(runner.invoke(cli, ["price", "--plan", str(file), "--json"], catch_exceptions=False).stdout)
    assert priced["step_time_s"] == found["step_time_s"] and priced["precision"] == "float64"
    program = tmp_path / "program"
    emitted = runner.invoke(
        cli, ["emit", "--plan", str(file), "--no-type-check", "-o", str(program)], catch_exceptions=False
    )
    assert emitted.exit_code == 0, emitted.output
    assert json.loads((program / "plan.json").read_text())["request"] == found["request"]
    with pytest.raises(UsageError, match="global batch of 4, this one has 8"):
        runner.invoke(cli, ["price", "--plan", str(file), "--global-batch", "8"], catch_exceptions=False)


def test_a_command_without_a_model_says_what_to_write():
    for words, hint in (
        (["emit", "-o", "p"], "write `autopar emit MODEL -o p --devices SPEC`"),
        (["price", "gpt2", "--timeline"], "write `autopar price gpt2 --timeline --devices SPEC`"),
        (["verify"], "write `autopar verify MODEL`"),
    ):
        done = CliRunner().invoke(cli, words, prog_name="autopar")
        assert isinstance(done.exception, UsageError) and done.exception.hint == hint


def test_the_command_line_of_a_plan_makes_its_request_again(base: tuple[Any, Plan]):
    request = PlanRequest(
        model="my models/m.py:make",
        devices="8xA100-80GB",
        seq=128,
        memory_limit="40GB",
        local_batch_norm=True,
        time_limit=3.0,
        pins=("layers.0.tensor=2", "head.zero=3"),
        allow=("fp8",),
    )
    words = shlex.split(command_line(dataclasses.replace(base[1], request=recorded_options(request))))
    assert words[:2] == ["autopar", "plan"]
    assert PlanRequest.taken_from(cli.commands["plan"].make_context("plan", words[2:]).params) == request
    assert command_line(dataclasses.replace(base[1], request={})) == ""


def test_a_time_limit_is_recorded_and_not_replaced(base: tuple[Any, Plan]):
    for seconds in (120.0, 0.0):
        record = recorded_options(PlanRequest(model="gpt2", devices="2", time_limit=seconds))
        plan = dataclasses.replace(base[1], request=record)
        assert with_recorded_options(plan, PlanRequest()).time_limit == seconds
        assert with_recorded_options(plan, PlanRequest(time_limit=0.0)).time_limit == 0.0
        found = cluster_and_options(PlanRequest(devices="2", time_limit=seconds))[1]
        assert found.time_limit_s == seconds
    assert cluster_and_options(PlanRequest(devices="2"))[1].time_limit_s == 20.0


def test_the_request_of_a_plan_is_read_as_older_versions_wrote_it(base: tuple[Any, Plan]):
    older = {
        "model": "gpt2",
        "devices": "2",
        "tensor": 2,
        "recompute": "full",
        "pins": ["head.zero=3"],
        "allow": ["fp8"],
    }
    plan = dataclasses.replace(base[1], request=older)
    check_plan(plan.to_json())
    found = with_recorded_options(plan, PlanRequest(pins=("tensor=1",)))
    assert found.pins == ("recompute=full", "head.zero=3", "tensor=1") and list(found.allow) == ["fp8"]
    assert with_recorded_options(
        dataclasses.replace(plan, request=recorded_options(found)), PlanRequest()
    ) == dataclasses.replace(found, allow=["fp8"])
    check_plan(dataclasses.replace(plan, request=recorded_options(found)).to_json())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * (MAX_LEVELS + 1) + b"]" * (MAX_LEVELS + 1), "nested deeper than"),
        (b"[" * 1_000_000, "nested deeper than"),
        (b'{"a": 1, "a": 2}', "the key 'a' twice"),
        (b"1e999", "larger than any number"),
        (b"[Infinity]", "Infinity is not a number"),
        (b"9" * 10_000, "thousands of digits"),
        (b'"\\ud800"', "surrogate"),
        (b'"\xff"', "byte 1 is not UTF-8"),
        (b"", "line 1 is not JSON"),
    ],
)
def test_json_has_limits(tmp_path: Path, text: bytes, words: str):
    with pytest.raises(MalformedFileError, match=words):
        parse_json(text)
    file = tmp_path / "a.json"
    file.write_bytes(text)
    for read in (lambda: calibration.read(file), lambda: load_model(str(file), SizeOptions()), lambda: read_plan(file)):
        with pytest.raises(UsageError, match=words) as refused:
            read()
        assert refused.value.hint
    assert parse_json(b'["\\ud83d\\ude00"]') == ["\U0001f600"]
    with pytest.raises(MalformedFileError, match="more than 1,000 bytes"):
        read_json("/dev/zero", 1000)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "evil--evil.Model", "AutoConfig": "evil.Config"}},
        {"model_type": "gpt2", "attn_implementation": "kernels-community/evil", "_attn_implementation": "evil/evil"},
        {"model_type": "gpt2", "_attn_implementation_internal": {"": "evil/evil"}, "use_kernels": True},
    ],
)
def test_a_configuration_imports_nothing(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    auto = pytest.importorskip("transformers.models.auto.auto_factory")
    monkeypatch.setattr(auto, "get_class_from_dynamic_module", lambda *_, **__: pytest.fail("it imports code"))
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *_, **__: pytest.fail("kernels")
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks for trust"))
    module, _ = build_config({"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64} | config, 8, 2)
    assert module.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "gpt2", "n_layer": "many"},
        {"model_type": "gpt2", "n_embd": 10**30, "n_layer": 1},
        {"model_type": "gpt2", "vocab_size": -5, "n_layer": 1},
        {"model_type": ["gpt2"]},
        {"model_type": "gpt2", "architectures": {"a": 1}},
        {"model_type": "gpt2", "architectures": [7]},
        {"module": ["mlp"]},
        {"module": {"a": 1}},
        {"module": "nothing"},
    ],
)
def test_a_configuration_of_no_model_is_refused_soon(config: dict[str, Any]):
    pytest.importorskip("transformers")
    started = time.process_time()
    with pytest.raises(ModelError) as refused:
        build_config(config, None, None)
    assert refused.value.hint and time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    [
        "nodes = 99999999999999999999",
        "nodes = " + "9" * 6000,
        "memory_gb = nan",
        "memory_gb = inf",
        "nodes = true",
        "name = ['a']",
        'name = "\\u001b[2J"',
        "a = " + "[" * 5000,
        "a = 2020-13-45",
        'gpu = "T4"\n' * 2,
        "[[group]]\ngpu = 3",
        "[[group]]\n" * 1000,
        "#" * 2_000_000,
        "x.y.z = 1",
    ],
)
def test_a_cluster_file_that_is_none_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "cluster.toml"
    file.write_text('gpu = "H100-80GB"\n' * (not text.startswith(("[", "gpu"))) + text)
    with pytest.raises(DeviceError) as refused:
        parse(str(file))
    assert refused.value.hint and len(refused.value.message) < 3000


FIGURE = {
    "name": "launch", "device": "cpu", "processes": 1, "variant": "", "backward": False, "size": {}, "unit": "s", "median": 1e-6,
    "low": 1e-6, "high": 1e-6, "count": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": [1]}, "of version"),
        ({"figures": {}}, "figures is"),
        ({"figures": []}, "not positive numbers"),
        ({"figures": [FIGURE | {"median": "1"}]}, "median is '1'"),
        ({"figures": [FIGURE | {"processes": True}]}, "processes is True"),
        ({"figures": [FIGURE | {"size": [1]}]}, "size is"),
        ({"figures": [FIGURE | {"extra": 1}]}, "should not have, 'extra'"),
        ({"figures": [FIGURE | {"median": 10**400}]}, "not positive numbers"),
        ({"figures": [FIGURE]}, "lack launch"),
        ({"figures": [FIGURE | {"name": "wire", "size": {"bytes": 1.0}}]}, "has no members"),
        ({"machine": []}, "machine is"),
        ({"machine": {"gpu": 3}}, "machine.gpu"),
    ],
)
def test_a_calibration_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], words: str):
    data: dict[str, Any] = {"version": 1, "machine": {}, "measured_at": "now", "figures": [FIGURE]}
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(data | change))
    with pytest.raises(AutoparError) as refused:
        calibration.read(file)
    assert words in refused.value.message and refused.value.hint
