"""The training recipe (optimizer, scheduler, clipping, seed): checked before a process starts, and written into ``train.py`` as code.

``TrainingRecipe.write`` calls the user's functions with meta tensors for parameters, and writes the objects that they return as code:
classes by import name, the arguments of their constructors, and parameter groups by the parameters' names. Then it imports the folder's
``train.py`` to build optimizer and scheduler again, and restores the former ``train.py`` unless they equal those of the user's functions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from autopar import program as runtime_files
from autopar.errors import UsageError
from autopar.program.importing import resolve
from autopar.program.optimizer_state import described_scheduler
from autopar.program.optimizers import (
    CheckedRecipe,
    RefusedOptimizerError,
    Scheduler,
    checked,
    difference,
    patterns_of,
    same,
    scheduled,
    select,
)
from autopar.program.world import load
from autopar.run.data import import_path
from autopar.run.folder import import_train, optimizer_maker, program_modules

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer | list[torch.optim.Optimizer]]

BEGIN = "# -- the recipe: yours to edit "
END = "# -- the training "
"""The comments around the recipe in ``train.py``."""
_LR = 3e-4
_COMPARED_STEPS = 20
_MOST_ELEMENTS = 64  # in a tensor literal


class _UnwritableError(Exception):
    """Raised if a value can't be written as code; the message names the value."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """How a program trains; the fields are arguments of ``Program``. ``init`` is the path of the initial weights.

    With ``of_folder``, the folder's ``train.py`` builds optimizer and scheduler, and the other fields have its values.
    """

    optimizer: Optimizer | str | None = None
    scheduler: Scheduler | str | None = None
    lr: float | None = _LR  # None: the folder's optimizer sets its own rates
    max_norm: float | None = None
    seed: int = 0
    draw_init: bool = False
    init: str | None = None
    of_folder: bool = False

    def __post_init__(self) -> None:
        # plain numbers: code has no form for those of numpy
        for name, plain in (("lr", float), ("max_norm", float), ("seed", operator.index)):
            value = getattr(self, name)
            try:
                if isinstance(value, bool):
                    raise TypeError
                object.__setattr__(self, name, value if value is None else plain(value))
            except (TypeError, ValueError) as error:
                kind = "whole number" if name == "seed" else "number"
                raise UsageError(f"{name} is {value!r}, which is no {kind}", f"give a {kind}") from error
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise UsageError(f"lr is {self.lr}, but a learning rate must be at least 0", f"{_LR} is the default")
        if self.optimizer is not None and self.lr != _LR:
            raise UsageError(
                f"lr={self.lr} is the learning rate of the default optimizer, and optimizer= makes another one",
                "give the rate there: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)",
            )
        if self.max_norm is not None and not self.max_norm > 0:
            raise UsageError(
                f"max_norm is {self.max_norm}, but the norm for clipping must be above 0",
                "None does not clip gradients",
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``remote.open_trainer``, except the functions and the state."""
        return {"lr": self.lr, "seed": self.seed, "max_norm": self.max_norm, "of_folder": self.of_folder}

    def import_paths(self) -> dict[str, str | None]:
        """Return each function as ``"module:function"`` for worker processes. Raises ``UsageError`` if they couldn't import it."""
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {role: None if f is None else import_path(f, role, "a function") for role, f in functions.items()}

    def check(self, folder: Path) -> None:
        """Raise ``UsageError`` if the optimizer's updates would differ from those on one device, or worker processes couldn't build it."""
        if self.of_folder:
            with program_modules(folder):
                train = import_train(folder)
                world: Any = _CPU  # ``adamw`` reads nothing but the world's device
                self._checked_recipe((optimizer_maker(train, self.lr, world), train.make_scheduler), folder)
        elif self._is_custom:
            self.import_paths()
            functions = self._functions()
            with program_modules(folder):
                self._checked_recipe(functions, folder)

    def check_same_as(self, folder: Path) -> bool:
        """Raise ``UsageError`` if the folder's ``train.py`` has a different recipe; return whether it has one."""
        if not (folder / "train.py").exists():
            return False
        current = section_of(folder)
        if current == section_of(_TEMPLATE) or _REFUSED.search(current):
            return False
        functions = self._functions()
        with program_modules(folder), _recorded_constructors(torch.optim.Optimizer, LRScheduler) as calls:
            try:
                made = self._checked_recipe(functions, folder) if self._is_custom else None
                mine = self._section(made, functions[1], calls)
            except _UnwritableError:
                mine = ""
        if _without_init_lines(mine) != _without_init_lines(current):
            raise UsageError(
                f"{folder / 'train.py'} has a recipe that differs from the optimizer, scheduler, lr, max_norm or seed in the arguments",
                "leave all of them out to train with the folder's recipe; to change it, edit train.py and open the folder again",
            )
        return True

    def write(self, folder: Path) -> None:
        """Write the recipe into the folder's ``train.py``; with ``of_folder`` only where the initial values are.

        Raises ``UsageError`` if a part can't be written as code (the message names it), or if ``check`` would raise.
        """
        train = folder / "train.py"
        before = train.read_text()
        if self.of_folder:
            train.write_text(_with_init_lines(before, self._init_lines(), train))
            return
        functions = self._functions()
        with program_modules(folder), _recorded_constructors(torch.optim.Optimizer, LRScheduler) as calls:
            made = self._checked_recipe(functions, folder) if self._is_custom else None
            try:
                train.write_text(_with_section(before, self._section(made, functions[1], calls), train))
                if made is not None:
                    _check_rebuilt(made, functions[1])
            except _UnwritableError as error:
                train.write_text(before)
                raise UsageError(
                    f"the recipe cannot be written into {train}: {error}",
                    "use classes and functions at the top level of a module other than the script, and plain values; or write the "
                    "recipe into train.py yourself",
                ) from error
            except BaseException:
                train.write_text(before)
                raise

    def refuse(self, folder: Path, why: str) -> None:
        """Make the folder's ``train.py`` exit with ``why``, the reason why it can't have this recipe."""
        train = folder / "train.py"
        lines = ["", f"REFUSED = {why!r}", *self._defaults(), "", *_DEFAULT_OPTIMIZER, "", "make_scheduler = None", ""]
        train.write_text(_with_section(train.read_text(), "\n".join(lines), train))

    @property
    def _is_custom(self) -> bool:
        return self.optimizer is not None or self.scheduler is not None

    def _functions(self) -> tuple[Any, Scheduler | None]:
        """Return the functions; import those given by name. Call outside of ``program_modules``, which may hide the user's modules."""
        lr = _LR if self.lr is None else self.lr
        make = _import_named(self.optimizer, "optimizer") or (lambda params: torch.optim.AdamW(params, lr=lr))
        return make, _import_named(self.scheduler, "scheduler")

    def _checked_recipe(self, functions: tuple[Any, Scheduler | None], folder: Path) -> CheckedRecipe:
        """Call the functions with meta tensors, and check the optimizer. Raises ``UsageError``. Call inside ``program_modules``."""
        program = load(folder)
        try:
            return checked(functions[0], program, functions[1])
        except RefusedOptimizerError as error:
            raise UsageError(error.message, error.hint) from error
        except Exception as error:
            names = " or ".join(f"the {role} {name}" for role, name in self._labels().items())
            names = names or f"make_optimizer or make_scheduler of {folder / 'train.py'}"
            raise UsageError(
                f"{names} raised {type(error).__name__}: {error}",
                "the optimizer's function is called with the model's parameters, on meta: their names, shapes and order, without "
                "values; the scheduler's function is called with the optimizer",
            ) from error

    def _labels(self) -> dict[str, str]:
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {role: _label(function) for role, function in functions.items() if function is not None}

    # -- the text --

    def _defaults(self) -> list[str]:
        lr = None if self.optimizer is not None else self.lr
        return [
            f"LR: float | None = {_CodeWriter().text(lr)}  # if --lr is not given; None: the optimizer has its own",
            f"MAX_NORM: float | None = {_CodeWriter().text(self.max_norm)}  # of the gradients, if --clip is not given; None: no clipping",
            f"SEED = {self.seed!r}  # if --seed is not given",
            *self._init_lines(),
        ]

    def _init_lines(self) -> list[str]:
        """Return the lines that set ``INIT`` and ``DRAW_INIT``: the source of the initial values."""
        return [
            f"INIT: str | None = {self.init!r}  # if --init is not given; None: initial.safetensors",
            f"DRAW_INIT = {self.draw_init!r}  # draw initial values where there are none",
        ]

    def _section(self, made: CheckedRecipe | None, make: Scheduler | None, calls: _Calls) -> str:
        """Return the text of the recipe, to go between the comments ``BEGIN`` and ``END``."""
        writer = _CodeWriter(calls)
        optimizer, scheduler = list(_DEFAULT_OPTIMIZER), ["make_scheduler = None"]
        if self.optimizer is not None:
            assert made is not None
            parts = [writer.optimizer(model, made) for model in made.optimizers]
            body = parts[0] if len(parts) == 1 else _call("", parts, "[]")
            optimizer = [_OPTIMIZER_HEAD, *_indented(f"return {body}")]
        if make is not None:
            assert made is not None
            again = made.again()
            writer.names[id(again)] = "optimizer"
            body = writer.text(scheduled(make, again))
            scheduler = [_SCHEDULER_HEAD, *_indented(f"return {body}")]
        imports = sorted(writer.imports)
        others = [name for name in imports if name.partition(".")[0] not in {"torch", *sys.stdlib_module_names}]
        head = [f"import {name}" for name in imports if name not in others]
        head += [f"import {name}  # beside train.py, in the working folder, or installed" for name in others]
        parts = ["\n".join(head)] if head else []
        parts += [
            'REFUSED = ""  # why there is no recipe\n' + "\n".join(self._defaults()),
            "\n" + "\n".join(optimizer),
            "\n" + "\n".join(scheduler),
        ]
        return "\n" + "\n\n".join(parts) + "\n"


_OPTIMIZER_HEAD = """def make_optimizer(
    parameters: dict[str, nn.Parameter], lr: float, world: World
) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
    \"\"\"The optimizer, or a list of them, over the model's parameters by name.\"\"\""""
_DEFAULT_OPTIMIZER = (_OPTIMIZER_HEAD, "    return adamw(list(parameters.values()), lr, world)")
_SCHEDULER_HEAD = """def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    \"\"\"The schedule of the learning rates, which counts updates.\"\"\""""


def _with_section(text: str, section: str, train: Path) -> str:
    """Replace the recipe in the text of ``train.py``. Raises ``UsageError`` if the comments around it are gone."""
    before, begin, rest = text.partition(BEGIN)
    line, _, rest = rest.partition("\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(
            f"{train} has no lines {BEGIN.strip()!r} and {END.strip()!r}, between which the recipe goes",
            "emit into a new folder, or write the recipe into train.py yourself",
        )
    return f"{before}{begin}{line}\n{section}\n\n{end}{after}"


_TEMPLATE = Path(runtime_files.__file__).parent
"""The folder of the ``train.py`` that is copied into every emitted folder."""
_INIT_LINE = re.compile(r"^(?:INIT|DRAW_INIT)\b.*$", re.MULTILINE)
_REFUSED = re.compile(r"^REFUSED = (?!(?:''|\"\")(?: |$))", re.MULTILINE)
_CPU = SimpleNamespace(device=torch.device("cpu"))


def section_of(folder: Path) -> str:
    """Return the text of the recipe in a folder's ``train.py``, or all of the file if the comments around it are gone."""
    try:
        text = (folder / "train.py").read_text()
    except OSError as error:
        raise UsageError(f"{folder / 'train.py'} cannot be read: {error.strerror}", "emit the program again") from error
    begin, end = text.find(BEGIN), text.find(END)
    return text[text.index("\n", begin) : end].strip() if 0 <= begin < end else text


def _without_init_lines(section: str) -> str:
    return _INIT_LINE.sub("", section).strip()


def _with_init_lines(text: str, lines: list[str], train: Path) -> str:
    """Replace the lines of ``_init_lines`` in the text of ``train.py``. Raises ``UsageError`` if one is missing."""
    for line in lines:
        name = re.match(r"\w+", line)
        assert name is not None
        text, count = re.subn(rf"^{name[0]}\b.*$", line.replace("\\", r"\\"), text, count=1, flags=re.MULTILINE)
        if not count:
            raise UsageError(
                f"{train} has no line that sets {name[0]}", "write it into train.py, or emit into a new folder"
            )
    return text


def recipe_for(folder: Path, given: Mapping[str, Any], draw_init: bool) -> TrainingRecipe:
    """Return the recipe of ``given`` (``optimizer``, ``scheduler``, ``lr``, ``max_norm``, ``seed``), or that of the folder's ``train.py``
    if all of these are ``None``. Either way the source of the initial values is that of the folder.

    Raises ``UsageError`` if the two recipes differ, or if the folder's can't be read.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if not given and section_of(folder) != section_of(_TEMPLATE):
        with program_modules(folder):
            train = import_train(folder)
        draw_init = draw_init or bool(train.DRAW_INIT)
        return TrainingRecipe(None, None, train.LR, train.MAX_NORM, train.SEED, draw_init, train.INIT, of_folder=True)
    recipe = TrainingRecipe(**given, draw_init=draw_init)
    if given and recipe.check_same_as(folder):
        with program_modules(folder):
            train = import_train(folder)
        return replace(recipe, draw_init=draw_init or bool(train.DRAW_INIT), init=train.INIT)
    return recipe


_Calls = Mapping[int, tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""Maps the ``id`` of an object to the object and the arguments of its constructor."""


@contextmanager
def _recorded_constructors(*bases: type) -> Iterator[_Calls]:
    """Record the arguments of the constructors of ``bases`` and their subclasses."""
    calls: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def recording(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def record(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.setdefault(id(self), (self, args, kwargs))
            init(self, *args, **kwargs)

        return record

    classes: set[type] = set()
    waiting: list[Any] = list(bases)
    while waiting:
        cls = waiting.pop()
        classes.add(cls)
        waiting += cls.__subclasses__()
    originals = {cls: vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)}
    try:
        for cls, init in originals.items():
            setattr(cls, "__init__", recording(init))  # noqa: B010
        yield calls
    finally:
        for cls, init in originals.items():
            setattr(cls, "__init__", init)  # noqa: B010


@dataclass
class _CodeWriter:
    """Writes values as code. ``names`` maps the ``id`` of an object to its variable in the code."""

    calls: _Calls = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)

    def text(self, value: Any) -> str:
        """Return the value as code. Raises ``_UnwritableError`` if there is no code for it."""
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, float) and type(value) is float and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or type(value) in (bool, int, float, complex, str) or isinstance(value, torch.dtype):
            return repr(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (list, tuple):
            inner = [self.text(item) for item in value]
            if type(value) is list:
                return _call("", inner, "[]")
            return f"({', '.join(inner)}{',' * (len(inner) == 1)})"
        if type(value) is dict:
            return "{" + ", ".join(f"{self.text(key)}: {self.text(item)}" for key, item in value.items()) + "}"
        if type(value) is functools.partial:
            self.imports.add("functools")
            return _call("functools.partial", [self.imported(value.func), *self._arguments(value.args, value.keywords)])
        if isinstance(value, LRScheduler):
            return self._constructor_call(value)
        if inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value):
            return self.imported(value)
        raise _UnwritableError(f"{_label(value)} is of the type {type(value).__name__}, which is not a plain value")

    def optimizer(self, model: torch.optim.Optimizer, made: CheckedRecipe) -> str:
        """Return the constructor call of an optimizer, as an expression over the variable ``parameters``."""
        if len(model.param_groups) == 1 and not _extra(model.param_groups[0], model):
            names = [made.names[id(parameter)] for parameter in model.param_groups[0]["params"]]
            return self._constructor_call(model, _selection(names, list(made.names.values())))
        groups = [self._group(group, model, made) for group in model.param_groups]
        return self._constructor_call(model, _call("", groups, "[]"))

    def _group(self, group: Mapping[str, Any], model: torch.optim.Optimizer, made: CheckedRecipe) -> str:
        names = [made.names[id(parameter)] for parameter in group["params"]]
        entries = [f"'params': {_selection(names, list(made.names.values()))}"]
        entries += [f"{key!r}: {self.text(value)}" for key, value in _extra(group, model).items()]
        return _call("", entries, "{}")

    def _constructor_call(self, value: Any, first: str = "") -> str:
        """Return the constructor call of an object; ``first`` replaces its first argument."""
        if id(value) not in self.calls:
            raise _UnwritableError(f"the constructor arguments of the {type(value).__name__} are unknown")
        _, positional, kwargs = self.calls[id(value)]
        parameters = list(inspect.signature(type(value)).parameters.values())
        args, named = list(positional), dict(kwargs)
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            named = dict(zip((parameter.name for parameter in parameters), positional, strict=False)) | kwargs
            args = [named.pop(parameters[0].name)]
        texts = [first or self.text(args[0]), *self._arguments(args[1:], named)]
        return _call(self.imported(type(value)), texts)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        return [*map(self.text, args), *(f"{key}={self.text(item)}" for key, item in kwargs.items())]

    def imported(self, value: Any) -> str:
        """Return the dotted name of a class or function. Raises ``_UnwritableError`` if another process couldn't import it."""
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
        for home in ("torch.optim", "torch.optim.lr_scheduler"):
            if getattr(importlib.import_module(home), name, None) is value:
                return f"{home}.{name}"
        top = module.partition(".")[0]
        if module in ("", "__main__") or not name or "<" in name:
            raise _UnwritableError(f"{_label(value)} has no name that another Python can import")
        if top in ("model", "train", "runtime"):
            raise _UnwritableError(f"{_label(value)} is in a module {top}, which the program's folder shadows")
        try:
            resolved = resolve(f"{module}:{name}")
        except (ImportError, AttributeError, AssertionError):
            resolved = None
        if resolved is not value:
            raise _UnwritableError(f"{module}.{name} is not the same object as {_label(value)}")
        if top == "builtins":
            return name
        self.imports.add(module)
        return f"{module}.{name}"

    def _tensor(self, value: Tensor) -> str:
        if value.is_meta or value.requires_grad or value.numel() > _MOST_ELEMENTS:
            raise _UnwritableError(f"a tensor of shape {tuple(value.shape)} is not a plain value")
        return f"torch.tensor({self.text(value.tolist())}, dtype={value.dtype})"


def _extra(group: Mapping[str, Any], model: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of a parameter group that differ from the optimizer's defaults."""
    usual = ("params", "param_names")
    return {
        key: value
        for key, value in group.items()
        if key not in usual and not (key in model.defaults and same(model.defaults[key], value))
    }


def _selection(selected: Sequence[str], every: Sequence[str]) -> str:
    """Return an expression that selects the names ``selected`` from ``every``: all, by patterns in the model's order, or one by one."""
    if list(selected) == list(every):
        return "list(parameters.values())"
    if not any("*" in name for name in every):
        stand_ins, chosen = {name: name for name in every}, set(selected)
        fits = functools.cache(lambda pattern: set(select(stand_ins, pattern)) <= chosen)
        patterns = list(dict.fromkeys(next(filter(fits, patterns_of(name))) for name in selected))
        if select(stand_ins, *patterns) == list(selected):
            return _call("select", ["parameters", *map(repr, patterns)])
    return "[parameters[name] for name in (" + "".join(f"{name!r}, " for name in selected).rstrip() + ")]"


_WIDTH = 110


def _call(name: str, arguments: Sequence[str], brackets: str = "()") -> str:
    """Return the text of a call or literal, with one argument per line if it is long."""
    flat = f"{name}{brackets[0]}{', '.join(arguments)}{brackets[1]}"
    if len(flat) <= _WIDTH and "\n" not in flat:
        return flat
    inner = "".join(f"    {line}\n" for text in arguments for line in f"{text},".splitlines())
    return f"{name}{brackets[0]}\n{inner}{brackets[1]}"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _check_rebuilt(made: CheckedRecipe, schedule: Scheduler | None) -> None:
    """Raise ``_UnwritableError`` if the folder's ``train.py`` builds another optimizer or scheduler. Call inside ``program_modules``."""
    train = importlib.import_module("train")
    if train.LR is None:
        rebuilt: Any = train.make_optimizer(dict(made.stand_ins), 0.0, None)
        optimizers = list(rebuilt) if isinstance(rebuilt, list) else [rebuilt]
        if len(optimizers) != len(made.optimizers):
            raise _UnwritableError(f"{len(optimizers)} optimizers were written, and there are {len(made.optimizers)}")
        for mine, its in zip(made.optimizers, optimizers, strict=True):
            if differs := difference(mine, its):
                raise _UnwritableError(f"{type(mine).__name__} differs from a newly constructed one in its {differs}")
    if schedule is None:
        return
    both = [scheduled(make, made.again()) for make in (schedule, train.make_scheduler)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stepping a scheduler without its optimizer warns
        for _ in range(_COMPARED_STEPS):
            if described_scheduler(both[0]) != described_scheduler(both[1]) or _rates(both[0]) != _rates(both[1]):
                raise _UnwritableError(f"{type(both[0]).__name__} differs from a newly constructed one in its state")
            for each in both:
                each.step()


def _rates(scheduler: LRScheduler) -> list[Any]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]


def _label(value: Any) -> str:
    """Describe an object for messages; a function by its name, file and line."""
    code = getattr(value, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    if isinstance(value, str):
        return value
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}{place}" if name else repr(value)[:80]


def _import_named(function: Callable[..., Any] | str | None, role: str) -> Callable[..., Any] | None:
    """Return ``function``, imported if it is a name. Raises ``UsageError`` if there is none of this name."""
    if not isinstance(function, str):
        return function
    try:
        return resolve(function)
    except (ImportError, AttributeError, AssertionError) as error:
        raise UsageError(f"there is no {role} {function}: {error}", 'name it "module:function"') from error
