"""The recipe of a training: optimizer, scheduler, clipping, seed; checked before a process starts, and written into ``train.py`` as code.

The user's functions are called with stand-ins for the parameters, and what they return is written down: classes by the name that imports
them, the arguments of their constructors, and the groups by the parameters' names. Then the folder's ``train.py`` is imported and makes
both again: they must equal those of the user's functions, or nothing is written.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from autopar import program as runtime_files
from autopar.errors import UsageError
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
from autopar.run.data import importable
from autopar.run.folder import import_train, made_by, program_modules
from autopar.run.worker import resolve

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer | list[torch.optim.Optimizer]]

BEGIN = "# -- the recipe: yours to edit "
END = "# -- the training "
"""The comments around the recipe in ``train.py``."""
_LR = 3e-4
_COMPARED_STEPS = 20
_MOST_ELEMENTS = 64  # of a tensor that is written as code


class _UnwritableError(Exception):
    """A value that has no form as code; the message names it."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """How a program trains; ``autopar.Program`` says what the fields mean. ``init`` is a path of weights to start from.

    Where ``of_folder``, the folder's ``train.py`` makes the optimizer and the scheduler, and the numbers are read from it.
    """

    optimizer: Optimizer | str | None = None
    scheduler: Scheduler | str | None = None
    lr: float | None = _LR  # None: the folder's optimizer has rates of its own
    max_norm: float | None = None
    seed: int = 0
    draw_init: bool = False
    init: str | None = None
    of_folder: bool = False

    def __post_init__(self) -> None:
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
        """The numbers, as ``remote.open_trainer`` takes them."""
        return {"lr": self.lr, "seed": self.seed, "max_norm": self.max_norm, "of_folder": self.of_folder}

    def makers(self) -> dict[str, str | None]:
        """The functions by the names under which worker processes import them. Raises ``UsageError`` where they could not."""
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {role: None if f is None else importable(f, role, "a function") for role, f in functions.items()}

    def check(self, folder: Path) -> None:
        """Raise ``UsageError`` where the optimizer would not train as on one device, or worker processes could not make it."""
        if self.of_folder:
            with program_modules(folder):
                train = import_train(folder)
                world: Any = _CPU  # what ``adamw`` reads of it
                self._made((made_by(train, self.lr, world), train.make_scheduler), folder)
        elif self._is_the_users:
            self.makers()
            given = self._resolved()
            with program_modules(folder):
                self._made(given, folder)

    def agree(self, folder: Path) -> None:
        """Raise ``UsageError`` where the folder's ``train.py`` has another recipe."""
        if not (folder / "train.py").exists():
            return
        own = section_of(folder)
        if own == section_of(_TEMPLATE) or _REFUSED.search(own):
            return
        given = self._resolved()
        with program_modules(folder), _recorded(torch.optim.Optimizer, LRScheduler) as calls:
            try:
                made = self._made(given, folder) if self._is_the_users else None
                mine = self._section(made, given[1], calls)
            except _UnwritableError:
                mine = ""
        if _without_start(mine) != _without_start(own):
            raise UsageError(
                f"{folder / 'train.py'} has a recipe, and the optimizer, scheduler, lr, max_norm or seed that were given are not the same",
                "leave all of them out to train with the folder's recipe; to change it, edit train.py and open the folder again",
            )

    def write(self, folder: Path) -> None:
        """Write the recipe into the folder's ``train.py``.

        Raises:
            UsageError: a part of it cannot be written as code, with its name; or it is refused as by ``check``.
        """
        train = folder / "train.py"
        before = train.read_text()
        if self.of_folder:
            train.write_text(_with_start(before, self._start(), train))
            return
        given = self._resolved()
        with program_modules(folder), _recorded(torch.optim.Optimizer, LRScheduler) as calls:
            made = self._made(given, folder) if self._is_the_users else None
            try:
                train.write_text(_with_section(before, self._section(made, given[1], calls), train))
                if made is not None:
                    _compare(made, given[1])
            except _UnwritableError as error:
                train.write_text(before)
                raise UsageError(
                    f"the recipe cannot be written into {train}: {error}",
                    "take classes and functions at the top of a module that is not the script itself, and plain values; or write the "
                    "recipe into train.py yourself",
                ) from error
            except BaseException:
                train.write_text(before)
                raise

    def refuse(self, folder: Path, why: str) -> None:
        """Have the folder's ``train.py`` end with the reason why it does not have this recipe."""
        train = folder / "train.py"
        lines = ["", f"REFUSED = {why!r}", *self._numbers(), "", *_DEFAULT_OPTIMIZER, "", "make_scheduler = None", ""]
        train.write_text(_with_section(train.read_text(), "\n".join(lines), train))

    @property
    def _is_the_users(self) -> bool:
        return self.optimizer is not None or self.scheduler is not None

    def _resolved(self) -> tuple[Any, Scheduler | None]:
        """The functions. Call outside of ``program_modules``, where the user's modules may be hidden."""
        lr = _LR if self.lr is None else self.lr
        make = _resolved(self.optimizer, "optimizer") or (lambda params: torch.optim.AdamW(params, lr=lr))
        return make, _resolved(self.scheduler, "scheduler")

    def _made(self, given: tuple[Any, Scheduler | None], folder: Path) -> CheckedRecipe:
        """What the user's functions make of stand-ins. Call inside ``program_modules``."""
        program = load(folder)
        try:
            return checked(given[0], program, given[1])
        except RefusedOptimizerError as error:
            raise UsageError(error.message, error.hint) from error
        except Exception as error:
            names = " or ".join(f"the {role} {name}" for role, name in self._shown().items())
            names = names or f"make_optimizer or make_scheduler of {folder / 'train.py'}"
            raise UsageError(
                f"{names} raised {type(error).__name__}: {error}",
                "the optimizer's function is called with the model's parameters, on meta: their names, shapes and order, without "
                "values; the scheduler's function is called with the optimizer",
            ) from error

    def _shown(self) -> dict[str, str]:
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {role: _shown(function) for role, function in functions.items() if function is not None}

    # -- the text --

    def _numbers(self) -> list[str]:
        lr = None if self.optimizer is not None else self.lr
        return [
            f"LR: float | None = {_CodeWriter().text(lr)}  # where --lr gives none; None: the optimizer has its own",
            f"MAX_NORM: float | None = {_CodeWriter().text(self.max_norm)}  # of the gradients, where --clip gives none; None: no clipping",
            f"SEED = {self.seed!r}  # where --seed gives none",
            *self._start(),
        ]

    def _start(self) -> list[str]:
        """The lines that say which values the training starts from."""
        return [
            f"INIT: str | None = {self.init!r}  # where --init gives none; None: initial.safetensors",
            f"DRAW_INIT = {self.draw_init!r}  # draw initial values where there are none",
        ]

    def _section(self, made: CheckedRecipe | None, make: Scheduler | None, calls: _Calls) -> str:
        """The text between the comments."""
        writer = _CodeWriter(calls)
        optimizer, scheduler = list(_DEFAULT_OPTIMIZER), ["make_scheduler = None"]
        if self.optimizer is not None:
            assert made is not None
            parts = [writer.optimizer(model, made) for model in made.models]
            body = parts[0] if len(parts) == 1 else _call("", parts, "[]")
            optimizer = [_OPTIMIZER_HEAD, *_indented(f"return {body}")]
        if make is not None:
            assert made is not None
            again = made.again()
            writer.names[id(again)] = "optimizer"
            body = writer.text(scheduled(make, again))
            scheduler = [_SCHEDULER_HEAD, *_indented(f"return {body}")]
        imports = sorted(writer.imports)
        own = [name for name in imports if name.partition(".")[0] not in {"torch", *sys.stdlib_module_names}]
        head = [f"import {name}" for name in imports if name not in own]
        head += [f"import {name}  # beside train.py, in the working folder, or installed" for name in own]
        parts = ["\n".join(head)] if head else []
        parts += [
            'REFUSED = ""  # why there is no recipe\n' + "\n".join(self._numbers()),
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
    """The text of ``train.py`` with another recipe. Raises ``UsageError`` where it has none."""
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
"""The folder of ``train.py`` with the recipe that every folder is emitted with."""
_START = re.compile(r"^(?:INIT|DRAW_INIT)\b.*$", re.MULTILINE)
_REFUSED = re.compile(r"^REFUSED = (?!(?:''|\"\")(?: |$))", re.MULTILINE)
_CPU = SimpleNamespace(device=torch.device("cpu"))


def section_of(folder: Path) -> str:
    """The text of the recipe in a folder's ``train.py``: all of the file where the comments around it are gone."""
    try:
        text = (folder / "train.py").read_text()
    except OSError as error:
        raise UsageError(f"{folder / 'train.py'} cannot be read: {error.strerror}", "emit the program again") from error
    begin, end = text.find(BEGIN), text.find(END)
    return text[text.index("\n", begin) : end].strip() if 0 <= begin < end else text


def _without_start(section: str) -> str:
    return _START.sub("", section).strip()


def _with_start(text: str, lines: list[str], train: Path) -> str:
    """The text of ``train.py`` with other lines of ``_start``. Raises ``UsageError`` where it has none."""
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
    """The recipe of a program: ``given`` (``optimizer``, ``scheduler``, ``lr``, ``max_norm``, ``seed``), or that of the folder's
    ``train.py`` where all of these are ``None``.

    Raises ``UsageError`` where both have one and they differ, or that of the folder cannot be read.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if not given and section_of(folder) != section_of(_TEMPLATE):
        with program_modules(folder):
            train = import_train(folder)
        draw_init = draw_init or bool(train.DRAW_INIT)
        return TrainingRecipe(None, None, train.LR, train.MAX_NORM, train.SEED, draw_init, train.INIT, of_folder=True)
    recipe = TrainingRecipe(**given, draw_init=draw_init)
    if given:
        recipe.agree(folder)
    return recipe


_Calls = Mapping[int, tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""By the ``id`` of an object: the object, and the arguments of its constructor."""


@contextmanager
def _recorded(*bases: type) -> Iterator[_Calls]:
    """A context in which the arguments of constructors are noted: of ``bases`` and all classes that are derived from them."""
    calls: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def noting(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def note(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.setdefault(id(self), (self, args, kwargs))
            init(self, *args, **kwargs)

        return note

    classes: set[type] = set()
    waiting: list[Any] = list(bases)
    while waiting:
        found = waiting.pop()
        classes.add(found)
        waiting += found.__subclasses__()
    own = {cls: vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)}
    try:
        for cls, init in own.items():
            setattr(cls, "__init__", noting(init))  # noqa: B010
        yield calls
    finally:
        for cls, init in own.items():
            setattr(cls, "__init__", init)  # noqa: B010


@dataclass
class _CodeWriter:
    """Values as code. ``names`` are those of objects that the code has a variable for."""

    calls: _Calls = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)

    def text(self, value: Any) -> str:
        """Raises ``_UnwritableError``."""
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, float) and type(value) is float and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or type(value) in (bool, int, float, complex, str):
            return repr(value)
        if isinstance(value, torch.dtype):
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
            return self._made(value)
        if inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value):
            return self.imported(value)
        raise _UnwritableError(f"{_shown(value)} is of the type {type(value).__name__}, which is no plain value")

    def optimizer(self, model: torch.optim.Optimizer, made: CheckedRecipe) -> str:
        """The construction of an optimizer over ``parameters``."""
        if len(model.param_groups) == 1 and not _extra(model.param_groups[0], model):
            own = [made.names[id(parameter)] for parameter in model.param_groups[0]["params"]]
            return self._made(model, _selection(own, list(made.names.values())))
        groups = [self._group(group, model, made) for group in model.param_groups]
        return self._made(model, _call("", groups, "[]"))

    def _group(self, group: Mapping[str, Any], model: torch.optim.Optimizer, made: CheckedRecipe) -> str:
        own = [made.names[id(parameter)] for parameter in group["params"]]
        entries = [f"'params': {_selection(own, list(made.names.values()))}"]
        entries += [f"{key!r}: {self.text(value)}" for key, value in _extra(group, model).items()]
        return _call("", entries, "{}")

    def _made(self, value: Any, first: str = "") -> str:
        """The call that made an object; ``first`` stands for its first argument."""
        if id(value) not in self.calls:
            raise _UnwritableError(f"nothing says how the {type(value).__name__} was made")
        _, given, kwargs = self.calls[id(value)]
        parameters = list(inspect.signature(type(value)).parameters.values())
        args, named = list(given), dict(kwargs)
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            named = dict(zip((parameter.name for parameter in parameters), given, strict=False)) | kwargs
            args = [named.pop(parameters[0].name)]
        texts = [first or self.text(args[0]), *self._arguments(args[1:], named)]
        return _call(self.imported(type(value)), texts)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        return [*map(self.text, args), *(f"{key}={self.text(item)}" for key, item in kwargs.items())]

    def imported(self, value: Any) -> str:
        """The dotted name of a class or a function. Raises ``_UnwritableError`` where another Python could not import it."""
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
        for home in ("torch.optim", "torch.optim.lr_scheduler"):
            if getattr(importlib.import_module(home), name, None) is value:
                return f"{home}.{name}"
        top = module.partition(".")[0]
        if module in ("", "__main__") or not name or "<" in name:
            raise _UnwritableError(f"{_shown(value)} has no name that another Python can import")
        if top in ("model", "train", "runtime"):
            raise _UnwritableError(f"{_shown(value)} is of a module {top}, and the program's folder has its own {top}")
        try:
            found = resolve(f"{module}:{name}")
        except (ImportError, AttributeError, AssertionError):
            found = None
        if found is not value:
            raise _UnwritableError(f"{module}.{name} is another object than {_shown(value)}")
        if top == "builtins":
            return name
        self.imports.add(module)
        return f"{module}.{name}"

    def _tensor(self, value: Tensor) -> str:
        if value.is_meta or value.requires_grad or value.numel() > _MOST_ELEMENTS:
            raise _UnwritableError(f"a tensor of shape {tuple(value.shape)} is no plain value")
        return f"torch.tensor({self.text(value.tolist())}, dtype={value.dtype})"


def _extra(group: Mapping[str, Any], model: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of a group that are not the optimizer's defaults."""
    usual = ("params", "param_names")
    return {
        key: value
        for key, value in group.items()
        if key not in usual and not (key in model.defaults and same(model.defaults[key], value))
    }


def _selection(own: Sequence[str], every: Sequence[str]) -> str:
    """An expression for the parameters ``own`` of ``every``: all, by patterns in the model's order, or by name."""
    if list(own) == list(every):
        return "list(parameters.values())"
    if not any("*" in name for name in every):
        stand_ins, chosen = {name: name for name in every}, set(own)
        fits = functools.cache(lambda pattern: set(select(stand_ins, pattern)) <= chosen)
        patterns = list(dict.fromkeys(next(filter(fits, patterns_of(name))) for name in own))
        if select(stand_ins, *patterns) == list(own):
            return _call("select", ["parameters", *map(repr, patterns)])
    return "[parameters[name] for name in (" + "".join(f"{name!r}, " for name in own).rstrip() + ")]"


_WIDTH = 110


def _call(name: str, arguments: Sequence[str], brackets: str = "()") -> str:
    """A call, on lines of its own where it is long."""
    flat = f"{name}{brackets[0]}{', '.join(arguments)}{brackets[1]}"
    if len(flat) <= _WIDTH and "\n" not in flat:
        return flat
    inner = "".join(f"    {line}\n" for text in arguments for line in f"{text},".splitlines())
    return f"{name}{brackets[0]}\n{inner}{brackets[1]}"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _compare(made: CheckedRecipe, schedule: Scheduler | None) -> None:
    """Raise ``_UnwritableError`` where the folder's ``train.py`` makes another optimizer or scheduler. Call inside ``program_modules``."""
    train = importlib.import_module("train")
    if train.LR is None:
        found: Any = train.make_optimizer(dict(made.stand_ins), 0.0, None)
        own = list(found) if isinstance(found, list) else [found]
        if len(own) != len(made.models):
            raise _UnwritableError(f"{len(own)} optimizers were written, and there are {len(made.models)}")
        for mine, its in zip(made.models, own, strict=True):
            if differs := difference(mine, its):
                raise _UnwritableError(f"{type(mine).__name__}, made by its constructor alone, has another {differs}")
    if schedule is None:
        return
    both = [scheduled(make, made.again()) for make in (schedule, train.make_scheduler)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedulers are stepped without their optimizers
        for _ in range(_COMPARED_STEPS):
            if described_scheduler(both[0]) != described_scheduler(both[1]) or _rates(both[0]) != _rates(both[1]):
                raise _UnwritableError(f"{type(both[0]).__name__}, made by its constructor alone, has another state")
            for each in both:
                each.step()


def _rates(scheduler: LRScheduler) -> list[Any]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]


def _shown(value: Any) -> str:
    """An object, for people: a function with its place."""
    code = getattr(value, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    if isinstance(value, str):
        return value
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}{place}" if name else repr(value)[:80]


def _resolved(function: Callable[..., Any] | str | None, role: str) -> Callable[..., Any] | None:
    """The function itself. Raises ``UsageError`` where its name is of nothing."""
    if not isinstance(function, str):
        return function
    try:
        return resolve(function)
    except (ImportError, AttributeError, AssertionError) as error:
        raise UsageError(f"there is no {role} {function}: {error}", 'name it "module:function"') from error
