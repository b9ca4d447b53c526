"""The automatic layout against measured ones, on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published import markdown

from autopar.bench.published import published, summary, to_json
from autopar.cli import main
from autopar.errors import UsageError


def row(name: str, dp: int, tp: int, pp: int, micro: int, rate: float | None) -> dict:
    return {
        "id": f"cell-{name}", "source": "made up", "group": "cell", "gpu": "H100-80GB-SXM", "n_gpus": 4, "gpus_per_node": 4,
        "model": {"family": "llama", "n_layers": 4, "hidden": 256, "n_heads": 4, "n_kv_heads": 4, "ffn_hidden": 512,
                  "gated_mlp": True, "vocab": 1024, "seq_len": 128, "tied_embeddings": False},
        "tp": tp, "pp": pp, "zero_stage": 1, "recompute": "none", "precision": "bf16", "global_batch": 16, "micro_batch": micro,
        "measured": {"tokens_per_s_per_gpu": rate}, "oom": rate is None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "rows.jsonl"
    rows = [
        row("data", 4, 1, 1, 4, 1000.0),
        row("tensor", 1, 4, 1, 16, 1250.0),
        row("pipeline", 1, 1, 4, 4, 500.0),
        row("both", 2, 2, 1, 8, None),
        {"group": "alone", **{k: v for k, v in row("one", 4, 1, 1, 4, 9.0).items() if k != "group"}},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_regret_is_measured_time_over_the_best(file: Path) -> None:
    (cell,) = published(file)  # a cell of one row has nothing to choose from
    assert (cell.name, cell.devices, cell.layouts, cell.measured) == ("cell", 4, 4, 3)
    assert cell.best.id == "cell-tensor"
    assert cell.choice.id == "cell-data"  # so small a model is priced to run best with data parallelism alone
    assert cell.regret == pytest.approx(1250 / 1000 - 1)
    assert not cell.failed and cell.choice == cell.ran
    assert cell.choice.predicted_s > 0
    assert "| 25.0% |" in markdown([cell])
    assert summary([cell]) == {"cells": 1, "mean_regret": cell.regret, "worst_regret": cell.regret, "failed": 0}
    json.dumps(to_json([cell]), allow_nan=False)


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--published", str(file), "--json"])
    assert caught.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cells"][0]["regret"] == pytest.approx(0.25) and data["summary"]["failed"] == 0
    with pytest.raises(UsageError, match="cannot be read"):
        published(tmp_path / "nothing.jsonl")
    (tmp_path / "alone.jsonl").write_text(json.dumps(row("one", 4, 1, 1, 4, 9.0)) + "\n{}\n")
    with pytest.raises(UsageError, match="no cell in which two layouts") as error:
        published(tmp_path / "alone.jsonl")
    assert "group" in error.value.hint
