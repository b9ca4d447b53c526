"""Figures of the sources, by one command: ``python tests/reports house`` (``make report NAME=house``).

Lines and files of the product, lengths of functions, imports inside functions, cycles among packages and among files, public functions
with many parameters, files that spell the name of an op or a schedule, files that know a technique; then the lines of every package, by
what they hold. ``--commit ab12cd3`` adds a column for that commit.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from typing import Any

import networkx as nx
from places import ROOT
from rich.console import Console
from rich.table import Column, Table

PACKAGES = ("autopar", "passes")
MANY_PARAMETERS = 8
LONG_LINES = 40
SPELLED = ("scaled_dot_product_attention", '"1f1b"', '"interleaved-1f1b"')
"""Names of one op and of two schedules: facts about each belong in one package."""

TECHNIQUES = {
    "activations: recomputed": r"\brecomputations?\b|Recomputation|\bSELECTIVE\b|selectively|passes\.selective|[\"']selective\b"
    r"|\brecompute\b|as_one|\brecomputing\b",
    "activations: in the host": r"offloads_activations|OFFLOADS|\boffload\b|FULL_HOST|activation_storage",
    "activations: in 8 bits": r"saves_int8|SAVINGS|\bINT8|pins_int8|saved_int8|is_narrow|trainer\.int8|price\.int8|program\.int8"
    r"|in_8_bits",
    "compile": r"COMPILATION|strategy\.compiled|is_compiled|_of_compiled_layers|\bs\.compiled|compiles_layers|techniques\.compilation",
    "logits": r"slice_logits|slices_logits|kernels_logits|whole_logits|check_logits|[\"']sliced\b|sliced_(?:graph|class)|\bLOGITS\b|SLICED",
    "overlap: early collectives": r"kernels_overlap|\bOVERLAP\b|y\.overlap\b|overlap_pass|passes\.overlap",
    "overlap: halves": r"\bHALVES\b|[\"']halves\b|\bhalves\.\w|program\.halves|halves_\w+|in_halves|\bOVERLAP\b|y\.overlap\b"
    r"|overlap_pass|passes\.overlap",
    "overlap: pairs": r"\bIN_PAIRS\b|[\"']pairs\.\w|(?:program|runtime)\.pairs|PairedPipeline",
    "reduce": r"options\.get\n[\"']reduce\b|reduces?_once|techniques\.reduce\b|options\[REDUCE\]|\bREDUCE\.name\b",
    "late gradients": r"\bstale\b|STALE|late_gradients|LateReductions",
    "states": r"options\.get\n[\"']states\b|\bSTATES\b|strategy\.states|s\.states\b|state_places|(?<![A-Z_])NVME\b",
}
"""What a file spells that knows a technique of layers: its symbols and words, in identifiers and strings, docstrings aside. Values that are
common words (``full``, ``host``, ``none``) are left out."""

LINES = ("code", "imports", "docstrings", "comments", "blank")
"""What a line of a source file can be; a comment at the end of a line of code is code."""

Sources = dict[str, str]
"""The text of every module, by its path: ``autopar/search/driver.py``."""


def sources(commit: str | None) -> Sources:
    """The product's modules, of the checkout or of a commit."""
    if commit is None:
        return {
            str(path.relative_to(ROOT)): path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py")
        }
    archive = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [member for member in tar.getmembers() if member.name.endswith(".py")]
        return {member.name: tar.extractfile(member).read().decode() for member in files}  # type: ignore[union-attr]


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str) -> str:
    """The package or single file below ``autopar`` that a module is in; ``passes`` is one of them."""
    parts = module.split(".")
    return "passes" if parts[0] == "passes" else ".".join(parts[1:2]) or "autopar"


def lines_of(text: str) -> Counter[str]:
    """How many lines of one file are code, imports, docstrings, comments and blank."""
    kinds = ["code" if line.strip() else "blank" for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            kinds[token.start[0] - 1] = "comments"
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kind = "imports"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kind = "docstrings"
        else:
            continue
        end = node.end_lineno or node.lineno
        kinds[node.lineno - 1 : end] = [kind] * (end - node.lineno + 1)
    return Counter(kinds)


def lines_by_package(texts: Sources) -> dict[str, Counter[str]]:
    """The lines of every package below ``autopar``, of its single files together, and of ``passes``; the largest first."""
    packages: dict[str, Counter[str]] = {}
    for path, text in texts.items():
        parts = path.split("/")
        package = "passes" if parts[0] == "passes" else "single files" if len(parts) == 2 else parts[1]
        packages.setdefault(package, Counter()).update(lines_of(text))
    return dict(sorted(packages.items(), key=lambda row: -row[1].total()))


def imports(tree: ast.AST, modules: set[str]) -> Iterator[tuple[str, bool]]:
    """(module of the product, whether the import is inside of a function); those under ``if TYPE_CHECKING`` do not run."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # the files of a program alone import relative to their package, which is copied under another name
            module = ".".join(["autopar.program"] * node.level + ([node.module] if node.module else []))
            given = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else module for name in given]
        yield from ((name, inside) for name in dict.fromkeys(names) if name in modules)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree, False)


def figures(texts: Sources) -> dict[str, Any]:
    """All figures of one state of the sources."""
    return {
        **structure(texts),
        **{f"files that spell {name}": sum(name in text for text in texts.values()) for name in SPELLED},
        **{f"files that know {name}": len(found) for name, found in spread(texts).items()},
    }


def structure(texts: Sources) -> dict[str, Any]:
    """The figures that the syntax trees give."""
    modules = {module_of(path) for path in texts}
    trees = {module_of(path): parsed(text) for path, text in texts.items()}
    files, packages = nx.DiGraph(), nx.DiGraph()
    inside_functions = 0
    for module, tree in trees.items():
        for target, inside in imports(tree, modules):
            inside_functions += inside
            if not inside:
                files.add_edge(module, target)
            if package_of(module) != package_of(target):
                packages.add_edge(package_of(module), package_of(target))
    functions = [
        (module, node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted((1 + (node.end_lineno or 0) - node.lineno for _, node in functions), reverse=True)
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "files": len(texts),
        "functions": len(functions),
        "longest function, lines": lengths[0],
        f"functions of more than {LONG_LINES} lines": sum(length > LONG_LINES for length in lengths),
        "imports of own modules inside functions": inside_functions,
        "cycles among packages": _cycles(packages),
        "cycles among files": _cycles(files),
        f"public functions of more than {MANY_PARAMETERS} parameters": sorted(
            f"{module}.{node.name} ({_parameters(node)})"
            for module, node in functions
            if not node.name.startswith("_") and _parameters(node) > MANY_PARAMETERS
        ),
    }


def spread(texts: Sources) -> dict[str, list[str]]:
    """The files that know each technique: those that spell it, and those of its own."""
    said = {path: f"{module_of(path)}.py\n{_spelled(text)}" for path, text in texts.items()}
    return {
        name: sorted(path for path, words in said.items() if re.search(pattern, words))
        for name, pattern in TECHNIQUES.items()
    }


def _spelled(text: str) -> str:
    """The identifiers and strings of a file, without docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = (tokenize.NAME, tokenize.STRING)
    return "".join(_joined(t, kinds) for t in tokens if t.start[0] not in docstrings).replace(".\n", ".")


def _joined(token: tokenize.TokenInfo, kinds: tuple[int, ...]) -> str:
    """A name or a string on a line of its own; names with a dot between them together."""
    return f"\n{token.string}" if token.type in kinds else "." if token.string == "." else ""


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def _cycles(graph: nx.DiGraph) -> list[str]:
    """Sets of nodes that import each other in a circle."""
    found = [component for component in nx.strongly_connected_components(graph) if len(component) > 1]
    return sorted(", ".join(sorted(component)) for component in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="the state of this commit beside that of the checkout")
    parser.add_argument("--json", action="store_true", help="one object for each state")
    args = parser.parse_args()
    texts = {commit or "checkout": sources(commit) for commit in ([args.commit] if args.commit else []) + [None]}
    states = {name: {**figures(files), "packages": lines_by_package(files)} for name, files in texts.items()}
    if args.json:
        sys.stdout.write(json.dumps(states, indent=1) + "\n")
        return 0
    table = Table("", *states)
    packages = {name: state.pop("packages") for name, state in states.items()}
    for name in next(iter(states.values())):
        table.add_row(name, *(_cell(state[name]) for state in states.values()))
    console = Console()
    console.print(table)
    for name, counts in packages.items():
        console.print(_packages_table(name, counts))
    return 0


def _packages_table(state: str, counts: dict[str, Counter[str]]) -> Table:
    table = Table(f"lines, {state}", *(Column(kind, justify="right") for kind in ("all", *LINES)))
    for package, kinds in {**counts, "all": sum(counts.values(), Counter())}.items():
        table.add_row(package, *(f"{count:,}" for count in (kinds.total(), *(kinds[kind] for kind in LINES))))
    return table


def _cell(value: Any) -> str:
    return "\n".join([str(len(value)), *value]) if isinstance(value, list) else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
