"""How rows are read: architectures, fields that a row leaves open, words on precision, schedule and offloading, experts' grids."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from test_validate import SMALL, row
from tiers import slow

from autopar.errors import InfeasibleError
from autopar.plan import Role
from autopar.trainers.layout import even_bounds, head_weight, plan_parts
from autopar.validate.architecture import Architecture, LatentAttention
from autopar.validate.models import config_of, graph_of, textbook
from autopar.validate.rows import RowError, read_row
from autopar.validate.run import Bench

MODEL = dict(SMALL["model"])
MIXTURE = MODEL | {"n_experts": 8, "experts_per_token": 2, "moe_ffn_hidden": 128, "ffn_hidden": 512}
BENCH = Bench()
"""One for the tests of unchanged benches: most of their rows have the same model, which takes longer to capture than to price."""
LATENT = {"attention": "MLA", "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
PLAIN = Architecture(4, 64, 4, 4, 128, True, 256, 32, False, False)


def architecture(model: object, **changes: object) -> Architecture:
    return read_row(row(model=model, **changes), 1).architecture


def refusal(**changes: object) -> str:
    with pytest.raises(RowError) as found:
        read_row(row(**changes), 1)
    return found.value.message


# -- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-70B", 70.6),
        slow("Llama 2 13B", 13.0),
        ("GPT-3 175B", 175.0),
        ("Nemotron-4 15B", 15.6),
        ("Mixtral 8x7B", 46.7),
        ("Qwen3-30B-A3B", 30.5),
        ("gpt-oss-120b", 116.8),
        ("GLM-4.5-Air", 106.0),
        slow("DeepSeek-V2", 235.7),
        ("DeepSeek-V3", 671.0),
    ],
)
def test_a_name_stands_for_the_published_sizes(name, billions):
    found = architecture(name, seq_len=128, tp=1)
    graph = graph_of(found, 8)
    assert len(graph.layers) == found.layers + 2
    held = sum(p.value.numel for p in graph.parameters.values()) / 1e9
    assert held == pytest.approx(billions, rel=0.02), (name, found)


def test_a_router_is_limited_to_groups_of_experts():
    for name, limit in (
        ("DeepSeek-V3", (8, 4)),
        ("DeepSeek-V2", (8, 3)),
        ("Kimi-K2", (1, 1)),
        ("Mixtral 8x7B", (1, 1)),
    ):
        found = architecture(name, seq_len=128, tp=1)
        assert (found.groups, found.chosen_groups) == limit
    limited = architecture(MIXTURE | {"n_group": 2, "topk_group": 1}, tp=1)
    assert {"n_group": 2, "topk_group": 1}.items() <= config_of(limited, 3).items()
    with pytest.raises(RowError, match="3 of 2 groups"):
        architecture(MIXTURE | {"n_group": 2, "topk_group": 3}, tp=1)


def test_given_sizes_go_before_published_ones_and_may_contradict_them():
    shortened = architecture({"name": "DeepSeek-V3", "n_layers": 4, "n_dense_layers": 1, "seq_len": 128})
    assert (shortened.layers, shortened.dense_layers, shortened.experts, shortened.latent.rank) == (4, 1, 256, 512)
    assert architecture({"family": "deepseek-v3", "n_layers": 8, "seq_len": 64}).latent.query_rank == 1536
    assert architecture({"family": "llama3", "params_b": 8.0, "seq_len": 64}).kv_heads == 8
    said = row(model="DeepSeek-V3", seq_len=128, notes="shortened to 4 layers (first one dense)")
    assert read_row(said, 1).architecture.dense_layers == 1
    with pytest.raises(RowError, match="n_layers is missing"):  # not Mixtral's 32 layers: it is another model
        architecture({"name": "Mixtral 8x7B", "hidden": 128, "n_heads": 4, "vocab": 512, "seq_len": 64})
    with pytest.raises(RowError, match="hidden is missing"):
        architecture("a model of our own", seq_len=64)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (MODEL, "llama"),
        (MODEL | {"family": "qwen3"}, "qwen3"),
        (MODEL | {"gated_mlp": False}, "gpt2"),
        (MODEL | {"gated_mlp": False, "n_kv_heads": 2}, "nemotron"),
        (MODEL | {"family": "nemotron4"}, "nemotron"),
        (MIXTURE, "mixtral"),
        (MIXTURE | {"family": "qwen3-moe", "head_dim": 64}, "qwen3_moe"),
        (MIXTURE | {"n_shared_experts": 1}, "glm4_moe"),
        (MIXTURE | {"dense_layers": 1}, "glm4_moe"),
        (MIXTURE | LATENT | {"v_head_dim": 32}, "deepseek_v3"),
        (MODEL | LATENT | {"v_head_dim": 32}, "deepseek_v3"),
    ],
)
def test_a_model_is_captured_as_it_is(model, kind):
    found = architecture(model, tp=1)
    assert config_of(found, 3)["model_type"] == kind
    graph = graph_of(found, 8)
    assert len(graph.layers) == found.layers + 2
    mixtures = [bool(graph.classes[layer.cls].experts) for layer in graph.layers[1:-1]]
    dense = found.dense_layers if found.experts else found.layers
    assert mixtures == [False] * dense + [True] * (found.layers - dense)


def test_heads_of_their_own_size_and_few_key_heads_are_kept():
    shape = dataclasses.replace(PLAIN, head=32, kv_heads=2)
    for each in (shape, dataclasses.replace(shape, gated=False), dataclasses.replace(shape, experts=4, qk_norm=True)):
        graph = graph_of(each, 4)
        shapes = {tuple(graph.parameters[name].value.shape) for name in graph.layers[1].parameters}
        assert (4 * 32, 64) in shapes and (2 * 32, 64) in shapes, shapes
    assert textbook(dataclasses.replace(shape, head=128, hidden=256)).head == 64


def test_blocks_without_experts_come_first_and_are_repeated_like_the_others():
    latent = LatentAttention(24, 16, 16, 8, 16)
    deep = dataclasses.replace(
        PLAIN, layers=9, experts=4, experts_per_token=2, expert_ffn=32, shared_experts=1, latent=latent
    )
    deep = dataclasses.replace(deep, dense_layers=4)
    made = graph_of(deep, 4)
    short = graph_of(dataclasses.replace(deep, layers=5, dense_layers=2), 4)
    assert [layer.cls for layer in made.layers[1:5]] == [short.layers[1].cls] * 4
    assert [layer.cls for layer in made.layers[5:10]] == [short.layers[3].cls] * 5
    assert set(made.classes) == set(short.classes) and len(made.layers) == 11
    outputs = [layer.outputs[0] for layer in made.layers]
    assert [layer.activations[0] for layer in made.layers[1:]] == outputs[:-1]
    names = [name for layer in made.layers for name in layer.parameters]
    assert len(names) == len(set(names)) == len(made.parameters)


def test_the_head_is_weighed_against_what_a_token_takes_of_a_mixture():
    wide = dataclasses.replace(PLAIN, vocabulary=4096, experts=16, experts_per_token=2, expert_ffn=64)
    graph, half = graph_of(wide, 4), graph_of(dataclasses.replace(wide, experts=2), 4)
    assert head_weight(graph) == pytest.approx(head_weight(half), rel=0.06)  # the router alone differs
    setting = read_row(row(pp=2, tp=1, dp=4, micro_batch=1), 1).setting
    assert even_bounds(graph, setting)[1] > 3, "the stage with the head has fewer blocks"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MIXTURE | {"gated_mlp": False}, "experts without a gate"),
        (MIXTURE | {"n_mtp_layers": 1}, "n_mtp_layers = 1"),
        (MIXTURE | {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (MIXTURE | {"moe_layer_freq": [0, 1, 0, 1]}, "moe_layer_freq"),
        (MIXTURE | {"n_dense_layers": 4}, "n_dense_layers = 4 leaves none"),
        (MODEL | {"moe": True}, "n_experts is missing"),
        (MODEL | {"attention": "MLA"}, "kv_lora_rank is missing"),
        (MODEL | {"attention": "retention"}, "attention = 'retention'"),
        (MODEL | {"family": "nemotron-h"}, "'nemotron-h'"),
    ],
)
def test_layers_without_a_price_are_refused_by_name(model, reason):
    assert reason in refusal(model=model)


def test_a_list_says_which_blocks_have_experts():
    assert architecture(MIXTURE | {"moe_layer_freq": [0, 1, 1, 1]}).dense_layers == 1
    assert architecture(MIXTURE | {"shared_expert_intermediate_size": 256}).shared_experts == 2


# -- fields that are left open ---------------------------------------------------------------------------------------


def test_what_a_row_leaves_open_has_several_values_unless_its_words_say_it():
    found = read_row(row(recompute=None, micro_batch=None), 1)
    assert found.unknown == ("recompute", "micro_batch")
    assert found.choices == tuple((a, m) for a in ("keep", "selective", "full") for m in (1, 2, 4))
    assert [(s.activations, s.microbatch) for s in found.settings] == list(found.choices)
    said = {
        "yaml: activations_checkpoint null": "keep",
        "no activation checkpointing": "keep",
        "full activation recomputation": "full",
        "activation checkpointing is on": "full",
        "selective recompute": "selective",
        "recompute_granularity: full": "full",
        "activations_checkpoint_granularity=null": "keep",
    }
    for words, value in said.items():
        (setting,) = read_row(row(recompute=None, notes=words), 1).settings
        assert setting.activations == value, words
    for words, size in {
        "micro-batch size 2": 2,
        "mbs=4": 4,
        "gradient accumulation 1": 4,
        "2 micro-batches per replica": 2,
    }.items():
        assert [s.microbatch for s in read_row(row(micro_batch=None, notes=words), 1).settings] == [size], words
    interleaved = read_row(row(schedule="interleaved 1f1b", vp=None, model=MODEL | {"n_layers": 8}, pp=2), 1)
    assert interleaved.unknown == ("vp",) and [s.chunks for s in interleaved.settings] == [2, 4]


def priced(monkeypatch, found: dict[str, tuple[float, int] | None], **changes: object):
    """The outcome of a row with ``recompute`` left open, if its settings had these step times and bytes."""

    def price(self, row, setting):
        if (known := found[setting.activations]) is None:
            raise InfeasibleError("no", "no")
        stage = SimpleNamespace(memory=SimpleNamespace(total=known[1]), memory_limit_bytes=100)
        return SimpleNamespace(stages=[stage], prediction=SimpleNamespace(step_time_s=known[0])), 100

    monkeypatch.setattr(Bench, "price", price)
    return Bench().outcome(row(recompute=None, **changes), 1)


def test_a_row_counts_if_all_feasible_settings_take_the_same_time(monkeypatch):
    found = priced(monkeypatch, {"keep": (1.0, 80), "selective": (1.02, 79), "full": (1.04, 78)})
    assert (found.step_s, found.memory_bytes, found.feasible, found.reason) == (1.02, 79, True, "")
    found = priced(monkeypatch, {"keep": (0.5, 120), "selective": (1.0, 80), "full": (1.03, 40)})
    assert (found.step_s, found.memory_bytes, found.feasible) == (1.0, None, True)
    found = priced(monkeypatch, {"keep": (1.0, 80), "selective": (1.1, 60), "full": (1.3, 40)})
    assert not found.priced and found.reason == "recompute is unknown, and with it the step time, from 1 s to 1.3 s"
    found = priced(monkeypatch, {"keep": (1.0, 300), "selective": (1.01, 200), "full": None})
    assert found.feasible is False and found.step_s == 1.0
    found = priced(monkeypatch, dict.fromkeys(("keep", "selective", "full")))
    assert found.feasible is False and found.refused == "no"
    found = priced(monkeypatch, {"keep": (1.0, 80), "selective": (1.0, 60), "full": (1.3, 40)}, micro_batch=None)
    assert found.reason.startswith("recompute is unknown"), "the size of microbatches changes nothing"


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("bf16/fp8 mixed (FP8 per title)", "float8"),
        ("bf16 parameters, mxfp8 products", "float8"),
        ("bf16, no fp8", "bfloat16"),
        ("bf16 (not stated)", "bfloat16"),
        ("FP16 with loss scaling", "float16"),
    ],
)
def test_a_word_for_8_bits_decides(words, precision):
    assert read_row(row(precision=words), 1).setting.precision == precision


@pytest.mark.parametrize("words", ["nvfp4", "bf16 with NVFP4 products", "mxfp4"])
def test_products_in_4_bits_are_refused_by_name(words):
    assert "fp4 have no price" in refusal(precision=words)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("zero bubble (ZB-H1)", "zero-bubble"),
        ("ZB-V", "zbv"),
        ("DualPipeV", "dualpipev"),
        ("chimera", "chimera"),
        slow("PipeDream-flush", "1f1b"),
    ],
)
def test_schedules_are_read(words, name):
    changes = row(schedule=words, pp=2, tp=2, micro_batch=1, global_batch=32)
    found = read_row(changes, 1)
    schedule = plan_parts(BENCH.graph(found), found.setting).schedule
    assert schedule.name == name and schedule.chunks == (2 if name in ("zbv", "dualpipev") else 1)
    assert BENCH.outcome(changes, 1).step_s


def test_other_schedules_and_offloading_are_refused_by_name():
    assert refusal(schedule="DualPipe", pp=2) == "schedule = 'DualPipe' has no price"
    assert refusal(schedule="looped BFS", pp=2) == "schedule = 'looped BFS' has no price"
    assert read_row(row(schedule="looped BFS"), 1).setting.schedule == "", "without a pipeline there is no schedule"
    assert refusal(notes="FSDP with CPU offload").startswith("'CPU offload' has no price")


@pytest.mark.parametrize(
    ("words", "in_host"),
    [
        ("optimizer CPU offload", (True, False)),
        ("offloads optimizer states and activation offloading", (True, True)),
        ("optimizer_cpu_offload", (True, False)),
        ("activations are offloaded", (False, True)),
        ("no CPU offload, offloading is off", (False, False)),
    ],
)
def test_offloading_is_read(words, in_host):
    options = read_row(row(notes=words), 1).setting.options
    assert (options.states_in == "host", options.saved_in == "host") == in_host


def test_moments_in_16_bits_take_half_the_memory():
    whole, half = (BENCH.outcome(row(notes=words, tp=1), 1).memory_bytes for words in ("Adam", "bf16 Adam moments"))
    parameters = sum(p.value.numel for p in BENCH.graph(read_row(row(tp=1), 1)).parameters.values())
    assert whole - half == pytest.approx(4 * parameters / 8, rel=0.05)


# -- experts' own grid -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "folds", "axis"),
    [
        ({"ep": 4}, set(), 4),  # divides dp
        ({"ep": 8}, {"tensor"}, 4),  # does not, and there are fewer experts than tp * ep ranks
        ({"ep": 8, "notes": "expert tensor degree 1"}, {"tensor"}, 4),
        ({"ep": 4, "etp": 1}, {"tensor"}, 2),
        ({"ep": 4, "etp": 2}, set(), 4),
        ({"ep": 4, "etp": 2, "cp": 2}, {"context"}, 2),
        ({"ep": 4, "cp": 2, "tp": 1, "n_gpus": 4}, {"context"}, 2),
        ({"ep": 8, "cp": 2}, {"tensor", "context"}, 2),
        ({"ep": 8, "cp": 2, "tp": 1, "micro_batch": 1}, {"context"}, 4),
    ],
)
def test_experts_are_distributed_over_a_grid_of_their_own(degrees, folds, axis):
    found = read_row(row(model=MIXTURE, **degrees), 1)
    setting = found.setting
    assert (setting.folds, setting.expert_axis) == (folds, axis)
    plan = plan_parts(BENCH.graph(found), setting)
    expert = [role for role in Role if role.distributes_experts]
    assert [s.degree(plan.mesh, *expert) for s in plan.strategies] == [1, *[setting.expert] * 4, 1]
    assert BENCH.outcome(row(model=MIXTURE, **degrees), 1).step_s


def test_grids_of_experts_without_a_price_are_refused():
    assert "etp = 4 is neither 1 nor tp = 2" in refusal(model=MIXTURE, ep=2, etp=4)
    assert "sequence_parallel is false" in refusal(model=MIXTURE, ep=8, etp=1, sequence_parallel=False)
    assert "ep = 1 does not divide" in refusal(model=MIXTURE, etp=1)
