"""The house rules, as tests: who may import whom, the public names, sizes of files and functions, documents that stay true."""

from __future__ import annotations

import ast
import functools
import json
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from house_figures import imports, module_of, parsed, sources, spread, structure
from pins_page import FIELDS, PAGE, page
from places import DOCS, ROOT

import autopar

SOURCES = sorted((ROOT / "autopar").rglob("*.py")) + sorted((ROOT / "passes").rglob("*.py"))

LEAVES = {
    "errors",
    "plan",
    "summary",
    "types",
    "graph",
    "segments",
    "schedules",
    "sharding",
    "layer_price",
    "precision",
    "units",
    "measure",
    "memory",
    "picture",
    "torch_private",
    "pins",
    "techniques",
    "plan_files",
    "plan_schema",
    "data_files",
    "progress",
    "keywords",
}
# Which packages a package may import, besides itself and the leaves. What is not here is forbidden.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "plan": set(),
    "summary": set(),
    "schedules": set(),
    "types": set(),
    "precision": set(),
    "units": set(),
    "torch_private": set(),
    "graph": set(),
    "segments": set(),
    "sharding": set(),
    "layer_price": set(),
    "measure": set(),
    "memory": set(),
    "pins": set(),
    "techniques": set(),
    "plan_files": set(),
    "plan_schema": set(),
    "data_files": set(),
    "progress": set(),
    "keywords": set(),
    "expert_loads": {"program"},
    "picture": set(),
    "ops": {"program"},
    "flow": {"ops"},
    "program": set(),
    "devices": set(),
    "rules": {"ops", "program"},
    "passes": {"ops", "program", "rules", "flow"},
    "shard": {"ops", "rules", "flow", "passes"},
    "capture": {"ops", "passes", "program"},
    "price": {"ops", "devices", "rules", "shard", "passes", "flow"},
    "trainers": {"ops", "devices", "price", "search", "shard"},
    "search": set(),
    "workload": {"capture", "expert_loads", "search", "shard"},
    "explain": {"devices", "price", "search", "workload"},
    "planning": {"ops", "capture", "devices", "expert_loads", "explain", "price", "run", "search", "workload"},
    "sweep": {"devices", "explain", "planning", "search"},
    "report": {"devices", "explain", "price", "program", "search"},
    "emit": {"ops", "passes", "program", "rules", "shard"},
    "checks": {"ops", "flow", "passes", "price", "program", "rules"},
    "validate": {"ops", "capture", "devices", "expert_loads", "flow", "price", "search", "shard", "trainers", "zoo"},
    "run": {"capture", "checks", "devices", "program"},
    "zoo": set(),
    "verify": {
        "ops",
        "capture",
        "checks",
        "emit",
        "flow",
        "passes",
        "program",
        "rules",
        "run",
        "search",
        "shard",
        "workload",
    },
    "compile": {"checks", "devices", "emit", "expert_loads", "planning", "run", "search", "workload"},
    "profile": {"devices", "program", "run"},
    "doctor": {"devices", "run"},
    "ui": set(),
    "bench": {"compile", "devices", "planning", "run", "search", "timing", "validate", "workload"},
    "timing": {"compile", "run"},
    "tune": {"devices", "explain", "planning", "price", "profile", "run", "search", "timing", "workload"},
    "cli": {
        "bench",
        "compile",
        "devices",
        "doctor",
        "expert_loads",
        "explain",
        "ops",
        "planning",
        "price",
        "profile",
        "program",
        "report",
        "run",
        "search",
        "sweep",
        "trainers",
        "tune",
        "ui",
        "validate",
        "verify",
        "workload",
        "zoo",
    },
    "__init__": {"capture", "checks", "compile", "run", "verify"},
    "__main__": {"cli"},
}


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text())


@functools.cache
def figures() -> dict[str, Any]:
    return structure(sources(None))


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "passes" if parts[0] == "passes" else parts[1].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import that runs; those under ``if TYPE_CHECKING`` do not."""
    tree = tree_of(path)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(_name(part) == "TYPE_CHECKING" for part in ast.walk(node.test)):
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            program = (
                path.parent == ROOT / "autopar" / "program"
            )  # these files are copied into a package of another name
            assert node.level == program == 1 or node.level == 0, f"{path}:{node.lineno}: relative import"
            module = ".".join(["autopar.program"] * node.level + ([node.module] if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_packages_import_what_they_may():
    wrong = []
    for path in SOURCES:
        package = package_of(path)
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] not in ("autopar", "passes") or name in ("autopar", "autopar.__version__"):
                continue
            target = "passes" if parts[0] == "passes" else parts[1]
            if target not in ALLOWED[package] | LEAVES | {package}:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {package} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_packages_and_no_files_import_in_a_circle():
    found = figures()
    assert found["cycles among packages"] == found["cycles among files"] == []


# Imports of our own modules inside of functions: how many a file may have, and why. Everything else is imported at the top.
IMPORTS_IN_FUNCTIONS = {
    "autopar/cli/app.py": (25, "`autopar --help` answers without torch: a command is imported when it runs"),
    "autopar/cli/options.py": (1, "`autopar --help` answers without numpy; devices are read where they are given"),
    "autopar/doctor/run.py": (1, "`autopar doctor` says what is broken where torch cannot be imported"),
    "autopar/run/__init__.py": (1, "worker processes start without what only their parent needs"),
    "autopar/zoo/__init__.py": (1, "`autopar help models` lists the zoo without torch and transformers"),
    "autopar/price/pricer.py": (1, "a pricer whose types are given needs no solver"),
    "autopar/rules/experts.py": (2, "candidates asks this module for the rule of a mixture"),
    "autopar/validate/models.py": (6, "rows are read without torch"),
    "autopar/validate/run.py": (8, "rows are read without torch"),
}


def test_imports_inside_of_functions_have_a_reason():
    modules = {module_of(path) for path in sources(None)}
    for path in sources(None):
        count = sum(inside for _, inside in imports(tree_of(ROOT / path), modules))
        allowed, _ = IMPORTS_IN_FUNCTIONS.get(path, (0, ""))
        assert count <= allowed, f"{path}: {count} imports of our own modules inside of functions, {allowed} may be"


# Public functions of more than eight parameters, and why. Others take a record.
MANY_PARAMETERS = {
    "autopar.program.kernels.attention": "an op of the emitted program: its operands and numbers",
    "autopar.program.kernels_experts.experts": "an op of the emitted program: its operands and numbers",
    "autopar.program.kernels_logits.loss_in_slices": "an op of the emitted program: its operands and numbers",
    "autopar.program.kernels_ring.forward": "an op of the emitted program: its operands and numbers",
    "autopar.program.kernels_ring.ring_attention": "an op of the emitted program: its operands and numbers",
    "autopar.program.kernels_rnn.recurrent": "an op of the emitted program: its operands and numbers",
}


def test_public_functions_have_few_parameters():
    found = figures()["public functions of more than 8 parameters"]
    assert {name.partition(" ")[0] for name in found} <= set(MANY_PARAMETERS), found


def test_every_package_has_a_row():
    assert {package_of(path) for path in SOURCES} == set(ALLOWED)


def test_the_map_names_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    named = re.findall(r"`(?:autopar/)?([\w/.]+)`", rows)
    found = [path.name for path in (ROOT / "autopar").iterdir() if (path / "__init__.py").is_file()]
    found += [path.name for path in (ROOT / "autopar").glob("*.py") if not path.name.startswith("__")]
    assert sorted(named) == sorted([*found, "passes", "passes/clean"])


def test_tests_mirror_the_packages():
    packages = {package_of(path) for path in SOURCES}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - {"reports"} <= packages


def test_the_program_that_is_copied_out_imports_nothing_of_ours():
    """Its modules import each other relative to their package, whose name is ``runtime`` once they are copied."""
    for path in sorted((ROOT / "autopar" / "program").glob("*.py")):
        for line, name in imports_of(path):
            top = name.split(".")[0]
            assert top != "autopar" or name.startswith("autopar.program"), f"{path.name}:{line}: {name}"
            known = {"torch", "spmd_types", "autopar", *(p.stem for p in path.parent.glob("*.py"))}
            assert top in known | sys.stdlib_module_names, f"{path.name}:{line}: {name}"


def test_private_torch_stays_in_one_module():
    private = re.compile(r"\b(?:from|import)\s+(torch(?:\.\w+)*\._\w+)|\b(torch(?:\.\w+)*\._[a-z]\w*)")
    found = []
    for path in SOURCES:
        if path.name == "torch_private.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            for match in private.finditer(code):
                name = match[1] or match[2]
                if not name.startswith("torch.ops.") and '"' not in code:
                    found.append(f"{path.relative_to(ROOT)}:{number}: {name}")
    assert not found, "\n".join(found)


def test_metadata_of_nodes_is_read_by_declared_keys():
    """``autopar.ops.meta`` declares them; torch's own ``val`` may be read as it is."""
    raw = re.compile(r"\.meta(?:\[|\.get\()(?!\"val\")")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if raw.search(line) and "``" not in line
    ]
    assert not found, "\n".join(found)


def run_python(code: str) -> Any:
    """What a new Python prints, which is JSON."""
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout)


IMPORTS = """
import importlib, json, pkgutil, sys, passes
for module in pkgutil.walk_packages(passes.__path__, "passes."):
    importlib.import_module(module.name)
found = [m for m in sys.modules if m.split(".")[0] == "ortools" or m.startswith(("autopar.search", "autopar.cli"))]
import autopar.cli.pricing
pricing = sorted(sys.modules)
import autopar.compile, autopar.capture.batch, autopar
functions = [callable(autopar.compile), callable(autopar.capture)]
print(json.dumps({"solver": found, "pricing": pricing, "functions": functions}))
"""


@functools.cache
def imported() -> dict[str, Any]:
    """What a new Python finds while it imports the passes, then the prices, and then ``compile``."""
    found: dict[str, Any] = run_python(IMPORTS)
    return found


def test_passes_do_not_import_the_solver():
    assert imported()["solver"] == []


def test_prices_are_made_without_what_writes_and_runs_programs():
    found = imported()["pricing"]
    assert "autopar.trainers" in found
    others = ("autopar.compile", "autopar.emit", "autopar.checks", "autopar.run.program",
              "autopar.program.train", "autopar.report", "autopar.verify", "scipy", "networkx", "matplotlib",
              "transformers")  # fmt: skip
    assert not [name for name in others if name in found]


def test_importing_autopar_does_not_import_torch():
    assert run_python("import json, sys, autopar, autopar.cli; print(json.dumps('torch' in sys.modules))") is False


def test_help_answers_at_once():
    """0.3 s is the promise; processor time of the fastest of a few tries is what the code takes, the rest is what else the machine does."""
    command = [sys.executable, "-m", "autopar", "--help"]
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert all(name in out for name in ("plan", "emit", "run", "help"))
    assert min(times) < 0.3, times


def test_exported_names():
    assert autopar.__all__ == [
        "AutoparError",
        "BatchError",
        "CaptureError",
        "CheckpointError",
        "DeviceError",
        "InfeasibleError",
        "LaunchError",
        "ModelError",
        "NonFiniteLossError",
        "Plan",
        "Program",
        "ProgramError",
        "RuleError",
        "UsageError",
        "__version__",
        "capture",
        "compile",
        "opaque",
        "register_rule",
        "verify",
    ]
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        autopar.magic  # noqa: B018


def test_public_functions_win_over_modules_of_their_name():
    assert imported()["functions"] == [True, True]


def test_the_error_tree_is_the_one_its_docstring_draws():
    import autopar.errors as errors

    drawn = re.findall(r"(\w+Error)\b", errors.__doc__)
    assert set(drawn) == {name for name in vars(errors) if name.endswith("Error")}


def test_files_and_functions_stay_small():
    long = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > 600:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > 70:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_few_files_know_a_technique():
    """A behaviour of a technique is known to the technique's file, the registry, its pass and its module of the runtime."""
    for name, files in spread(sources(None)).items():
        assert len(files) <= 4, f"{name}: {', '.join(files)}"


def test_no_pickles_and_no_evaluated_strings():
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert name not in ("eval", "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps"), where
                if name == "torch.load":
                    assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), where


# -- documents --

DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_make_commands_in_documents_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for path in [*DOCUMENTS, ROOT / ".ci" / "run"]:
        for line in re.findall(r"(?:^|`| )make ([a-z]+(?: [a-z]+)*)(?=`|$|\s*#)", path.read_text(), re.MULTILINE):
            named |= set(line.split())
    assert {"demo", "test", "check"} <= named <= targets


def test_autopar_commands_in_documents_parse():
    from autopar.cli.app import cli

    found = 0
    for path in DOCUMENTS:
        for block in blocks(path, "console"):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                match = re.match(r"\$ (?:\.venv/bin/)?autopar (.*)", line)
                if match:
                    words = shlex.split(match[1], comments=True)
                    words = words[: words.index(">")] if ">" in words else words
                    command, name = cli, "autopar"
                    while isinstance(command, click.Group):
                        name, *words = words
                        command = command.commands[name]
                    command.make_context(name, words)
                    found += 1
    assert found >= 3


def test_python_in_documents_compiles():
    for path in DOCUMENTS:
        for block in blocks(path, "python"):
            compile(block, str(path), "exec")


def test_links_in_documents_lead_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_table_of_pins_in_the_documents_is_the_one_of_the_sources():
    for path in (PAGE, FIELDS):
        text = path.read_text()
        assert page(text) == text, "make report NAME=reference"
    from autopar.pins import PINS

    text = PAGE.read_text()
    assert all(f"\n| `{name}` | " in text or pin.former and f"`{name}`" in text for name, pin in PINS.items())


def test_the_plan_document_names_every_field():
    from autopar.plan import Axis, LayerPlan, Memory, PinPrice, Plan, Prediction, Role, StagePlan, Strategy

    plan = Plan(
        "m", "1", (Axis("data", 1, 1),), (StagePlan(0, 1, (0, 1), Memory(1, 1, 1, 1, 1), 9, 0.1),), "none", 1, 1, "float32",
        (LayerPlan("l", "L", Strategy((Role.DATA,))),), Prediction(1, 1, 0, 0, 0, 0.5, 1), 1.0, 0.0,
        pins=(PinPrice("tensor", 2, 1.0, 1.0),),
    )  # fmt: skip
    text = (DOCS / "reference" / "plan-json.md").read_text()
    data = plan.to_json()
    names = [
        *data,
        *data["stages"][0],
        *data["layers"][0],
        *data["mesh"][0],
        *data["pins"][0],
        *data["stages"][0]["memory_by_part_bytes"],
    ]
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing, missing
    for block in blocks(DOCS / "reference" / "plan-json.md", "json"):
        assert Plan.from_json(json.loads(block)).to_json() == json.loads(block)


def test_the_cluster_document_parses(tmp_path):
    from autopar.devices import parse

    for number, block in enumerate(blocks(DOCS / "reference" / "cluster-toml.md", "toml")):
        path = tmp_path / f"cluster{number}.toml"
        path.write_text(block)
        assert parse(str(path)).count > 0
    assert number >= 1
