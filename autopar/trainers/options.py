"""Reads a trainer's configuration file as a list of options: flags of a shell script, and the leaves of YAML, TOML, JSON or Python.

Files are data. Shell scripts are split into words, and variables that the script sets to words are replaced; nothing is executed. Of
Python, the calls with keywords that are literals are read (``ParallelismConfig(tensor_parallel_degree=8)``). A file with several functions,
such as torchtitan's ``config_registry.py``, is read as ``FILE:FUNCTION``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.data_files import MAX_BYTES, MalformedFileError, parse_json
from autopar.errors import UsageError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[@\])?(?::?[-=]([^}]*))?\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_FUNCTION = re.compile(r"(.+\.py):([A-Za-z_]\w*)", re.DOTALL)
_MOST_OPTIONS = 20_000
_MOST_CHARACTERS = 2**22  # of a script with its variables replaced
_HERE = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)")
_SHOWN = 12  # maximum number of functions that a message names
_LISTS = ("parallelism.module_fqns_per_model_part", "recompute_modules")
"""The flags with several words as their value."""


@dataclass(frozen=True, slots=True)
class Option:
    """``name`` as the file spells it: ``--bf16``, or the path of a key (``parallelism.tensor_parallel_degree``). ``value`` is text (empty
    for a flag without text), a number, a truth value or ``None``."""

    name: str
    value: Any


def read_options(path: str | Path) -> list[Option]:
    """Return the options in a file, by its suffix: .json, .yaml, .toml, .py or .py:FUNCTION, otherwise a shell script.

    Raises ``UsageError`` if the file can't be read, or if it has several functions and none is named.
    """
    named = _FUNCTION.fullmatch(str(path))
    file, function = Path(named[1] if named else path), named[2] if named else ""
    hint = "give a file of your trainer's configuration; its format follows from its suffix (.py, .json, .yaml, .toml, else a shell script)"
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES // 2**20} MiB", hint)
    try:
        if file.suffix == ".py":
            found: Iterable[Option] = _of_function(ast.parse(text), function, str(file))
        elif file.suffix in (".json", ".yaml", ".yml", ".toml"):
            parsed = _parsed(text, file.suffix)
            if isinstance(parsed, dict) and "stages" in parsed and "mesh" in parsed:
                raise UsageError(f"{path} is a plan, not a trainer's configuration", f"give it as --plan {path}")
            found = _leaves(parsed, "")
        else:
            found = of_words(shell_words(text))
        options = list(itertools.islice(found, _MOST_OPTIONS + 1))
    except (MalformedFileError, yaml.YAMLError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        first = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{path} is not readable: {first}", hint) from error
    if len(options) > _MOST_OPTIONS:
        raise UsageError(f"{path} has more than {_MOST_OPTIONS:,} options", hint)
    return options


def _parsed(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return parse_json(text)
    return tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)


def _leaves(data: Any, path: str) -> Iterator[Option]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield Option(path, data)


def _of_function(tree: ast.Module, name: str, file: str) -> Iterator[Option]:
    """Yield the options of a function, after those of functions of the same file that it calls; without functions, those of the file.

    Raises ``UsageError`` if there is no function ``name``, or if it is empty and there are several.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = [each for each, node in functions.items() if not each.startswith("_") and _configures(node)]
    if name not in functions and (name or len(public) > 1):
        shown = ", ".join(public[:_SHOWN]) + (f" and {len(public) - _SHOWN} more" if len(public) > _SHOWN else "")
        missing = f"has no function {name!r}" if name else "has several functions that make a configuration"
        raise UsageError(f"{file} {missing}: {shown or 'there is none'}", f"name one: {file}:FUNCTION")
    if not name and not public:
        yield from _of_calls(tree)
        return
    for statement in tree.body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from _of_calls(statement)
    seen: set[str] = set()

    def of(each: str) -> Iterator[Option]:
        seen.add(each)
        for node in ast.walk(functions[each]):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called in functions and called not in seen:
                yield from of(called)
        yield from _of_calls(functions[each])

    yield from of(name or public[0])


def _configures(function: ast.FunctionDef) -> bool:
    """Return whether a function makes or changes a configuration: it calls ``...Config(...)``, or assigns ``config.section.field``."""
    nodes = list(ast.walk(function))
    calls = (ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
    targets = (target for node in nodes if isinstance(node, ast.Assign) for target in node.targets)
    return any(each.endswith("Config") for each in calls) or any(
        isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute) for target in targets
    )


def _of_calls(tree: ast.AST) -> Iterator[Option]:
    """Yield every call ``Name(...)``, ``NameConfig(...)`` or ``Name.Config(...)`` as ``name()``, its keywords with literals as
    ``name.keyword``, and the literals that are assigned to ``config.section.field`` as ``section.field``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
            with contextlib.suppress(ValueError, TypeError):  # not a literal
                yield Option(ast.unparse(node.targets[0]).partition(".")[2], _literal(node.value))
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node.func).split(".")
        name = words[-2] if words[-1] == "Config" and len(words) > 1 else words[-1]
        section = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Config")).lower()
        if not hasattr(builtins, words[0]):
            yield Option(f"{section}()", True)
        for keyword in node.keywords:
            with contextlib.suppress(ValueError, TypeError):
                yield Option(f"{section}.{keyword.arg}", _literal(keyword.value))


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of a product of whole numbers (``8 * 8192``). Raises ``ValueError`` or ``TypeError`` otherwise."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = _literal(node.left), _literal(node.right)
        if not all(isinstance(factor, int) and abs(factor) < 2**32 for factor in factors):
            raise ValueError("not a product of integers")
        return factors[0] * factors[1]
    return ast.literal_eval(node)


def of_words(words: list[str]) -> list[Option]:
    """Return the options among words: ``--flag value``, ``--flag=value``, ``--flag``, and ``section:choice``."""
    found: list[Option] = []
    for i, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word.partition("=")
            values = [] if equals else list(itertools.takewhile(lambda each: not each.startswith("--"), words[i + 1 :]))
            if name.lstrip("-").replace("-", "_") not in _LISTS:
                values = values[:1]
            found.append(Option(name, text if equals else " ".join(values)))
        elif re.fullmatch(r"[a-z_]+:[a-z-]+", word):
            section, _, choice = word.partition(":")
            found.append(Option(section, choice))
    return found


def shell_words(text: str) -> list[str]:
    """Return a script's words, with the values of variables that it sets. A word with another variable keeps its ``$``.

    Both branches of a condition count. Raises ``ValueError`` for quotes that do not end.
    """
    variables: dict[str, str] = {}
    found: list[str] = []
    tokens = _tokens(text)
    at = characters = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        assigned = _ASSIGNMENT.fullmatch(token)
        if assigned is None:
            words = _expanded(token.strip("()"), variables)
        else:
            name, value = assigned[1], assigned[2]
            if value.startswith("("):  # an array
                while not value.rstrip().endswith(")") and at < len(tokens):
                    value, at = f"{value} {tokens[at]}", at + 1
                value = value.strip("() \n")
            before = f"{variables.get(name, '')} " if token[len(name)] == "+" else ""
            # a script that sets options and uses them elsewhere: the options count where they are set
            words = _expanded(value, variables)
            variables[name] = before + words
        characters += len(words)
        if characters > _MOST_CHARACTERS:
            raise ValueError(f"more than {_MOST_CHARACTERS:,} characters, with variables replaced")
        found += words.split()
    return found


def _tokens(text: str) -> list[str]:
    """Return a script's words, quoted ones whole, without comments, here documents and operators."""
    lines: list[str] = []
    until, quote = "", ""
    for line in text.split("\n"):
        if until:
            until = "" if line.strip() == until else until
            continue
        line, quote = _without_comment(line, quote)
        here = None if quote else _HERE.search(line)
        until = here[1] if here else ""
        lines.append(line)
    lexer = shlex.shlex("\n".join(lines).replace("\\\n", " "), posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    return [token for token in lexer if not set(token) <= set(";|&<>")]


def _without_comment(line: str, quote: str) -> tuple[str, str]:
    """Return a line without its comment, and the quote that is open at its end, given the one that is open at its start."""
    escaped = False
    for i, letter in enumerate(line):
        if escaped:
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i], ""
    return line, quote


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with the values of variables. Arrays of options are left out: they were counted where they are set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        known = variables.get(name)
        if known is not None:
            return "" if known.lstrip().startswith("--") else known
        return match[0] if match[3] is None else match[3]

    return _VARIABLE.sub(value, text)
