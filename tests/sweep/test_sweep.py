"""What-if: ranges, shared captures, costs, the table, the picture."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from search_models import TransformerPricer, chain

from autopar.capture import capture
from autopar.cli import main
from autopar.cli import sweep as sweep_cli
from autopar.cli.sweep import table
from autopar.errors import BatchError, DeviceError, UsageError
from autopar.graph import Graph
from autopar.planning import find_plan
from autopar.search import SearchOptions
from autopar.shard import annotate
from autopar.sweep import Cell, Range, numbers, plot, read_prices, sweep
from autopar.sweep import cells as cells_module
from autopar.sweep.cells import clusters_of


def test_ranges() -> None:
    assert numbers("8..100", "--devices") == (8, 16, 32, 64)
    assert numbers("3, 8..16,8", "--devices") == (3, 8, 16)
    for text in ("", "8..4", "0", "many", "4-8"):
        with pytest.raises(UsageError, match="is not a range"):
            numbers(text, "--seq")


def test_prices_of_an_hour() -> None:
    assert read_prices(["2.5", "h100=3"]) == {"*": 2.5, "H100-80GB-SXM": 3.0}
    for text in ("free", "-1", "H100-80GB=", "nan"):
        with pytest.raises(UsageError, match="is not a price"):
            read_prices([text])


@pytest.fixture(scope="module")
def made():
    captured: list[tuple[int | None, int | None]] = []

    def capture(*, seq: int | None, global_batch: int | None) -> Graph:
        captured.append((seq, global_batch))
        if global_batch == 7:
            raise BatchError("no batch of 7")
        return chain(["embed", *["block"] * 6, "head"], global_batch or 8, seq=TransformerPricer.seq)

    asked = Range((1, 4, 16), ("H100-80GB", "A100-80GB"), (None,), (8, 7))
    told: list[tuple[str, int, int]] = []
    cells = sweep(
        capture,
        asked,
        SearchOptions(),
        prices={"*": 2.0},
        progress=lambda *news: told.append(news),
        pricer_of=lambda graph, cluster: TransformerPricer(graph),
    )
    return captured, cells, told, asked


def test_one_capture_serves_all_devices(made) -> None:
    captured, cells, told, asked = made
    assert captured == [(None, 8), (None, 7)]
    assert len(cells) == asked.cells == 12 and told[-1] == ("done", 12, 12)


def test_cells_have_figures_or_a_reason(made) -> None:
    _, cells, _, _ = made
    feasible = [cell for cell in cells if cell.step_time_s is not None]
    assert {cell.devices for cell in feasible} == {4, 16}
    assert all("no plan fits" in cell.error for cell in cells if cell.devices == 1 and cell.global_batch == 8)
    assert all(cell.error == "no batch of 7" for cell in cells if cell.global_batch == 7)
    for cell in feasible:
        assert cell.tokens_per_s == pytest.approx(8 * TransformerPricer.seq / cell.step_time_s)
        seconds = 1e9 / cell.tokens_per_s
        assert cell.cost_per_billion_tokens == pytest.approx(seconds / 3600 * 2.0 * cell.devices)
    assert json.loads(json.dumps([cell.to_json() for cell in cells], allow_nan=False))
    assert table(cells).row_count == 12


def test_the_picture(made, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    _, cells, _, _ = made
    plot(cells, tmp_path / "sweep.svg", "a sweep")
    assert "<svg" in (tmp_path / "sweep.svg").read_text()
    with pytest.raises(UsageError, match="nothing to draw"):
        plot([cell for cell in cells if cell.error], tmp_path / "none.svg", "none")
    with pytest.raises(UsageError, match="cannot be written"):
        plot(cells, tmp_path / "sweep.unknown", "a sweep")


def test_the_command(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sweep", "gpt2", "--devices", "1..2", "--seq", "64", "--global-batch", "8", "--gpu-hour", "2", "--json"])
    assert caught.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert [cell["devices"] for cell in data["cells"]] == [1, 2]
    assert all(cell["feasible"] and cell["seq"] == 64 and cell["global_batch"] == 8 for cell in data["cells"])


def test_the_limit_is_that_of_each_kind() -> None:
    asked = Range((1,), ("H100-80GB", "A100-40GB"))
    with pytest.raises(DeviceError, match="a device of 1x1xA100-40GB-SXM has"):
        sweep(lambda **sizes: chain(["block"], 8), asked, SearchOptions(), memory_limit_bytes=70 * 10**9)
    assert [c.memory_limit_bytes for c in clusters_of(Range((8, 16), ("H100-80GB", "A100-40GB")), 10**10)] == [
        10**10
    ] * 4


def test_a_cell_is_planned_as_plan_does(monkeypatch) -> None:
    """In the precision of the graph, with idle devices, and a cost of all of them."""
    asked = {}

    def find(graph, cluster, options, **how):
        asked.update(how)
        found = find_plan(graph, cluster, options, **how)
        assert found.precision == "float32"
        return found

    monkeypatch.setattr(cells_module, "find_plan", find)
    with torch.device("meta"):
        blocks = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
        batch = torch.empty(2, 64), torch.empty(2, 64)
    graph = annotate(capture(blocks, batch, torch.nn.functional.mse_loss, precision="float32"))
    (cell,) = sweep(lambda **sizes: graph, Range((3,), ("H100-80GB",)), SearchOptions(), prices={"*": 3600.0})
    assert asked["may_be_idle"] and cell.step_time_s is not None and cell.tokens_per_s is not None
    assert cell.cost_per_billion_tokens == pytest.approx(3 * 1e9 / cell.tokens_per_s)
    assert cell.mfu is not None and cell.mfu < 1


def test_a_picture_never_costs_the_result(capsys, monkeypatch, tmp_path) -> None:
    words = ["sweep", "gpt2", "--devices", "1", "--seq", "64", "--global-batch", "8", "--json"]
    words += ["--plot", str(tmp_path / "sweep.svg")]
    swept = []
    none = [Cell("H100-80GB-SXM", 1, "1x1xH100-80GB-SXM", None, 8, error="no plan fits")]
    monkeypatch.setattr(sweep_cli, "sweep", lambda *args, **how: swept.append(args) or none)
    monkeypatch.setattr(sweep_cli, "pyplot", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 1 and json.loads(capsys.readouterr().out)["cells"][0]["feasible"] is False
    swept.clear()
    monkeypatch.setattr(sweep_cli, "pyplot", mock.Mock(side_effect=UsageError("a plot needs matplotlib", "install it")))
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and swept == []


def test_devices_fill_their_nodes() -> None:
    with pytest.raises(UsageError, match="do not fill nodes of 8"):
        sweep(lambda **sizes: chain(["block"], 8), Range((12,), ("H100-80GB",)), SearchOptions())
