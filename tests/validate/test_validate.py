"""``autopar dev validate``: rows read and refused, plans written from them, scores by hand, and the rank on a published sweep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import GROUNDTRUTH
from validation_page import PAGE, constants, records, written

from autopar.cli.app import cli
from autopar.devices import described
from autopar.errors import UsageError
from autopar.plan import Role
from autopar.schedules import Schedule
from autopar.schedules.memory import peak_counts
from autopar.schedules.step_time import simulate
from autopar.trainers import OtherTrainer
from autopar.trainers.layout import balanced, even_bounds, plan_parts
from autopar.types import Collective
from autopar.validate import RowOutcome, score, scores, validate
from autopar.validate.models import graph_of
from autopar.validate.rows import Architecture, Measured, RowError, measured, read_row
from autopar.validate.run import Bench, read_file
from autopar.validate.setting import trainer_of

ROWS = GROUNDTRUTH
SMALL = {
    "id": "a",
    "source": "by hand",
    "group": "g",
    "model": {"family": "llama", "n_layers": 4, "hidden": 256, "n_heads": 8, "vocab": 1024, "seq_len": 128},
    "gpu": "NVIDIA H100 80GB",
    "n_gpus": 8,
    "gpus_per_node": 8,
    "dp": 4,
    "tp": 2,
    "pp": 1,
    "zero_stage": 1,
    "recompute": "none",
    "precision": "bf16",
    "global_batch": 16,
    "micro_batch": 2,
    "measured": {"step_time_s": 0.1, "peak_mem_gb": 3.0},
}


def row(**changes: object) -> dict[str, object]:
    return SMALL | changes


def outcome(
    group: str, step: float | None, seen: float | None, failed: bool = False, feasible: bool = True
) -> RowOutcome:
    return RowOutcome("x", "s", group, Measured(seen, None, failed), step, None, feasible)


# -- scores ----------------------------------------------------------------------------------------------------------


def test_scores_by_hand():
    rows = [outcome("a", t, m) for t, m in ((1.0, 1.1), (2.0, 1.0), (3.0, 3.0), (4.0, 8.0))]
    rows += [outcome("a", 0.5, None, failed=True, feasible=False), outcome("a", 9.0, None, failed=True)]
    found = score(rows)
    assert found.spearman == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found.regret == found.worst_regret == pytest.approx(0.1)
    assert (found.n_ran, found.n_failed, found.failed_called_infeasible, found.ran_called_infeasible) == (4, 2, 1, 0)
    assert found.time_median_error == pytest.approx((0.5 + 1 / 11) / 2) and found.memory_median_error is None


def test_groups_are_not_compared_with_each_other():
    fast, slow = [outcome("a", t, t) for t in (1.0, 2.0, 3.0)], [outcome("b", t, 100 - t) for t in (1.0, 2.0, 3.0)]
    assert score(fast).spearman == pytest.approx(1) and score(slow).spearman == pytest.approx(-1)
    assert score(fast + slow).spearman == pytest.approx(0)
    assert score(fast[:2]).spearman is None and score(fast[:1]).regret is None


# -- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_with_gaps_takes_defaults():
    found = read_row(row(sequence_parallel=None, recompute=None, notes="all overlap off"), 1)
    assert found.architecture.kv_heads == 8 and found.architecture.ffn == 1024 and found.architecture.gated
    assert found.setting.sequence and found.setting.activations == "keep" and "overlap off" in found.setting.facts
    assert measured(row()).memory_bytes == 3 * 2**30
    printed = measured(row(measured={"tokens_per_s_per_gpu": 256.0}))
    assert printed.step_s == pytest.approx(16 * 128 / (256 * 8))
    assert measured(row(measured={}, derived={"step_time_s_from_days": 7})).step_s == 7


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": None}, "tp is missing"),
        ({"tp": 3}, "does not divide n_gpus"),
        ({"global_batch": 10}, "does not divide into dp"),
        ({"model": None}, "model is missing"),
        ({"model": SMALL["model"] | {"hidden": 100}}, "does not divide into n_heads"),
        ({"precision": "int3"}, "precision"),
        ({"recompute": "sometimes"}, "recompute"),
        ({"gpu": None}, "gpu is missing"),
        ({"tp": "²"}, "tp = '²' is not a whole number"),
        ({"ep": 3}, "ep = 3 does not divide dp = 4"),
        ({"ep": 4}, "ep = 4 does not divide the model's 0 experts"),
        ({"ep": 4, "model": SMALL["model"] | {"n_experts": 6}}, "ep = 4 does not divide the model's 6 experts"),
    ],
)
def test_a_row_that_makes_no_sense_says_why(changes, reason):
    with pytest.raises(RowError, match=reason):
        read_row(row(**changes), 1)


def test_labels_do_not_change_a_price(tmp_path):
    rows = [row(), row(id="b", source={"title": "elsewhere"}, group="h"), row(id="c", notes=None, seen="never")]
    first, *others = validate(write_rows(tmp_path, rows)).outcomes
    assert first.step_s and all((o.step_s, o.memory_bytes) == (first.step_s, first.memory_bytes) for o in others)


# -- from a row to a plan --------------------------------------------------------------------------------------------


def test_a_deep_model_is_what_capture_would_have_found():
    shape = Architecture(5, 64, 4, 2, 128, True, 256, 32, False, False)
    deep, whole = graph_of(shape, 4), graph_of(dataclasses.replace(shape, layers=3), 4)
    assert len(deep.layers) == 7 and set(deep.classes) == set(whole.classes)
    assert len(set(deep.parameters)) == len(whole.parameters) + 2 * 9
    made = [layer.outputs[0] for layer in deep.layers]
    assert [layer.activations[0] for layer in deep.layers[1:]] == made[:-1]


def model_of(data: dict) -> OtherTrainer:
    """The cost model of a row's trainer."""
    s = read_row(data, 1).setting
    return trainer_of(s).model(s, described("H100-80GB-SXM", 1, 8))


def changed_model(**changes: object) -> OtherTrainer:
    return model_of(row(**changes))


def test_cuts():
    graph = graph_of(Architecture(8, 64, 4, 4, 128, True, 256, 32, False, False), 4)
    setting = read_row(row(pp=2, tp=1, dp=4, micro_batch=1), 1).setting
    assert even_bounds(graph, setting) == (0, 5, 10)
    assert balanced(16, 4.0, 2) == (0, 11, 18) and balanced(16, 4.0, 4) == (0, 6, 11, 16, 18)
    assert balanced(16, 4.0, 8) == (0, 4, 6, 9, 11, 14, 16, 17, 18)
    interleaved = dataclasses.replace(setting, chunks=2)
    written = plan_parts(graph, interleaved)
    assert written.schedule.name == "interleaved-1f1b" and written.bounds == (0, 3, 5, 7, 10)


def test_rows_of_mixtures_deal_out_experts(tmp_path):
    model = SMALL["model"] | {"n_experts": 8, "experts_per_token": 2, "moe_ffn_hidden": 512}
    rows = [row(model=model, ep=n) for n in (1, 2, 4)]
    found = validate(write_rows(tmp_path, rows)).outcomes
    assert all(o.priced for o in found), found
    whole, _, quarters = (o.memory_bytes for o in found)
    assert whole > quarters and len({o.step_s for o in found}) == 3
    setting = read_row(rows[2], 1).setting
    written = plan_parts(graph_of(read_row(rows[2], 1).architecture, 16), setting)
    assert [s.degree(written.mesh, Role.EXPERT) for s in written.strategies] == [1, 4, 4, 4, 4, 1]
    # the expert axis replicates what is not an expert, which ZeRO shards over it
    assert [s.zero for s in written.strategies] == [1, 1, 1, 1, 1, 1]


def test_the_trainer_follows_what_the_row_says():
    modern = model_of(row(notes="Megatron-LM, all overlap off"))
    assert modern.fused and modern.flash and modern.gradient_bytes == 4 and modern.overlap_tensor == 0
    old = model_of(row(precision="fp16"))
    assert not old.flash and old.regather
    assert not model_of(row(notes="FSDP eager bf16")).fused


def test_loose_names_of_machines():
    assert described("A100-40GB-SXM (DGX A100)", 1, 8).gpu.name == "A100-40GB-SXM"
    assert described("V100-32GB-SXM3 (DGX-2)", 1, 16).gpu.name == "V100-32GB-SXM2"
    named = described("A100-80GB-SXM", 2, 8, "NVLink, 4x Omni-Path links per node")
    assert named.inter.bytes_per_s == pytest.approx(4 * 100e9 / 8 / 8 * 0.9)
    assert described("H200", 2, 8, "RDMA 400Gb/s per GPU").inter.bytes_per_s == pytest.approx(50e9 * 0.9)
    with pytest.raises(UsageError, match="abacus"):
        described("abacus", 1, 8)


# -- the interleaved schedule ----------------------------------------------------------------------------------------


def test_interleaving_divides_the_bubble():
    line, chunks, m = 4, 3, 8
    interleaved, plain = Schedule("interleaved-1f1b", line, m, chunks), Schedule("1f1b", line, m)
    step = simulate(interleaved, [1.0] * line * chunks, [2.0] * line * chunks)
    # Narayanan et al. 2021: the bubble of (p - 1) microbatches is divided by the chunks
    assert step == pytest.approx(3 * m * chunks + 3 * (line - 1))
    assert simulate(plain, [3.0] * line, [6.0] * line) == pytest.approx(9 * (m + line - 1))


def test_interleaving_holds_more():
    held = peak_counts(Schedule("interleaved-1f1b", 4, 8, 2)).in_flight
    # the first device warms up with (v - 1) p + 2 (p - 1) forwards and does one more
    assert held[0] + held[4] == 4 + 2 * 3 + 1 and held[3] + held[7] == 4 + 1


# -- the command -----------------------------------------------------------------------------------------------------


def write_rows(folder: Path, rows: list[object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_the_command_lists_what_it_cannot_price(tmp_path):
    path = write_rows(tmp_path, [row(), "not json", row(id="b", gpu="abacus"), row(id="c", pp=8, tp=1, oom=True), 7])
    result = CliRunner().invoke(cli, ["dev", "validate", str(path), "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    keys = {"n_ran", "n_failed", "spearman", "regret", "ran_called_infeasible", "failed_called_infeasible",
            "time_median_error", "time_p90_error", "memory_median_error", "memory_p90_error"}  # fmt: skip
    assert keys <= set(found["overall"]) == set(found["groups"]["g"]) == set(found["sources"]["by hand"])
    assert found["n_unpriced"] == 3 and [u["id"] for u in found["unpriced"]] == ["line 2", "b", "line 5"]
    assert found["overall"]["failed_called_infeasible"] == 1, "4 blocks do not make 8 stages"
    assert found["rows"][0]["step_time_s"] > 0
    printed = CliRunner().invoke(cli, ["dev", "validate", str(path)], catch_exceptions=False).stdout
    assert "3 of 5 rows could not be priced" in printed and "by hand" in printed


def test_a_line_that_is_text_is_no_row(tmp_path):
    assert read_file(write_rows(tmp_path, [row(), '"a row"']))[1] == "not a JSON object"


def test_a_line_that_is_nested_too_deep_is_no_row_and_text_may_have_line_ends(tmp_path):
    rows = read_file(
        write_rows(tmp_path, ["[" * 100_000, json.dumps(row(id="a\u2028b\x85c"), ensure_ascii=False), "{"])
    )
    assert rows[0] == "not JSON: it is nested deeper than 100 levels" and rows[1]["id"] == "a\u2028b\x85c"
    assert rows[2].startswith("not JSON: Expecting property name") and len(rows) == 3


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        validate(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="no measurements"):
        validate(write_rows(tmp_path, ["nothing"]))


def test_layouts_of_a_published_sweep_are_ranked(tmp_path):
    lines = [line for line in (ROWS / "layout_sweep.jsonl").read_text().splitlines() if "nanotron-1B-1n" in line]
    found = scores(validate(write_rows(tmp_path, lines)))["overall"]
    assert found.n_priced == len(lines) and found.spearman >= 0.85 and found.regret <= 0.05
    assert found.ran_called_infeasible == 0 and found.failed_called_infeasible >= 0.7 * found.n_failed


# -- strangers' rows -------------------------------------------------------------------------------------------------

ODD = (None, 0, -1, 2.5, "8", "eight", [], {}, True, float("nan"), float("inf"), 10**30)


def holes() -> list[dict[str, object]]:
    """The row with each field left out, and with each field odd."""
    rows = [{key: value for key, value in SMALL.items() if key != left} for left in SMALL]
    model = dict(SMALL["model"])
    rows += [row(model={key: value for key, value in model.items() if key != left}) for left in model]
    rows += [row(**{key: odd}) for key in SMALL for odd in ODD]
    rows += [row(model=model | {key: odd}) for key in model for odd in ODD]
    extra = (
        "cp",
        "ep",
        "vp",
        "sequence_parallel",
        "recompute",
        "schedule",
        "interconnect",
        "notes",
        "quote",
        "oom",
        "derived",
        "flags",
    )
    rows += [row(**{key: odd}) for key in extra for odd in ODD]
    return [
        *rows,
        row(cp=2, tp=2),
        row(zero_stage=7),
        row(unheard_of={"a": [1]}),
        row(vp=3, pp=2, tp=1),
        row(cp=2, tp=2, notes="ulysses"),
    ]


def test_no_row_ends_the_run(monkeypatch):
    """Whatever a row lacks or says, it is priced or refused with a reason. Sizes that capture would have to see are looked at alone."""
    seen: dict[object, object] = {}

    def small_graph(architecture, batch):
        key = (architecture, batch)
        if (
            architecture.layers > 8
            or architecture.hidden > 512
            or architecture.vocabulary > 4096
            or batch > 64
            or architecture.seq > 512
        ):
            raise RowError("too large for a test")
        if min(architecture.hidden, architecture.vocabulary, architecture.seq) < 16:
            raise RowError("a capture more, for a test")
        if key not in seen:
            seen[key] = graph_of(architecture, batch)
        return seen[key]

    monkeypatch.setattr("autopar.validate.run.graph_of", small_graph)
    bench = Bench()
    for number, data in enumerate(holes()):
        found = bench.outcome(data, number)
        assert found.reason or found.feasible is not None, data
        assert found.reason or found.refused or (found.step_s and found.step_s > 0 and found.memory_bytes), data
        assert "Error" not in found.reason.split(":")[0], (found.reason, data)


def test_words_of_the_trainer():
    plain, fsdp = changed_model(), changed_model(zero_stage=3)
    assert (plain.gradient_bytes, plain.fresh_bytes, plain.fused, plain.fsdp) == (6, 2, False, False)
    assert (fsdp.gradient_bytes, fsdp.fresh_bytes, fsdp.fsdp, fsdp.loss_copies) == (4, 0, True, 2)
    assert changed_model(zero_stage=3, quote="FSDP compile bf16").fused
    sums = [changed_model(source="a sweep (nanotron v0.5)", zero_stage=zero) for zero in (0, 1)]
    assert [(m.reduces_sums, m.starts_early, m.overlap_data) for m in sums] == [(True, True, 1), (True, True, 0)]
    assert (plain.reduces_sums, plain.stage1_reduction) == (False, Collective.REDUCE_SCATTER)
    assert sums[1].stage1_reduction is Collective.ALL_REDUCE
    early = [
        changed_model(notes=f"Megatron{words}").starts_early for words in ("", ", all overlap off", ", tp_comm_overlap")
    ]
    assert early == [True, False, False] and not changed_model(precision="fp16").starts_early
    recipe = changed_model(notes="distributed_fused_adam, overlap grad/param sync, ub_tp_comm_overlap")
    assert (recipe.gradient_bytes, recipe.overlap_data, recipe.overlap_tensor) == (2, 1, 1.0)


def test_nanotron_reports_the_memory_of_its_first_rank():
    """It is in the first stage; whether a run fits depends on all stages."""
    found = {}
    for source in ("a sweep (nanotron)", "a sweep"):
        model = SMALL["model"] | {"vocab": 65536}  # the logits are in the last stage
        read = read_row(row(model=model, pp=2, tp=1, dp=4, micro_batch=4, zero_stage=1, source=source), 1)
        bench = Bench()
        stages = [stage.memory.total for stage in bench.price(read, read.setting)[0].stages]
        found[source] = bench.predicted(read).memory_bytes, stages[0], max(stages)
    (mine, first, most), (other, _, largest) = found.values()
    assert mine == first and other == largest and first != most


def test_words_of_mixtures():
    model = SMALL["model"] | {"n_experts": 8, "experts_per_token": 2, "moe_ffn_hidden": 512}
    few = {"model": model, "ep": 4, "dp": 16, "tp": 1, "pp": 1, "micro_batch": 1, "global_batch": 64}
    recipe = "Megatron-Bridge: overlap_moe_expert_parallel_comm={}, grad_reduce_in_fp32={}"
    found = [
        changed_model(**few, notes=recipe.format(overlaps, wide)) for overlaps, wide in ((True, False), (False, True))
    ]
    assert [(m.overlap_experts, m.gradient_bytes, m.dispatches) for m in found] == [
        (0.875, 2, True),
        (0.0, 4, True),
    ]  # 7 of 8 forward passes
    even = {
        word: changed_model(**few, notes=f"TE, DeepEP, {word}", zero_stage=3)
        for word in ("fake_balanced_gate: true", "")
    }
    assert [m.consecutive_experts for m in even.values()] == [True, False]


# -- constants -------------------------------------------------------------------------------------------------------


def test_fitted_figures_are_few_and_the_page_lists_every_figure():
    found = records()
    assert len({record.name for record in found}) == len(found) and 0 < sum(record.fitted for record in found) <= 12
    assert {record.kind for record in found} <= {"measured", "library", "published", "vendor", "assumed", "fitted"}
    assert written(PAGE.read_text("utf-8"), "constants", constants()) == PAGE.read_text("utf-8")
