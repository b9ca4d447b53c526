"""Reads a trainer's configuration file as a list of options: flags of a shell script, and the leaves of YAML, TOML, JSON or Python.

Files are data. Shell scripts are split into words, and variables that the script sets to words are replaced; nothing is executed. Of
Python, the calls with keywords that are literals are read (``ParallelismConfig(tensor_parallel_degree=8)``).
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.data_files import MalformedFileError, parse_json
from autopar.errors import UsageError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[@\])?(?::?[-=]([^}]*))?\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_MOST_WORDS = 100_000
_LISTS = ("--parallelism.module_fqns_per_model_part",)
"""The flags with several words as their value."""


@dataclass(frozen=True, slots=True)
class Option:
    """``name`` as the file spells it: ``--bf16``, or the path of a key (``parallelism.tensor_parallel_degree``). ``value`` is text (empty
    for a flag without text), a number, a truth value or ``None``."""

    name: str
    value: Any


def read_options(path: str | Path) -> list[Option]:
    """Return the options in a file, by its suffix: .json, .yaml, .toml, .py, otherwise a shell script.

    Raises ``UsageError`` if the file can't be read.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}", "give a file of your trainer's configuration") from error
    try:
        if file.suffix == ".py":
            return list(_of_calls(text))
        if file.suffix in (".json", ".yaml", ".yml", ".toml"):
            return list(_leaves(_parsed(text, file.suffix), ""))
        return of_words(shell_words(text))
    except (
        MalformedFileError,
        yaml.YAMLError,
        tomllib.TOMLDecodeError,
        SyntaxError,
        ValueError,
        RecursionError,
    ) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(f"{path} is not readable: {first}", "its suffix says how it is read") from error


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


def _of_calls(text: str) -> Iterator[Option]:
    """Yield the keywords of every call ``NameConfig(keyword=literal)`` or ``Name.Config(...)``, with the path ``name.keyword``, and the
    literals that are assigned to ``config.section.field``, with the path ``section.field``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
            with contextlib.suppress(ValueError, TypeError):  # not a literal
                yield Option(ast.unparse(node.targets[0]).partition(".")[2], ast.literal_eval(node.value))
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node.func).split(".")
        name = words[-2] if words[-1] == "Config" and len(words) > 1 else words[-1]
        section = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Config")).lower()
        yield Option(section, True)
        for keyword in node.keywords:
            with contextlib.suppress(ValueError, TypeError):
                yield Option(f"{section}.{keyword.arg}", ast.literal_eval(keyword.value))


def of_words(words: list[str]) -> list[Option]:
    """Return the options among words: ``--flag value``, ``--flag=value``, ``--flag``, and ``section:choice``."""
    found: list[Option] = []
    for i, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word.partition("=")
            values = [] if equals else list(itertools.takewhile(lambda each: not each.startswith("--"), words[i + 1 :]))
            if name not in _LISTS:
                values = values[:1]
            found.append(Option(name, text if equals else " ".join(values)))
        elif re.fullmatch(r"[a-z_]+:[a-z-]+", word):
            section, _, choice = word.partition(":")
            found.append(Option(section, choice))
    return found


def shell_words(text: str) -> list[str]:
    """Return a script's words, with the values of variables that it sets. A word with another variable keeps its ``$``."""
    tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    variables: dict[str, str] = {}
    found: list[str] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        assigned = _ASSIGNMENT.fullmatch(token)
        if assigned is None:
            found += _expanded(token.strip("()"), variables).split()
        else:
            name, value = assigned[1], assigned[2]
            if value.startswith("("):  # an array
                while not value.rstrip().endswith(")") and at < len(tokens):
                    value, at = f"{value} {tokens[at]}", at + 1
                value = value.strip("() \n")
            before = f"{variables.get(name, '')} " if token[len(name)] == "+" else ""
            variables[name] = before + _expanded(value, variables)
            # a script that sets options and uses them elsewhere: the options count where they are set
            found += _expanded(value, variables).split()
        if len(found) > _MOST_WORDS:
            raise ValueError(f"more than {_MOST_WORDS} words")
    return found


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        # arrays of options were counted where they are set
        known = variables.get(name)
        if known is not None:
            return "" if known.lstrip().startswith("--") else known
        return match[0] if match[3] is None else match[3]

    return _VARIABLE.sub(value, text)
