"""Tensors that forward keeps outside of its model: found, refused where a later call reads them, and never fake ones afterwards."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from capture_faults import ROWS, WIDTH, Small
from torch import Tensor, nn

import autopar
from autopar.capture import NOT_COMPARED, capture, check_capture
from autopar.capture import check as check_module
from autopar.capture.external_state import ExternalState
from autopar.capture.state import changes, state
from autopar.errors import CaptureError
from autopar.torch_private import is_fake
from autopar.verify.subject import make_subject

CACHE: dict[Any, Any] = {}
SEEN: list[Tensor] = []
LAST: Tensor | None = None
CALLS = 0
HELD = SimpleNamespace(value=None)
LOCAL = threading.local()
STATE = torch.zeros(WIDTH)


@pytest.fixture(autouse=True)
def without_state() -> Iterator[None]:
    yield
    global LAST, CALLS
    LAST, CALLS = None, 0
    (
        CACHE.clear(),
        SEEN.clear(),
        table.cache_clear(),
        vars(helper).clear(),
        InDefault.middle.__defaults__[0].clear(),
        STATE.zero_(),
    )
    InClass.previous = HELD.value = SLOTTED.last = None
    vars(LOCAL).clear()


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def checked(model: nn.Module) -> str:
    return check_capture(capture(model, rows()), model, rows(), None).note


# -- what a later call reads -------------------------------------------------------------------------------------------


class InDict(Small):
    def middle(self, x: Tensor) -> Tensor:
        found = x + CACHE["last"] if "last" in CACHE else x
        CACHE["last"] = x.detach().mean(0)
        return found


class InGlobal(Small):
    def middle(self, x: Tensor) -> Tensor:
        global LAST
        found = x + LAST if LAST is not None else x
        LAST = x.detach().mean(0)
        return found


class InClass(Small):
    previous: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        found = x + InClass.previous if InClass.previous is not None else x
        InClass.previous = x.detach().mean(0)
        return found


class InDefault(Small):
    def middle(self, x: Tensor, kept: list[Tensor] = []) -> Tensor:  # noqa: B006  the default that is kept is what is tested
        found = x + kept[-1] if kept else x
        kept.append(x.detach().mean(0))
        return found


def in_closure() -> nn.Module:
    last = None

    class InClosure(Small):
        def middle(self, x: Tensor) -> Tensor:
            nonlocal last
            found = x + last if last is not None else x
            last = x.detach().mean(0)
            return found

    return InClosure()


class InObject(Small):
    def middle(self, x: Tensor) -> Tensor:
        found = x + HELD.value if HELD.value is not None else x
        HELD.value = x.detach().mean(0)
        return found


class InThread(Small):
    def middle(self, x: Tensor) -> Tensor:
        found = x + LOCAL.last if hasattr(LOCAL, "last") else x
        LOCAL.last = x.detach().mean(0)
        return found


@dataclasses.dataclass(slots=True)
class Slotted:
    last: Tensor | None = None


SLOTTED = Slotted()


class InSlot(Small):
    def middle(self, x: Tensor) -> Tensor:
        found = x + SLOTTED.last if SLOTTED.last is not None else x
        SLOTTED.last = x.detach().mean(0)
        return found


@dataclasses.dataclass(slots=True)
class Holder:
    tensor: Tensor


class InsideObject(Small):
    """The object that holds the tensor is new in every call."""

    def middle(self, x: Tensor) -> Tensor:
        found = x + CACHE["last"].tensor if "last" in CACHE else x
        CACHE["last"] = Holder(x.detach().mean(0))
        return found


def helper() -> None: ...


class InFunction(Small):
    def middle(self, x: Tensor) -> Tensor:
        found = x + helper.last if hasattr(helper, "last") else x
        helper.last = x.detach().mean(0)  # type: ignore[attr-defined]
        return found


class Stale(Small):
    """Computed from a parameter once: the update does not reach it."""

    def middle(self, x: Tensor) -> Tensor:
        if "weight" not in CACHE:
            CACHE["weight"] = self.last.weight.detach().square()
        return x * CACHE["weight"]


CARRIED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "global": (InGlobal, f"{__name__}.LAST"),
    "container": (InDict, f"{__name__}.CACHE.last"),
    "class": (InClass, "InClass.previous"),
    "default argument": (InDefault, "InDefault.middle(kept=)["),
    "closure": (in_closure, "InClosure.middle: last"),
    "object": (InObject, f"{__name__}.HELD.value"),
    "thread": (InThread, f"{__name__}.LOCAL.last"),
    "slot": (InSlot, f"{__name__}.SLOTTED.last"),
    "in an object": (InsideObject, f"{__name__}.CACHE.last"),
    "function": (InFunction, f"{__name__}.helper.last"),
    "of a parameter": (Stale, f"{__name__}.CACHE.weight"),
}


@pytest.mark.parametrize("called", [False, True], ids=["", "called before"])
@pytest.mark.parametrize("name", CARRIED)
def test_state_for_the_next_call_is_refused_by_name(name: str, called: bool) -> None:
    make, place = CARRIED[name]
    model = make()
    if called:
        model(rows())
    if called and name == "of a parameter":  # to the model a constant, like any other tensor in a global
        assert "equals the model over two steps" in checked(model)
        return
    before = model(rows()) if called else None
    with pytest.raises(CaptureError, match="forward leaves state for its next call in") as raised:
        checked(model)
    assert place in raised.value.message and "register_buffer" in str(raised.value.hint)
    assert fakes(model) == []
    assert torch.isfinite(model(rows())) and (before is None or model(rows()).dtype == before.dtype)


def test_the_state_is_what_it_was() -> None:
    InDict()(rows())
    before = CACHE["last"]
    with pytest.raises(CaptureError):
        checked(InDict())
    assert CACHE["last"] is before and list(CACHE) == ["last"]
    with pytest.raises(CaptureError):
        checked(InGlobal())
    assert LAST is None


def test_without_a_comparison_it_is_refused_or_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(InDict(), rows())
    assert [sentence for sentence, _ in graph.assumed] == [
        f"forward leaves state for its next call in {__name__}.CACHE.last"
    ]
    with (
        monkeypatch.context() as patch,
        pytest.raises(CaptureError, match="the graph cannot be compared with the model"),
    ):
        patch.setattr(check_module, "MAX_FLOPS", 100)
        check_capture(graph, InDict(), rows(), None)
    plan = autopar.compile(InDict(), 1, rows(), capture_check=False, type_check=False).plan
    assert any(note.startswith(NOT_COMPARED) and "CACHE.last" in note for note in plan.notes)


HELPER = """
KEPT = {}
def mixed(x):
    found = x + KEPT["last"] if "last" in KEPT else x
    KEPT["last"] = x.detach().mean(0)
    return found
"""


@pytest.mark.parametrize("how", ["module", "function"])
def test_state_of_another_module_is_found_through_what_the_code_refers_to(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept_elsewhere.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    found: Any = importlib.import_module("kept_elsewhere")
    monkeypatch.setitem(globals(), "ELSEWHERE", found if how == "module" else found.mixed)

    class Elsewhere(Small):
        def middle(self, x: Tensor) -> Tensor:
            mixed: Any = globals()["ELSEWHERE"]
            return mixed.mixed(x) if how == "module" else mixed(x)

    with pytest.raises(CaptureError, match="for its next call in kept_elsewhere.KEPT.last"):
        checked(Elsewhere())
    assert found.KEPT == {}
    del sys.modules["kept_elsewhere"]


class Count(Small):
    def middle(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x * CALLS


def test_a_number_that_the_next_call_reads_is_refused() -> None:
    with pytest.raises(CaptureError, match=rf"reads it in its next call: {__name__}.CALLS \(\d, then \d\)"):
        checked(Count())


class InNestedList(Small):
    """The list is inside a subclass of dict: the state before forward must have its own copy."""

    def __init__(self) -> None:
        super().__init__()
        self.log = defaultdict(list, calls=[])

    def middle(self, x: Tensor) -> Tensor:
        self.log["calls"].append(1)
        return x * len(self.log["calls"])


class Deleted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.fresh = True

    def middle(self, x: Tensor) -> Tensor:
        if hasattr(self, "fresh"):
            del self.fresh
            return 2 * x
        return x


def test_a_changed_list_inside_a_defaultdict_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"reads it in its next call: log \(defaultdict"):
        capture(InNestedList(), rows())


def test_a_deleted_attribute_that_the_next_call_misses_is_refused() -> None:
    model = Deleted()
    before = state(model)
    _ = model(rows())
    assert changes(before, state(model)) == {"fresh": (True, None)}
    with pytest.raises(CaptureError, match=r"leaves state for its next call in fresh, .* in step 2"):
        checked(Deleted())


class CountedAroundNan(Small):
    """A constant with NaN, and a counter that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tensor([float("nan"), 1.0]).nan_to_num().sum()


def test_a_constant_with_nan_is_the_same_in_every_graph() -> None:
    assert "equals the model over two steps" in checked(CountedAroundNan())


class WritesGlobal(Small):
    def middle(self, x: Tensor) -> Tensor:
        STATE.mul_(0.9).add_(x.detach().mean(0))
        return x + STATE


def test_a_tensor_in_a_global_that_is_written_in_place_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes to a tensor that is neither made in forward nor a buffer"):
        checked(WritesGlobal())
    assert not is_fake(STATE) and not STATE.any()


# -- what no later call needs ------------------------------------------------------------------------------------------


class Table(Small):
    """A table that is computed once, with a flag that says so."""

    def middle(self, x: Tensor) -> Tensor:
        if not CACHE.get("ready"):
            CACHE["table"], CACHE["ready"] = torch.arange(WIDTH).float().cos(), True
        return x * CACHE["table"].to(x.dtype)


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size).float().cos()


class Cached(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x * table(WIDTH).to(x.dtype)


class Log(Small):
    def middle(self, x: Tensor) -> Tensor:
        SEEN.append(x.detach())
        return x.tanh()


@pytest.mark.parametrize("called", [False, True], ids=["", "called before"])
@pytest.mark.parametrize("make", [Table, Cached, Log])
def test_a_cache_is_no_state(make: Callable[[], nn.Module], called: bool) -> None:
    model = make()
    before = model(rows()) if called else None
    assert "equals the model over two steps" in checked(model)
    assert fakes(model) == [] and len(SEEN) == (called and make is Log)
    assert before is None or torch.equal(model(rows()), before)


def test_verification_leaves_no_tensor_in_float64() -> None:
    assert f"{__name__}.CACHE.table" in dict(make_subject(Table(), rows()).graph.assumed).popitem()[0]
    assert CACHE == {} and fakes(Table()) == []


class Deadline(datetime.timedelta):
    """Its slots are those of C: read-only, and a new number at each reading."""


LIMIT = Deadline(microseconds=200_000)


class Limited(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x * LIMIT.total_seconds()


def test_what_is_computed_when_it_is_read_is_no_state() -> None:
    with ExternalState(Limited()).restored() as run:
        pass
    assert run.changes == ()
    assert "equals the model over two steps" in checked(Limited())


class Fails(Small):
    def middle(self, x: Tensor) -> Tensor:
        CACHE["last"] = x
        raise RuntimeError("no further")


def test_nothing_fake_is_left_where_capture_fails() -> None:
    with pytest.raises(CaptureError, match="no further"):
        capture(Fails(), rows())
    assert CACHE == {}


def fakes(model: nn.Module) -> list[str]:
    """The names under which a fake tensor, or one on meta, is found from the model, its classes and this file's globals."""
    found: list[str] = []
    waiting: list[tuple[Any, str]] = [(vars(sys.modules[__name__]), "globals"), (model, "model")]
    waiting += [(base, base.__name__) for module in model.modules() for base in type(module).__mro__]
    seen: dict[int, Any] = {}
    while waiting:
        value, name = waiting.pop()
        if id(value) in seen or type(value).__module__.startswith(("_pytest", "pytest")):
            continue  # a fixture's definition leads to the session, and from there to every test of the run
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found += [name] if is_fake(value) or value.is_meta else []
        elif isinstance(value, dict):
            waiting += [(item, f"{name}.{key}") for key, item in value.items()]
        elif isinstance(value, list | tuple | set):
            waiting += [(item, f"{name}[]") for item in value]
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            waiting += [(cells, f"{name} closure"), (value.__defaults__, f"{name} defaults"), (vars(value), name)]
        elif isinstance(value, type):
            if not value.__module__.startswith(("torch", "_pytest")):
                waiting.append((dict(vars(value)), name))
        elif type(value) in (Slotted, Holder):
            waiting += [(getattr(value, each.name), f"{name}.{each.name}") for each in dataclasses.fields(value)]
        elif hasattr(value, "__dict__") and not hasattr(value, "__path__") and type(value) is not type(sys):
            waiting.append((vars(value), name))
    return found


def test_a_fake_tensor_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HELD, "value", torch.empty(2, device="meta"))
    assert fakes(Small()) == ["globals.HELD.value"]
