"""Loads the model that MODEL names: a factory in a file or package, a transformers configuration or saved model, or a zoo model."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar import zoo
from autopar.cli.options import check_file
from autopar.data_files import MalformedFileError, read_json
from autopar.errors import AutoparError, BatchError, ModelError
from autopar.precision import normalise
from autopar.program.importing import import_file
from autopar.workload import FewBlocks, Workload
from autopar.zoo.hf import batch_for, build_config

_RETURNS = "a factory returns a torch.nn.Module, or (module, batch), or (module, batch, loss_fn)"


MOST = 2**24
"""Maximum sequence length in tokens, and global batch in rows. The longest published context is 10 million tokens (Llama 4 Scout)."""


@dataclass(frozen=True)
class SizeOptions:
    """The sizes and the precision that the command line gives, or ``None``. Raises ``BatchError`` for a size below 1 or above ``MOST``."""

    seq: int | None = None
    global_batch: int | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        for option, value in (("--seq", self.seq), ("--global-batch", self.global_batch)):
            if value is not None and not 1 <= value <= MOST:
                limit = "at least 1" if value < 1 else f"at most {MOST:,}"
                raise BatchError(
                    f"{option} is {value:,}, it must be {limit}", f"leave {option} out for the model's own"
                )


def load_model(
    model: str,
    sizes: SizeOptions,
    *,
    device: str = "meta",
    default_precision: str = "bfloat16",
    few_blocks: bool = False,
) -> Workload:
    """Load the model that ``model`` names, with its batch.

    Configurations and zoo models are built on ``device`` in ``sizes.precision`` or the default. A factory chooses its device, and gets
    those ``sizes`` that it has parameters for. If it returns a batch, it must have parameters for ``seq`` and ``global_batch`` unless
    these are ``None``. With ``few_blocks`` a zoo model of equal blocks has few of them, and its workload says so.

    Raises:
        ModelError: no model has that name, or the user's code raised (with the file and line).
        BatchError: the model doesn't support the sizes, or a factory returns no batch for a module that isn't of transformers.
    """
    precision = default_precision if sizes.precision is None else normalise(sizes.precision)
    if ":" in model:
        return _from_factory(model, sizes if sizes.precision is None else replace(sizes, precision=precision), device)
    if names_code(model):
        check_factory(model)
    if (file := config_file(model)) is not None:
        module, batch = build_config(read_config(file), sizes.seq, sizes.global_batch, precision, device)
        return Workload(module, batch, name=Path(model).name if is_pretrained(model) else file.stem)
    few = zoo.few_blocks(model) if few_blocks else None
    module, batch = zoo.build(few[0] if few else model, sizes.seq, sizes.global_batch, precision, device)
    full = partial(load_model, model, sizes, device=device, default_precision=default_precision)
    return Workload(module, batch, name=model, few_blocks=few and FewBlocks(few[1], few[2], full))


def check_factory(model: str) -> None:
    """Raise ``ModelError`` if MODEL names a Python file that doesn't exist, or one without a factory."""
    check_file(model)
    if model.endswith(".py"):
        raise ModelError(f"{model} names a file but no factory in it", _factory_hint(Path(model), model))


def names_code(model: str) -> bool:
    """Return whether MODEL is a factory, so that loading it runs the user's code."""
    return ":" in model or model.endswith(".py")


def is_pretrained(model: str) -> bool:
    """Return whether MODEL is a folder saved by transformers, with a ``config.json``."""
    return Path(model, "config.json").is_file()


def config_file(model: str) -> Path | None:
    """Return the configuration file if MODEL is one or a folder with one, else ``None``."""
    if is_pretrained(model):
        return Path(model, "config.json")
    return Path(model) if model.endswith(".json") or Path(model).is_file() else None


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, or raise ``ModelError``."""
    try:
        config = read_json(path)
    except (OSError, MalformedFileError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is no configuration: {error}"
        raise ModelError(f"{path} {why}", "give a transformers config.json") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object", "give a transformers config.json")
    if "stages" in config and "mesh" in config:
        raise ModelError(
            f"{path} is a plan, not the configuration of a model",
            f"`autopar price`, emit, run and verify take it as --plan {path}, without MODEL",
        )
    return config


def call_factory(model: str, sizes: SizeOptions) -> tuple[Any, dict[str, int | str]]:
    """Call the factory ``model`` with those ``sizes`` that it has parameters for; return its result and these arguments.

    Raises ``ModelError`` if there is no such factory, or the user's code raised.
    """
    source, _, factory = model.rpartition(":")
    check_file(model)
    module = _guarded(source, import_file if source.endswith(".py") else _import_package, source)
    function = getattr(module, factory, None)
    if not callable(function):
        hint = _factory_hint(Path(module.__file__), source, factory) if getattr(module, "__file__", None) else _RETURNS
        if hasattr(module, factory):
            raise ModelError(f"{factory} of {source} is of type {type(function).__name__}, not a function", hint)
        raise ModelError(f"{source} has no function {factory!r}", hint)
    arguments = _arguments(function, sizes)
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and name not in arguments
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if required:
        raise ModelError(
            f"{model} requires the argument {required[0]}, and autopar has no value for it",
            "give it a default: autopar passes only seq, global_batch and precision, as options of the command set them",
        )
    return _guarded(model, function, **arguments), arguments


def _from_factory(model: str, sizes: SizeOptions, device: str) -> Workload:
    result, arguments = call_factory(model, sizes)
    workload = _unpack(model, result)
    if workload.batch is None:
        return replace(workload, batch=batch_of(model, workload.model, sizes, device))
    given = {name: getattr(sizes, name) for name in ("seq", "global_batch")}
    wanted = {name: size for name, size in given.items() if size is not None and name not in arguments}
    if wanted:
        rows, tokens = workload.batch_sizes()
        for name, fixed in (("seq", tokens // rows), ("global_batch", rows)):
            if wanted.get(name, fixed) != fixed:
                raise BatchError(
                    f"{model} returns a batch of {rows:,} x {tokens // rows:,} tokens, and {name} is to be {wanted[name]:,}",
                    f"give the factory a parameter {name}: def {model.rpartition(':')[2]}({name}={fixed})",
                )
    return workload


def _import_package(source: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # like python -m MODULE
    return importlib.import_module(source)


def _guarded(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, which is the user's code, and convert its exceptions to ``ModelError`` with file and line."""
    try:
        return function(*args, **kwargs)
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and what.split(".")[0] == error.name.split(".")[0]:
            raise ModelError(
                f"there is no Python module {error.name!r}",
                "autopar looks for it in this folder and in the environment",
            ) from error
        if isinstance(error, SyntaxError):
            raise ModelError(
                f"{error.filename}:{error.lineno}: {error.msg}",
                "this is a syntax error in the model's file",
            ) from error
        ours = str(Path(__file__).resolve())
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename != ours and "importlib" not in f.filename
        ]
        library = [f for f in frames if "site-packages" in f.filename]
        users = [f for f in frames if f not in library] or frames
        where = f"{users[-1].filename}:{users[-1].lineno}: " if users else ""
        raise ModelError(
            f"{where}{what} raised {type(error).__name__}: {error}",
            "this error is in the model's code: run it without autopar first",
        ) from error


def _arguments(function: Callable[..., Any], sizes: SizeOptions) -> dict[str, Any]:
    """Return those ``sizes`` that the factory has parameters for, by name, without ``None``."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    given = {"seq": sizes.seq, "global_batch": sizes.global_batch, "precision": sizes.precision}
    return {k: v for k, v in given.items() if v is not None and (takes_any or k in parameters)}


def _unpack(model: str, result: Any) -> Workload:
    module, batch, loss_fn = result, None, None
    if isinstance(result, (tuple, list)):
        if len(result) not in (2, 3):
            raise ModelError(f"{model} returned {len(result)} values", _RETURNS)
        module, batch, *rest = result
        loss_fn = rest[0] if rest else None
    if not isinstance(module, nn.Module):
        what = (
            f"returned {type(module).__name__}"
            if module is result
            else f"returned {type(module).__name__} as its first value"
        )
        raise ModelError(f"{model} {what}, not a torch.nn.Module", _RETURNS)
    if loss_fn is not None and not callable(loss_fn):
        raise ModelError(f"{model} returned {type(loss_fn).__name__} as its loss_fn, not a function", _RETURNS)
    return Workload(module, batch, loss_fn, _title(model, module))


_GENERIC_NAMES = ("model", "net", "network", "module", "factory", "main", "build", "make", "get", "create", "load")


def _title(model: str, module: nn.Module) -> str:
    """Return the name: the factory's unless its words are all in ``_GENERIC_NAMES``, else the class's unless torch's, else the module's."""
    source, _, factory = model.rpartition(":")
    if any(part and part not in _GENERIC_NAMES for part in factory.split("_")):
        return factory
    if not type(module).__module__.startswith("torch."):
        return type(module).__name__
    return Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]


def batch_of(model: str, module: nn.Module, sizes: SizeOptions, device: str) -> Any:
    """Return a batch for a transformers model, made from its configuration. Raises ``BatchError`` for other modules."""
    config = getattr(module, "config", None)
    if not hasattr(config, "model_type"):
        raise BatchError(
            f"{model} returned a module without a batch, and {type(module).__name__} is not a transformers model",
            "return (module, batch), where batch is an example of one global batch: a tuple for positional arguments, "
            "a dict for keyword arguments",
        )
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    return batch_for(type(module).__name__, config, sizes.seq, sizes.global_batch, dtype, device)


def _factory_hint(path: Path, source: str, wanted: str = "") -> str:
    """Return a hint that names functions of a file, those similar to ``wanted`` first. The file is parsed, not run."""
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return _RETURNS
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    if not wanted:  # a factory can be called without arguments
        functions.sort(key=lambda node: len(node.args.args) - len(node.args.defaults))
    names = [node.name for node in functions]
    names.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted, name).ratio() if wanted else 0.0)
    return f"did you mean {' or '.join(f'{source}:{name}' for name in names[:3])}?" if names else _RETURNS
