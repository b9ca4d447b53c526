"""``autopar report``: the predicted step in detail adds up to the plan's totals, and the page holds its figures as data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, browser, missing
from click.testing import CliRunner
from places import ROOT
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cli.app import cli
from autopar.devices import Cluster, parse
from autopar.devices.figures import cluster_figures
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan, Role, Strategy
from autopar.price import Pricer
from autopar.report import PlanFigures, PredictedStep, page, predict_step
from autopar.report.figures import MAX_ACTIONS, figures
from autopar.search import evaluate, manual_plan
from autopar.shard import annotate
from autopar.summary import parallelism
from autopar.units import seconds, size

WEB = ROOT / "autopar" / "report" / "web"
MLP = f"{ROOT}/examples/mlp.py:model"
HOSTILE = (
    "</script><script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">{{script}}<!--"
)


class Block(nn.Module):
    """Two products around a nonlinearity, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(256) for _ in range(8)))
        batch = torch.empty(64, 256), torch.empty(64, 256)
    return annotate(capture(model, batch, nn.functional.mse_loss, name="blocks"))


def priced(graph: Graph, cluster: Cluster, **pins: Any) -> tuple[Plan, Pricer]:
    pricer = Pricer(graph, cluster, "float32")
    written = manual_plan(graph, **pins)
    bounds = [stage.start for stage in written.stages] + [len(written.layers)]
    strategies = [layer.strategy for layer in written.layers]
    plan = evaluate(
        graph, cluster, pricer, mesh=written.mesh, stage_bounds=bounds, strategies=strategies,
        schedule=written.sized_schedule, precision="float32",
    )  # fmt: skip
    return plan, pricer


PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 4, "data": 2, "microbatches": 8, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "data": 2, "tensor": 2, "microbatches": 8, "schedule": "interleaved-1f1b", "chunks": 2},
    "zero-bubble": {"pipeline": 4, "tensor": 2, "microbatches": 8, "schedule": "zero-bubble"},
    "chimera": {"pipeline": 4, "data": 2, "microbatches": 8, "schedule": "chimera"},
    "one stage": {"tensor": 2, "data": 4, "microbatches": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def subjects(graph: Graph) -> dict[str, tuple[Plan, PredictedStep]]:
    cluster = parse("2x4xH100-80GB")
    found = {}
    for name, pins in PLANS.items():
        plan, pricer = priced(graph, cluster, **pins)
        found[name] = plan, predict_step(graph, cluster, pricer, plan)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_the_step_in_detail_adds_up_to_the_plan(subjects: dict[str, tuple[Plan, PredictedStep]], name: str):
    plan, step = subjects[name]
    assert step.step_time_s == plan.prediction.step_time_s
    assert max(a.stop_s for actions in step.actions for a in actions) == pytest.approx(step.step_time_s)
    kinds = len(step.actions) and {a.kind for actions in step.actions for a in actions}
    assert kinds == ({"F", "I", "W", "O", "B"} & kinds) and {"F", "O"} < kinds
    forwards = [(a.stage, a.microbatch) for actions in step.actions for a in actions if a.kind == "F"]
    assert sorted(forwards) == [(s, m) for s in range(len(plan.stages)) for m in range(plan.microbatches)]
    for rank, actions in enumerate(step.actions):
        ends = [a.stop_s for a in actions]
        assert all(a.start_s >= end - 1e-12 for a, end in zip(actions[1:], ends, strict=False))
        stage = plan.stages[plan.sized_schedule.stages_of(rank)[0]] if plan.schedule != "chimera" else plan.stages[rank]
        assert max(a.memory.total for a in actions) == stage.memory.total
        parts = figures(PlanFigures("p", plan, step))["step"]["time"][rank]
        assert sum(parts.values()) == pytest.approx(step.step_time_s) and min(parts.values()) >= -1e-12
    sends = [a.send for actions in step.actions for a in actions if a.send is not None]
    crossings = sum(
        a != b for a, b in zip(plan.sized_schedule.rank_of_stage, plan.sized_schedule.rank_of_stage[1:], strict=False)
    )
    assert len(sends) == 2 * plan.microbatches * crossings
    between = [one for one in step.traffic if one.axis == "pipeline"]
    assert sum(one.bytes for one in between) * plan.pipeline == pytest.approx(sum(send.bytes for send in sends))


def test_traffic_is_what_the_prices_of_layers_contain(graph: Graph):
    """Without data parallelism and with nothing hidden, exposed seconds are the collectives' seconds."""
    cluster = parse("2x4xH100-80GB")
    for recompute in ("none", "full"):
        plan, pricer = priced(graph, cluster, tensor=8, microbatches=4, overlap="none", recompute=recompute)
        step = predict_step(graph, cluster, pricer, plan)
        exposed = plan.microbatches * sum(price.communication_s for price in step.prices)
        assert {one.axis for one in step.traffic} == {"tensor"} and all(one.spans_nodes for one in step.traffic)
        assert sum(one.seconds for one in step.traffic) == pytest.approx(exposed)
    plan, pricer = priced(graph, cluster, data=8, zero=1)
    (gather, reduce) = predict_step(graph, cluster, pricer, plan).traffic
    elements = sum(p.numel() for p in nn.Sequential(*(Block(256) for _ in range(8))).parameters())
    assert (gather.purpose, gather.collective) == ("gradients", "reduce_scatter")
    assert gather.bytes == reduce.bytes == pytest.approx(4 * elements * 7 / 8)


def test_a_cut_down_page_says_so(subjects: dict[str, tuple[Plan, PredictedStep]]):
    plan, step = subjects["1f1b"]
    whole = figures(PlanFigures("p", plan, step))["step"]
    assert whole["left_out"] == "" and sum(len(rank["starts_us"]) for rank in whole["ranks"]) == whole["actions"] == 68
    fewer = figures(PlanFigures("p", plan, step), max_actions=40)["step"]
    assert [rank["rank"] for rank in fewer["ranks"]] == [0, 3] and len(fewer["time"]) == 4
    assert fewer["left_out"].startswith("2 of 4 pipeline ranks are drawn: the step has 68 actions.")
    least = figures(PlanFigures("p", plan, step), max_actions=10)["step"]
    assert "the first 5 of 17 actions of each" in least["left_out"] and len(least["ranks"][1]["starts_us"]) == 5


def test_the_largest_page_is_below_two_megabytes(subjects: dict[str, tuple[Plan, PredictedStep]]):
    plan, step = subjects["zero-bubble"]
    times = MAX_ACTIONS // sum(map(len, step.actions))
    longer = dataclasses.replace(step, actions=tuple(actions * times for actions in step.actions))
    text = page([PlanFigures("p", plan, longer, provenance=cluster_figures(parse("2x4xH100-80GB")))])
    assert '"left_out":""' in text and len(text.encode()) < 2_000_000


class Outline(HTMLParser):
    """The elements of a document, and what its scripts of data hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[Any] = []
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_data = dict(attrs).get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data.append(json.loads(data))
            self._in_data = False


def hostile(plan: Plan) -> Plan:
    layers = [dataclasses.replace(layer, name=f"{i}{HOSTILE}", cls=HOSTILE) for i, layer in enumerate(plan.layers)]
    return dataclasses.replace(plan, layers=tuple(layers), model=HOSTILE, devices=HOSTILE, notes=(HOSTILE,))


def test_names_are_data_and_nothing_is_loaded(subjects: dict[str, tuple[Plan, PredictedStep]]):
    plan, step = subjects["interleaved"]
    found = Outline(page([PlanFigures(HOSTILE, hostile(plan), step)]))
    tags = [tag for tag, _ in found.tags]
    assert tags.count("script") == 2 and "img" not in tags and "link" not in tags and "iframe" not in tags
    assert not [attrs for _, attrs in found.tags if {"src", "href"} & set(attrs) and attrs.get("href") != "#main"]
    policy = next(attrs["content"] for _, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "http" not in policy
    (data,) = found.data
    assert data["plans"][0]["layers"][3][0] == f"3{HOSTILE}" and data["plans"][0]["notes"] == [HOSTILE]


def test_the_script_is_built_from_the_lock_file_and_the_sources():
    script = resources.files("autopar.report").joinpath("page.min.js").read_text("utf-8")
    banner, lock = script[: script.index("*/")], (WEB / "package-lock.json").read_bytes()
    assert f"lock file sha256 {hashlib.sha256(lock).hexdigest()}\n" in banner, "make page"
    sources = b"".join(path.read_bytes() for path in sorted(WEB.glob("*.js")))
    assert f"sources sha256 {hashlib.sha256(sources).hexdigest()}\n" in banner, "make page"
    packages = json.loads(lock)["packages"]  # only the bundler: no other project's code is in the script
    assert {name for name, entry in packages.items() if name and not entry.get("dev")} == set()
    assert "</script" not in script.lower()
    assert not re.search(r"\beval\(|innerHTML|new Function|import\(", script[len(banner) :])


def test_the_command_writes_one_plan_two_plans_and_a_plan_without_its_model(tmp_path: Path):
    def invoke(*arguments: str) -> str:
        return CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout

    file, out = tmp_path / "plan.json", tmp_path / "report.html"
    file.write_text(
        invoke("price", MLP, "--devices", "8xH100-80GB", "--pipeline", "2", "--microbatches", "4", "--json")
    )
    assert invoke("report", str(file), "-o", str(out)) == f"{out}\n"
    (alone,) = Outline(out.read_text()).data
    assert alone["plans"][0]["step"] is None and "--model" in alone["plans"][0]["missing"][0]
    named, picture = ("--model", MLP, "--devices", "8xH100-80GB"), tmp_path / "both.png"
    with pytest.raises(UsageError, match="does not name its model"):
        invoke("report", str(file), "-o", str(out), "--plot", str(picture))
    invoke("report", str(file), str(file), "-o", str(out), *named, "--plot", str(picture))
    assert picture.stat().st_size > 10_000
    (both,) = Outline(out.read_text()).data
    first, second = both["plans"]
    assert first["step"] == second["step"] and first["missing"] == [] and len(first["provenance"]) > 40
    assert first["parallelism"].startswith("PP 2 x ") and first["command"].startswith("autopar plan ") == bool(
        json.loads(file.read_text())["request"].get("model")
    )
    last = first["step"]["ranks"][1]
    assert len(last["starts_us"]) == 9 and max(sum(level) for level in last["levels"]) == max(
        sum(stage["memory"].values()) for stage in first["stages"] if stage["rank"] == 1
    )


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if why := missing():
        pytest.skip(why)
    with browser() as session:
        yield session


def show(chromium: Browser, file: Path, *figures_: PlanFigures, width: int = 1280, dark: bool = False) -> None:
    """Open the page of these plans."""
    file.write_text(page(figures_))
    chromium.view(width, 900, dark, width < 600)
    chromium.open(file)
    assert chromium.run("return document.documentElement.dataset.ready") == "yes"


def texts(chromium: Browser, selector: str) -> list[str]:
    found: list[str] = chromium.run(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent.replaceAll('\u00a0', ' '))",
        selector,
    )
    return found


def test_the_page_in_a_browser(
    chromium: Browser, subjects: dict[str, tuple[Plan, PredictedStep]], tmp_path: Path
) -> None:
    (plan, step), (other, other_step) = subjects["interleaved"], subjects["zero-bubble"]
    file = tmp_path / "page.html"
    chromium.requests()
    for width, dark in ((1280, False), (390, True)):
        show(
            chromium,
            file,
            PlanFigures(HOSTILE, hostile(plan), step, command=HOSTILE),
            PlanFigures("b", other, other_step),
            width=width,
            dark=dark,
        )
        chromium.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert chromium.run("return document.documentElement.scrollWidth") == width
        assert chromium.complaints() == [] and chromium.requests() == [file.resolve().as_uri()]
    assert chromium.run("return document.querySelectorAll('canvas').length") == 2
    assert (
        HOSTILE in chromium.run("return document.body.textContent")
        and "stolen" not in chromium.run("return document.title")[:6]
    )
    assert chromium.run("return document.querySelectorAll('img').length") == 0
    live = "return document.getElementById('live').textContent"
    chromium.run("document.querySelector('.timeline').focus()")
    chromium.keys(["down", "right", "right"])
    assert re.match(r"(forward|bubble).*pipeline rank 0 \(devices 0 to 3\)\. .*", chromium.run(live))
    chromium.keys(["down"])
    assert "pipeline rank 1 (devices 4 to 7)" in chromium.run(live)


def test_the_headline_is_the_strategy_and_no_figure_has_two_tiles(
    chromium: Browser, subjects: dict[str, tuple[Plan, PredictedStep]], tmp_path: Path
) -> None:
    plan, step = subjects["one stage"]
    plan = dataclasses.replace(plan, allow=("bfloat16_moments",))
    show(chromium, tmp_path / "page.html", PlanFigures("p", plan, step, command="autopar plan 'a b' --devices 8"))
    assert texts(chromium, ".headline .note") == ["Not exact: bfloat16 moments"]
    assert texts(chromium, "h1") == [parallelism(plan)] and parallelism(plan).startswith("DP 4 x TP 2")
    names = texts(chromium, ".cards dt")
    assert len(names) == len(set(names)) == 6 and len(texts(chromium, ".cards")) == 1
    step_time = texts(chromium, ".cards dd")[0]
    assert step_time.startswith(seconds(plan.prediction.step_time_s))
    chromium.devtools("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    chromium.run("document.querySelector('.copy').click()")
    chromium.wait("document.querySelector('.copy').textContent === 'Copied'")
    assert chromium.run("return navigator.clipboard.readText()") == "autopar plan 'a b' --devices 8"


def test_the_cluster_has_a_tile_for_each_distinct_gpu(
    chromium: Browser, graph: Graph, subjects: dict[str, tuple[Plan, PredictedStep]], tmp_path: Path
) -> None:
    labels = "return [...document.querySelectorAll('.gpu')].map((one) => one.getAttribute('aria-label'))"
    plan, step = subjects["interleaved"]  # two nodes of 4: pipeline 2 x data 2 x tensor 2
    show(chromium, tmp_path / "page.html", PlanFigures("p", plan, step))
    strides = {axis.name: axis.stride for axis in plan.mesh}
    memory = [stage.memory.total for stage in plan.stages]
    expected = [
        f"GPU {gpu}: PP {gpu // 4} (2 stages) · TP {gpu % 4 // strides['tensor'] % 2} · DP {gpu % 4 // strides['data'] % 2}, "
        f"memory {size(memory[gpu // 4])} of {size(plan.stages[0].memory_limit_bytes)}"
        for gpu in range(8)
    ]
    assert chromium.run(labels) == expected
    assert texts(chromium, ".node > text") == ["node 0", "node 1"]
    chromium.run("document.querySelector('.gpu').focus()")
    chromium.keys(["right", "right", "right", "right"])
    assert chromium.run("return document.activeElement.getAttribute('aria-label')") == expected[4]
    assert "GPU 4" in texts(chromium, ".gpu-detail h3")[0]

    large, _ = priced(graph, parse("32x4xH100-80GB"), pipeline=2, data=32, tensor=2, microbatches=2)
    show(chromium, tmp_path / "page.html", PlanFigures("p", large), width=390)
    distinct = chromium.run(labels)  # 32 nodes, which differ in their stage and else only in their data-parallel ranks
    assert len(distinct) == len(set(distinct)) == 8 and {one.split(":")[0] for one in distinct} == {"16 GPUs"}
    assert texts(chromium, ".node > text") == ["nodes 0–15", "nodes 16–31"]
    assert "stage 1 · TP 1 · DP 1, 3 … 31" in distinct[7]


def test_a_gpu_has_the_strategy_of_most_layers_of_its_rank_and_the_exceptions(
    chromium: Browser, subjects: dict[str, tuple[Plan, PredictedStep]], tmp_path: Path
) -> None:
    plan, _ = subjects["interleaved"]
    of_rank_1 = {i for s in plan.sized_schedule.stages_of(1) for i in range(plan.stages[s].start, plan.stages[s].stop)}
    zero = {i: 3 if i == 0 else 1 if i in of_rank_1 else 0 for i in range(len(plan.layers))}
    layers = tuple(
        dataclasses.replace(layer, strategy=dataclasses.replace(layer.strategy, zero=zero[i]))
        for i, layer in enumerate(plan.layers)
    )
    mixed = dataclasses.replace(plan, layers=layers)
    first, second = figures(PlanFigures("p", mixed))["ranks"]["own"]
    names = [layer.name for i, layer in enumerate(plan.layers) if i and i not in of_rank_1]
    assert [own["zero"] for own in (first, second)] == [0, 1] and "ZeRO" not in first["groups"]
    assert first["strategies"] == [("DP 2 x TP 2, ZeRO 0", names), ("DP 2 x TP 2, ZeRO 3", [plan.layers[0].name])]
    assert [text for text, _ in second["strategies"]] == ["DP 2 x TP 2, ZeRO 1"]

    show(chromium, tmp_path / "page.html", PlanFigures("p", mixed))
    held = dict(zip(texts(chromium, ".holds dt"), texts(chromium, ".holds dd"), strict=True))
    assert held[f"{len(names)} of {len(names) + 1} layers"] == "DP 2 x TP 2, ZeRO 0"
    assert held[plan.layers[0].name] == "DP 2 x TP 2, ZeRO 3"
    chromium.run("document.querySelectorAll('.gpu')[7].dispatchEvent(new Event('focus'))")
    held = dict(zip(texts(chromium, ".holds dt"), texts(chromium, ".holds dd"), strict=True))
    assert held["ZeRO 1"] == "shard 1 of 2: optimizer states" and not any(" of " in name for name in held)


def test_memory_over_the_step_is_that_of_the_fullest_rank(
    chromium: Browser, subjects: dict[str, tuple[Plan, PredictedStep]], tmp_path: Path
) -> None:
    plan, step = subjects["1f1b"]
    show(chromium, tmp_path / "page.html", PlanFigures("p", plan, step))
    fullest = max(range(4), key=lambda rank: max(a.memory.total for a in step.actions[rank]))
    assert chromium.run("return document.querySelector('#memory select').selectedIndex") == fullest
    peak = max((a.memory for a in step.actions[fullest]), key=lambda memory: memory.total)
    readout = texts(chromium, "#memory .readout")[0]
    assert f"peak {size(peak.total)} of {size(step.limits_bytes[fullest])}" in readout
    assert texts(chromium, "#memory .readout b")[1:] == [size(value) for value in dataclasses.asdict(peak).values()]
    assert chromium.run("return document.querySelectorAll('#memory path').length") == 5
    whole = chromium.run("return document.querySelector('#memory path').getAttribute('d')")
    # the charts show the same part of the step
    chromium.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
    assert chromium.run("return document.querySelector('#memory path').getAttribute('d')") != whole
    x, y = chromium.run(
        "const box = document.querySelector('#memory .chart'); box.scrollIntoView({ block: 'center' });"
        "const found = box.getBoundingClientRect(); return [found.x + found.width / 2, found.y + found.height / 2]"
    )
    chromium.hover(x, y)
    assert (
        "peak" not in texts(chromium, "#memory .readout")[0] and "microbatch" in texts(chromium, "#memory .readout")[0]
    )


def test_two_plans_side_by_side_differ_by_component(
    chromium: Browser, subjects: dict[str, tuple[Plan, PredictedStep]], tmp_path: Path
) -> None:
    (plan, step), (other, other_step) = subjects["1f1b"], subjects["one stage"]
    show(chromium, tmp_path / "page.html", PlanFigures("a", plan, step), PlanFigures("b", other, other_step))
    rows = chromium.run(
        "return [...document.querySelectorAll('#comparison tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    found = {row[0]: row[1:] for row in rows}
    a, b = (max((stage.memory for stage in one.stages), key=lambda memory: memory.total) for one in (plan, other))
    for part, words in (("parameters", "parameters"), ("optimizer", "optimizer states"), ("total", "total")):
        before, after = getattr(a, part), getattr(b, part)
        sign = "+" if after > before else "−"
        assert found[words][:3] == [size(before), size(after), f"{sign}{size(abs(after - before))}"]
    difference = other.prediction.step_time_s - plan.prediction.step_time_s
    assert found["one step"][2] == f"{'+' if difference > 0 else '−'}{seconds(abs(difference))}"
    assert found["PP"][:2] == ["4", "1"] and found["TP"][:2] == ["1", "2"] and found["schedule"][:2] == ["1f1b", "none"]
    assert texts(chromium, ".heads h2") == [parallelism(plan), parallelism(other)]


def test_the_page_shows_every_size_of_memory_that_the_plan_names(
    chromium: Browser, graph: Graph, tmp_path: Path
) -> None:
    """Optimizer states of stage 0 are in the host's memory, those of stage 1 on NVMe; limits are shown where the devices are known."""
    (tmp_path / "drives.toml").write_text(
        'gpu = "H100-80GB"\nnvme_gb = 2000\nnvme_read_gb_per_s = 6\nnvme_write_gb_per_s = 3\nnvme_path = "/drives/0"'
    )
    cluster = parse(str(tmp_path / "drives.toml"))
    drives = {i: Strategy((Role.DATA,), states="nvme", activations="host") for i in range(4, 8)}
    plan, pricer = priced(graph, cluster, pipeline=2, data=4, microbatches=4, states="host", strategies=drives)
    assert plan.stages[0].host_bytes > 0 == plan.stages[0].nvme_bytes and plan.stages[1].nvme_bytes > 0
    both = PlanFigures("file", plan), PlanFigures("step", plan, predict_step(graph, cluster, pricer, plan))
    limits = {size(cluster.host_limit_bytes), size(cluster.nvme_limit_bytes)}
    for subject in both:
        file = tmp_path / "page.html"
        file.write_text(page([subject]))
        for width, dark in ((1280, False), (390, True)):
            chromium.view(width, 900, dark, width < 600)
            chromium.open(file)
            assert chromium.run("return document.documentElement.scrollWidth") == width and chromium.complaints() == []
            tables = "[...document.querySelectorAll('#memory table')].slice(0, 2)"
            cells = chromium.run(
                f"return {tables}.flatMap((t) => [...t.querySelectorAll('td')].map((c) => c.textContent))"
            )
            for stage in plan.to_json()["stages"]:
                named = {name: value for name, value in stage.items() if name.endswith("_bytes")}
                named |= named.pop("memory_by_part_bytes")
                assert len(named) == 9 and all(size(value) in cells for value in named.values()), (named, cells)
            assert limits & set(cells) == (limits if subject.step else set()), cells
            assert "/drives/0" in chromium.run("return document.getElementById('memory').textContent")
    details = chromium.run("return document.getElementById('layers').textContent")
    assert all(words in details for words in ("optimizer in the host", "optimizer on NVMe", "saved in the host"))
