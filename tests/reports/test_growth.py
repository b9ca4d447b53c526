"""The pages of growth and of published layouts say what was measured."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from endtoend import CASES
from endtoend import page as endtoend_page
from growth import DEVICES, LAYERS, PEER_DEVICES, PEERS, draw, page, points
from kinds import Kinds
from places import ROOT
from planning import resumed

pytestmark = pytest.mark.slow  # a report is no part of the product


def line(layers: int, devices: int) -> dict:
    return {
        "layers": layers,
        "devices": devices,
        "wall_s": 3.25,
        "user_s": 2.5,
        "load": 1.2,
        "gap": 0.004,
        "step_time_s": 8.5,
        "chunks": 2,
        "planning_memory_bytes": 5 * 10**8,
    }


def test_points_cover_both_directions() -> None:
    found = points()
    assert {n for n, _ in found} == set(LAYERS) and set(DEVICES) <= {d for _, d in found}
    assert len(found) == len(set(found)) and (min(LAYERS), max(LAYERS)) == (32, 256) and DEVICES[-1] == 65_536
    assert (32, PEER_DEVICES) in found


def test_the_page_has_every_point_and_source() -> None:
    lines = [line(*point) for point in points()]
    lines[-1] = {"layers": 32, "devices": 65_536, "wall_s": 9.0, "user_s": 8.0, "error": "no time"}
    text = page(lines)
    assert text.count("| 2.5 s | 0.40% | 500 MB |") == len(lines)  # one point is in both tables, one failed
    assert "| 32 | 65,536 | 8.0 s | no time | - |" in text
    assert all(source in text for *_, source in PEERS)
    assert f"Llama-3-8B on {PEER_DEVICES} GPUs" in text and "at a load average of 1.2 to 1.2" in text


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw([line(*point) for point in points()], tmp_path / "growth.svg")
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_the_page_of_cases_marks_what_is_missed() -> None:
    lines = [{"case": name, "plain": plain} | line(0, 0) for plain in (False, True) for name, _, _ in CASES]
    text = endtoend_page(lines)
    assert "**" not in text and all(text.count(f"| {name} |") == 2 for name, _, _ in CASES)
    lines[1]["gap"], lines[2]["wall_s"], lines[7]["planning_memory_bytes"] = 0.02, 12.5, 3_000_000_000
    lines[3] = {
        "case": lines[3]["case"],
        "plain": False,
        "wall_s": 600.0,
        "user_s": 500.0,
        "load": 1.0,
        "error": "no plan within 600 s",
    }
    text = endtoend_page(lines)
    assert all(mark in text for mark in ("**2.00%**", "**12.5 s**", "**3,000 MB**", "**600.0 s**"))
    assert text.count("**") == 8 and "| - | no plan within 600 s | - | - |" in text


def test_a_request_for_a_file_finds_all_that_it_imports() -> None:
    """The command line adds the file's own folder to the places of modules, and none of the other folders of these tests."""
    files = {request[0].partition(":")[0] for _, request, _ in CASES if ".py:" in request[0]}
    assert files
    for name in files:
        tree = ast.parse((ROOT / name).read_text())
        named = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        named += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert {each.partition(".")[0] for each in named} <= {"__future__", "torch"}


def test_kinds_take_turns() -> None:
    model = Kinds(16, 8, 16, 2, 11)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    assert {block.up.out_features for block in model.blocks} == {16 * n for n in range(2, 10)}
    assert model(tokens, tokens).isfinite()


def test_an_interrupted_measurement_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"case": "a", "took": 1}\n')
    monkeypatch.setattr("sys.argv", ["program"])
    done = []

    def work(case: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        done.append(case["case"])
        return {**case, "took": limit_s}

    lines = resumed(path, [{"case": "a"}, {"case": "b"}], work, None, 2.0)
    assert done == ["b"] and lines == [{"case": "a", "took": 1}, {"case": "b", "took": 2.0}]
    assert [json.loads(text) for text in path.read_text().splitlines()] == lines
