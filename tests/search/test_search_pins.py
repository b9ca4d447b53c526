"""Pins: what they name, what they refuse, that pinned plans are optimal too, and what each one costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import search_models
from search_models import Devices, RandomPricer, brute_force, chain, random_problem

from autopar.cli.entry import main
from autopar.cli.render import plan_tables
from autopar.errors import AutoparError, BatchError, CaptureError, InfeasibleError, UsageError
from autopar.pins import LayerPins, read_pins
from autopar.plan import MICROBATCH_STATISTICS, Plan, Role
from autopar.planning import check_schedule
from autopar.search import SearchOptions, Shared, price_pins, search, strategies
from autopar.search.numerics import Numerics, best_plan
from autopar.search.options import pins_by_layer, runs_of_names, selects
from autopar.techniques import activations

T = (Role.TENSOR, Role.TENSOR_SEQUENCE)
MODEL = chain(["a", "b", "b", "b", "c"], 8)


def options(**pin: int | str | bool) -> SearchOptions:
    return SearchOptions(pin={key.replace("__", ".").replace("_to_", "-"): value for key, value in pin.items()})


class TestWords:
    def test_text_and_values(self) -> None:
        texts = ["layers.0-7.tensor=8", "lm_head.zero = 3", "schedule=1f1b", "recompute=no", "pipeline=4"]
        assert read_pins(texts) == {
            "layers.0-7.tensor": 8, "lm_head.zero": 3, "schedule": "1f1b", "recompute": False, "pipeline": 4,
        }  # fmt: skip

    def test_selectors(self) -> None:
        name, cls = "model.layers.12", "LlamaDecoderLayer"
        assert all(
            selects(s, name, cls) for s in (name, "layers.12", "12", "layers.*", "layers.9-12", "model.*.1?", cls)
        )
        assert not any(
            selects(s, name, cls) for s in ("layers", "layers.1", "layers.13-20", "a.model.layers.12", "head")
        )

    def test_some_layers_go_before_all(self) -> None:
        pinned = pins_by_layer(MODEL, SearchOptions(tensor=2, zero=1, pin={"layers.1-2.tensor": 4, "c.zero": 3}))
        assert pinned == (
            LayerPins(tensor=2, zero=1), *[LayerPins(tensor=4, zero=1)] * 2, LayerPins(tensor=2, zero=1),
            LayerPins(tensor=2, zero=3),
        )  # fmt: skip

    def test_short_forms_are_the_same_pins(self) -> None:
        long, short = SearchOptions(pin={"tensor": 2, "schedule": "gpipe"}), SearchOptions(tensor=2, schedule="gpipe")
        assert long == short and long.pins == {"schedule": "gpipe", "tensor": 2}
        assert long.without("tensor") == SearchOptions(schedule="gpipe")
        assert options(layers__0__zero=1, tensor=2).without("layers.0.zero") == SearchOptions(tensor=2)

    def test_names_for_people(self) -> None:
        names = ["embed", *(f"layers.{i}" for i in range(3)), "layers.9", "head"]
        assert runs_of_names(names) == ["embed", "layers.0-2", "layers.9", "head"]


class TestRefused:
    @pytest.mark.parametrize(
        ("pin", "words"),
        [
            ({"tensr": 2}, "did you mean tensor"),
            ({"prefetch": 20_000}, "prefetch is 20000, it must be a whole number from 1 to 16384"),
            ({1: 2}, "the key of a pin is 1, which is not text\n.*write key=value"),
            ({"tensor": 0}, "tensor is 0, it must be a whole number from 1\n.*write tensor=8"),
            ({"tensor": "two"}, "'two', it must be a whole number from 1"),
            ({"layers.0.pipeline": 2}, "of the whole plan, not of layers.0"),
            ({"layers.0.zero": 4}, "layers.0.zero is 4, it must be a whole number from 0 to 3"),
            ({"schedule": "interleaved-1f1b", "pipeline": 1}, "the pipeline has one device"),
            ({"schedule": "1f1b", "chunks": 2}, "one stage on each device, and chunks is 2"),
            ({"schedule": "interleaved-1f1b", "chunks": 1}, "several stages on each device, and chunks is 1"),
            ({"schedule": "zbv", "chunks": 3}, "two stages on each device, and chunks is 3"),
            ({"schedule": "zero-bubble", "pipeline": 1}, "the pipeline has one device"),
            (
                {"schedule": "dualpipev", "pipeline": 2, "microbatches": 2},
                "over 4 stages needs at least as many microbatches",
            ),
            ({"schedule": "zbv", "pipeline": 4}, "5 layers cannot be cut into 8 stages"),
            ({"chunks": 3}, "5 layers cannot be cut into 6 stages"),
            ({"layers.0.chunks": 2}, "chunks is a pin of the whole plan"),
            (
                {"schedule": "zigzag"},
                "schedule is 'zigzag', it must be one of none, gpipe, 1f1b, interleaved-1f1b, zero-bubble",
            ),
            (
                {"recompute": 3},
                "recompute is 3, it must be one of none, selective, full\n.*=selective .true means full, false",
            ),
            ({"layer.1.tensor": 2}, r"no layer 'layer.1'; the nearest name is layers.1\n.*its layers are layers.0-4"),
            ({"layers.0-2.zero": 1, "layers.2.zero": 2}, "both pin layers.2"),
            ({"layers.1.tensor": 3}, r"tensor 3 does not divide .*\(8\)\n.*1, 2, 4, 8"),
            ({"replicate": 3}, r"replicate 3 does not divide .*\(8\)\n.*1, 2, 4, 8"),
            ({"layers.1.tensor": 4, "data": 4}, "do not divide into groups for data 4, tensor 4"),
            ({"data": 8, "microbatches": 4}, r"data=8 does not divide microbatches of 2 rows\n.*1, 2"),
            ({"pipeline": 3}, r"fit are 1, 2, 4"),
            ({"schedule": "none", "pipeline": 2}, "2 stages needs a schedule"),
            ({"layers.0.sync": "parameter-server"}, "sync is a pin of the whole plan"),
            (
                {"sync": "parameter-server", "layers.1.zero": 2},
                "sync=parameter-server needs unsharded parameters and gradients on every replica, and layers.1 has ZeRO 2\n.*leave",
            ),
            ({"sync": "parameter-server", "replicate": 2}, "layers.0 has hybrid sharding .replicate=2."),
        ],
    )
    def test_the_message_names_the_choices(self, pin: dict[Any, int | str], words: str) -> None:
        with pytest.raises(UsageError, match=f"(?s){words}"):
            search(MODEL, Devices(8, 10_000), RandomPricer(MODEL, 0, 1.0, 0.0), SearchOptions(pin=pin))

    @pytest.mark.parametrize("allow", [None, 1, "fp8", [["fp8"]], ["nothing"]])
    def test_what_is_allowed_is_a_set_of_names(self, allow: Any) -> None:
        with pytest.raises(UsageError, match="is not known"):
            SearchOptions(allow=allow)

    def test_a_number_of_thousands_of_digits_is_no_degree(self) -> None:
        with pytest.raises(UsageError, match="it must be a whole number"):
            SearchOptions(pin=read_pins(["tensor=" + "9" * 5000]))

    def test_a_pin_is_given_once(self) -> None:
        with pytest.raises(UsageError, match="tensor is pinned to 2 and to 4"):
            SearchOptions(tensor=2, pin={"tensor": 4})
        with pytest.raises(UsageError, match="pinned to 2 and to 4"):
            read_pins(["tensor=2", "tensor=4"])
        with pytest.raises(UsageError, match="'tensor' is not a pin"):
            read_pins(["tensor"])

    def test_no_schedule_without_a_pipeline(self) -> None:
        check_schedule(SearchOptions(schedule="none", pipeline=1))
        with pytest.raises(UsageError, match="1f1b orders the microbatches of a pipeline"):
            check_schedule(SearchOptions(schedule="1f1b", pipeline=1))

    def test_on_the_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(("plan", "gpt2", "--devices", "8xH100-80GB", "--pin", "tensr=2"))
        assert ended.value.code == 2 and "did you mean tensor" in capsys.readouterr().err


def test_degrees_that_only_one_order_of_the_axes_has() -> None:
    graph = chain(["a"], 6)
    pinned = options(data=6, tensor=6, pipeline=1)
    plan = search(graph, Devices(36, 10_000), RandomPricer(graph, 0, 1.0, 0.0), pinned)
    assert plan.layers[0].strategy.degree(plan.mesh, Role.DATA) == 6


def test_what_a_pin_leaves_over_is_idle() -> None:
    graph = chain(["a"], 8)
    plan = search(graph, Devices(8, 10_000), RandomPricer(graph, 0, 1.0, 0.0), options(data=2, tensor=2))
    strategy = plan.layers[0].strategy
    assert [strategy.degree(plan.mesh, role) for role in (Role.DATA, Role.IDLE)] == [2, 2]
    assert strategy.degree(plan.mesh, *T) == 2


@pytest.fixture
def without_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the search nor brute force recomputes several layers as one."""
    monkeypatch.setattr(activations, "SEGMENTS", ())
    monkeypatch.setattr(search_models, "SEGMENTS", ())
    strategies._options.cache_clear()
    yield
    strategies._options.cache_clear()


@pytest.mark.usefixtures("without_segments")
def test_the_price_of_each_pin_is_the_difference_of_two_optima() -> None:
    # which choices segments are looked for in depends on the best plan of a search, and a pin's price only looks for faster ones
    costly = 0
    for seed in range(6000, 6012):
        graph, cluster, pricer = random_problem(seed)
        pinned = SearchOptions(target_gap=0.0, microbatches=1, pin={"layers.0.recompute": True})
        try:
            shared = Shared()
            plan = search(graph, cluster, pricer, pinned, shared)
            plan = price_pins(graph, cluster, pricer, pinned, plan, 60.0, shared)
        except InfeasibleError:
            continue
        assert [pin.pin for pin in plan.pins] == ["microbatches", "layers.0.recompute"]
        assert Plan.from_json(plan.to_json()) == plan
        for pin in plan.pins:
            best = brute_force(graph, cluster, pricer, pinned.without(pin.pin))
            saves, most = pin.gain(plan.prediction.step_time_s)
            assert pin.step_time_without_s == pytest.approx(best, rel=1e-9)
            assert (
                saves == pytest.approx(1 - best / plan.prediction.step_time_s, abs=1e-9)
                and -1e-12 <= saves <= most + 1e-6
            )
            costly += saves > 0.01
    assert costly >= 3


def test_without_time_the_price_of_a_pin_says_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    graph, cluster = chain(["a", "b", "b", "a"], 8), Devices(8, 10_000)
    pricer = RandomPricer(graph, 3, 1.0, 0.1)
    pinned = SearchOptions(zero=3)
    plan = price_pins(graph, cluster, pricer, pinned, search(graph, cluster, pricer, pinned), 0.0)
    (pin,) = plan.pins
    saves, most = pin.gain(plan.prediction.step_time_s)
    assert saves == 0.0 < most
    Console(width=120).print(plan_tables(plan))
    out = capsys.readouterr().out
    assert "the price of each pin" in out and f"{most:.1%}" in out and "zero=3" in out


COUPLED = chain(["a", "b", "b"], 8, why="batch norm")


def best_of(
    found: dict[tuple[tuple[str, ...], int], Plan | AutoparError], **options: Any
) -> tuple[Plan | AutoparError, list[str]]:
    """The best plan, or the error, if every candidate has the given plan or error, and the reasons why some were not captured."""
    refused: list[str] = []

    def find(numerics: Numerics, _: SearchOptions) -> Plan:
        result = found[numerics.narrow, numerics.microbatches]
        if isinstance(result, AutoparError):
            raise result
        return result

    try:
        return best_plan([Numerics(*key) for key in found], SearchOptions(**options), find, refused.append), refused
    except AutoparError as error:
        return error, refused


def plan_of(step_s: float, microbatches: int = 1) -> Plan:
    """A plan of separate microbatches whose step takes ``step_s``."""
    plan = search(COUPLED, Devices(1, 10_000), RandomPricer(COUPLED, 0, 1.0, 0.0))
    prediction = dataclasses.replace(plan.prediction, step_time_s=step_s)
    allow = (MICROBATCH_STATISTICS,) if microbatches > 1 else ()
    return dataclasses.replace(plan, prediction=prediction, microbatches=microbatches, allow=allow)


class TestSeveralNumerics:
    def test_a_number_of_microbatches_that_is_excluded_leaves_the_others(self) -> None:
        few, batch = UsageError("1f1b needs a microbatch for every stage"), BatchError("rows do not divide")
        nothing = InfeasibleError("no plan fits")
        plan = plan_of(1.0, 2)
        best, refused = best_of({((), 1): few, ((), 2): plan, ((), 4): few, ((), 8): batch})
        assert isinstance(best, Plan) and (best.microbatches, len(refused)) == (2, 1)
        assert best_of({((), 1): few, ((), 2): nothing, ((), 4): few, ((), 8): batch})[0] is nothing
        assert best_of({((), 1): batch, ((), 2): few})[0] is few

    def test_a_model_that_no_candidate_captures(self) -> None:
        first, second = CaptureError("one row"), CaptureError("two rows")
        assert best_of({((), 8): first, (("bfloat16_moments",), 8): second})[0] is first

    def test_more_microbatches_must_gain_more_than_the_target_gap(self) -> None:
        for step_s, microbatches in ((0.995, 1), (0.9, 4)):
            best, _ = best_of({((), 1): plan_of(1.0), ((), 4): plan_of(step_s, 4)}, target_gap=0.01)
            assert isinstance(best, Plan) and best.microbatches == microbatches

    def test_a_note_says_that_pins_have_no_price(self) -> None:
        for pin_time_s, notes in ((None, 0), (1.0, 1)):
            found = {((), 1): plan_of(1.0), ((), 4): plan_of(0.5, 4)}
            best, _ = best_of(found, tensor=1, offload="any", pin_time_s=pin_time_s)
            assert isinstance(best, Plan)
            assert sum("the pins tensor have no price" in note for note in best.notes) == notes
