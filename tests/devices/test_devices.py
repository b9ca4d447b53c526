"""What a user writes for devices, and the figures that come of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from autopar.devices import Cluster, constants, gpu_names, hardware, parse
from autopar.devices.constants import Constant
from autopar.devices.figures import cluster_figures
from autopar.errors import DeviceError
from autopar.memory import machine_memory_bytes
from autopar.plan import Axis
from autopar.price.collectives import group, group_time_s, p2p_s
from autopar.types import Collective


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "gpu"),
    [
        ("8xH100-80GB", 1, 8, "H100-80GB-SXM"),
        ("2xh100", 1, 2, "H100-80GB-SXM"),
        ("128x8xH100-80GB", 128, 8, "H100-80GB-SXM"),
        ("64xA100-80GB", 8, 8, "A100-80GB-SXM"),
        ("4x8xA100-40GB", 4, 8, "A100-40GB-SXM"),
        ("8xA100", 1, 8, "A100-80GB-SXM"),
        ("4xA100-80GB-PCIE", 1, 4, "A100-PCIE-80GB"),
        ("16x4xV100-32GB", 16, 4, "V100-32GB-SXM2"),
        ("8xH200", 1, 8, "H200-141GB-SXM"),
        ("8xB200", 1, 8, "B200-180GB-SXM"),
        ("8xB300", 1, 8, "B300-288GB-SXM"),
        ("8xGB200", 2, 4, "GB200"),
        ("2xRTX-4090", 1, 2, "RTX4090"),
        ("72xGB300", 18, 4, "GB300"),
        ("8xMI325X", 1, 8, "MI325X"),
        ("8xMI350X", 1, 8, "MI350X"),
        ("8xMI355X", 1, 8, "MI355X"),
        ("8xH20", 1, 8, "H20-96GB-SXM"),
        ("8xH20-141GB", 1, 8, "H20-141GB-SXM"),
        ("2xRTX-5090", 1, 2, "RTX5090"),
    ],
)
def test_text(text, nodes, per_node, gpu):
    cluster = parse(text)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name, cluster.kind) == (nodes, per_node, gpu, "cuda")
    assert cluster.count == nodes * per_node and not cluster.local and str(cluster) == text


def test_h100_figures_are_the_files():
    cluster = parse("2x8xH100-80GB")
    assert cluster.gpu.peak_flops["bfloat16"] == 989e12 and cluster.gpu.peak_flops["float32"] == 67e12
    # the best product of a short benchmark, and what a power-limited part sustains of it
    assert cluster.gpu.flops_per_s("bfloat16") == pytest.approx(794.5e12 * constants.SUSTAINED.value)
    assert cluster.gpu.memory_bytes == 80 * 2**30
    assert cluster.memory_limit_bytes == int(80 * 2**30 * constants.USABLE_MEMORY.value)
    # one device's share of the node's 400 GB/s, at 90 %
    assert cluster.inter.bytes_per_s == pytest.approx(400e9 / 8 * 0.9)
    assert cluster.intra.bytes_per_s == pytest.approx(450e9 * 0.65)
    assert dict(cluster.gpu.sources)["bf16"].startswith("stas00/ml-engineering")


def test_kinds_of_a_generation_sustain_the_measured_fraction_of_their_peaks():
    """All kinds of Blackwell's servers have the fraction of the one that was measured, in products and in copies."""
    b200 = parse("8xB200").gpu
    assert b200.flops_per_s("bfloat16") == pytest.approx(1097.6e12)
    for name in ("B300", "GB200", "GB300"):
        gpu = parse(f"8x{name}").gpu
        assert gpu.matmul_efficiency == pytest.approx(b200.matmul_efficiency)
        assert gpu.memory_efficiency == b200.memory_efficiency
    shown = {row["figure"]: row["source"] for row in cluster_figures(parse("8xGB200"))}
    assert "B200-180GB-SXM" in shown["sustained products"]


def test_products_in_8_bits_reach_what_a_benchmark_in_8_bits_does(tmp_path):
    """Training reaches as much of it as of the benchmark in bfloat16; a kind without one reaches the same fractions in both."""
    h100, b200, gb300 = (parse(f"8x{name}").gpu for name in ("H100-80GB", "B200", "GB300"))
    assert h100.flops_per_s("float8") == h100.flops_per_s("float8_blockwise")
    assert h100.flops_per_s("float8") == pytest.approx(1402.6e12 * constants.SUSTAINED.value)
    assert b200.flops_per_s("float8") == pytest.approx(3432.5e12 * 1097.6 / 1745)
    assert gb300.flops_per_s("float8") == pytest.approx(b200.flops_per_s("float8") * 5000 / 4500)
    assert b200.flops_per_s("mxfp8") == b200.flops_per_s("float8")
    # cuBLAS has no blockwise scaling there, and Hopper no MXFP8: their products are bfloat16's
    assert h100.flops_per_s("mxfp8") == h100.flops_per_s("bfloat16")
    assert b200.flops_per_s("float8_blockwise") == b200.flops_per_s("bfloat16")
    for name in ("A100-80GB", "MI300X"):
        gpu = parse(f"8x{name}").gpu
        assert gpu.flops_per_s("float8") == pytest.approx(gpu.peak_flops["float8"] * gpu.matmul_efficiency)
    path = tmp_path / "cluster.toml"
    path.write_text(
        'gpu = "H100-80GB"\npeak_bf16_tflops = 800\n'
    )  # another part: its products in 8 bits are bfloat16's
    assert parse(str(path)).gpu.flops_per_s("float8") == parse(str(path)).gpu.flops_per_s("bfloat16")
    shown = {row["figure"]: row["source"] for row in cluster_figures(parse("8xH100-80GB"))}
    assert "achievable matmul" in shown["sustained float8"]


def test_rates_in_8_bits_are_the_files_or_those_in_16(tmp_path):
    for name, tflops in (
        ("H100-80GB", 1979),
        ("B200-180GB", 4500),
        ("B300", 4500),
        ("A100-80GB", 312),
        ("V100-32GB", 125 / 8),
        ("GB300", 5000),
        ("MI355X", 5000),
        ("H20", 296),
        ("RTX-5090", 419),
        ("RTX-4090", 330.3),
    ):
        assert parse(f"8x{name}").gpu.peak_flops["float8"] == tflops * 1e12
    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "A100-80GB"\npeak_fp8_tflops = 700\n')
    assert parse(str(path)).gpu.peak_flops == parse("8xA100-80GB").gpu.peak_flops | {"float8": 700e12}
    path.write_text('gpu = "X1"\nmemory_gb = 1\nmemory_gb_per_s = 1\npeak_bf16_tflops = 10\npeak_fp8_tflops = 30\n')
    assert parse(str(path)).gpu.peak_flops["float8"] == 30e12


def test_nvlink_connects_the_nodes_of_a_domain(tmp_path):
    known = parse("64xGB200")
    assert (known.nodes, known.gpus_per_node, known.nvlink_domain, known.linked_gpus) == (16, 4, 72, 64)
    assert parse("288xGB200").linked_gpus == parse("288xGB300").linked_gpus == 72
    assert parse("64xH100").linked_gpus == 8
    path = tmp_path / "rack.toml"
    path.write_text('nodes = 16\ngpus_per_node = 4\ngpu = "H100"\nnvlink_domain = 32\n')
    assert (parse(str(path)).linked_gpus, parse(str(path)).gpus_per_node) == (32, 4)
    # two groups of one kind are in two domains
    path.write_text("".join('[[group]]\nnodes = 4\ngpus_per_node = 4\ngpu = "GB200"\n' for _ in range(2)))
    assert parse(str(path)).linked_gpus == 16


def test_a_gpu_without_bfloat16_or_nvlink_has_its_own_figures():
    assert parse("4xV100-32GB").gpu.peak_flops["bfloat16"] == 125e12 / 8
    assert parse("4xL40S").intra.bytes_per_s == pytest.approx(31e9 * 0.65)


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_of_the_file_parses_by_its_own_name(name):
    cluster = parse(f"2x4x{name}")
    assert cluster.gpu.name == name and cluster.inter.bytes_per_s > 0 and cluster.gpu.flops_per_s("float64") > 0


@pytest.mark.parametrize("name", gpu_names())
def test_every_figure_of_a_kind_has_its_source(name):
    entry = hardware.table()[name]
    keys = {"peak_bf16": "bf16", "peak_fp16": "fp16", "peak_fp8": "fp8", "peak_fp32": "fp32", "peak_tf32": "fp32"}
    keys |= {"peak_fp8_blockwise": "fp8_blockwise", "peak_mxfp8": "mxfp8"}
    keys |= {key: key for key in ("hbm", "nvlink_domain", "inter_node", "host", "sustained_as")}
    keys |= {"nvlink_gb": "nvlink", "sustained_matmul": "sustained", "achievable_matmul_fp8": "achievable_fp8"}
    keys |= {"vendor_attention_speedup": "vendor_attention"}
    wanted = {source for figure in entry for key, source in keys.items() if figure.startswith(key)}
    assert {"hbm", "host"} < wanted <= set(entry["sources"])


def test_each_rate_names_the_figure_or_the_ratio_that_it_comes_from():
    shown = {row["figure"]: row["source"] for row in cluster_figures(parse("8xH100-80GB"))}
    sources = hardware.table()["H100-80GB-SXM"]["sources"]
    assert shown["peak bfloat16"] == sources["bf16"] and shown["peak float8"] == sources["fp8"]
    assert shown["peak float32"] == shown["peak tf32"] == sources["fp32"]
    assert shown["peak float64"].startswith("FP64_OVER_BF16: ")
    volta = {row["figure"]: row["source"] for row in cluster_figures(parse("8xV100-32GB"))}
    assert volta["peak float16"] == hardware.table()["V100-32GB-SXM2"]["sources"]["fp16"]
    assert volta["peak float32"].startswith("FP32_OVER_FP16_VOLTA: ")


def test_a_figure_that_a_cluster_file_gives_has_the_file_for_its_source(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('gpu = "H100-80GB"\nnodes = 1\ngpus_per_node = 8\nmemory_gb_per_s = 3000\npeak_bf16_tflops = 800\n')
    shown = {row["figure"]: row["source"] for row in cluster_figures(parse(str(file)))}
    assert shown["memory bandwidth"] == shown["peak bfloat16"] == str(file)
    assert shown["peak float32"].startswith("FP32_OVER_BF16: ")
    assert shown["share of the network"] == hardware.table()["H100-80GB-SXM"]["sources"]["inter_node"]


@pytest.mark.parametrize(
    "spec",
    [0, -3, "0", "-2", "0xH100", "-1x8xH100", "8x0xH100-80GB", "H100", "8 H100", "x8", "", "1.5xH100", True, None, 2.0,
     [], ["tpu9:0"], [object()], ["cpu", "cuda:0"], "nowhere.toml", "20xH100"],
)  # fmt: skip
def test_what_is_not_a_description_is_refused_with_a_hint(spec):
    with pytest.raises(DeviceError) as error:
        parse(spec)
    assert error.value.hint and error.value.exit_status == 2


def test_an_unknown_gpu_is_answered_with_the_nearest_names():
    with pytest.raises(DeviceError, match="H10-80GB") as error:
        parse("8xH10-80GB")
    assert error.value.hint is not None and "H100-80GB-SXM" in error.value.hint


def test_an_integer_is_processes_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    four, two = parse(4), parse("2")
    assert (four.kind, four.count, four.local, four.nodes) == ("cpu", 4, True, 1)
    assert four.gpu.memory_bytes == machine_memory_bytes() // 4
    assert abs(two.gpu.memory_bytes - 2 * four.gpu.memory_bytes) <= 2
    assert parse(["cpu", torch.device("cpu"), "cpu"]).count == 3
    with pytest.raises(DeviceError, match="cuda:1 is not on this machine"):
        parse(["cuda:1"])


def test_an_integer_is_cuda_devices_where_there_are_enough(monkeypatch):
    class Properties:
        name, total_memory = "NVIDIA H100 80GB HBM3", 85_000_000_000

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    cluster = parse(2)
    assert (cluster.kind, cluster.devices, cluster.gpu.name) == ("cuda", ("cuda:0", "cuda:1"), "H100-80GB-SXM")
    assert cluster.gpu.memory_bytes == 85_000_000_000
    assert parse(["cuda:1"]).devices == ("cuda:1",)
    assert parse(3).kind == "cpu"
    with pytest.raises(DeviceError, match="twice"):
        parse(["cuda:1", "cuda:1"])
    Properties.name = "NVIDIA GeForce GTX 980"
    with pytest.raises(DeviceError, match="GTX 980"):
        parse(1)


@pytest.mark.parametrize(
    ("driver", "memory", "name"),
    [
        ("NVIDIA H200", 150e9, "H200-141GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "A100-40GB-SXM"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "A100-80GB-SXM"),
        ("NVIDIA A100-PCIE-80GB", 85e9, "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-32GB", 34e9, "V100-32GB-SXM2"),
        ("NVIDIA GeForce RTX 4090", 25e9, "RTX4090"),
        ("NVIDIA GeForce RTX 5090", 34e9, "RTX5090"),
        ("NVIDIA B300 SXM6 AC", 288e9, "B300-288GB-SXM"),
        ("NVIDIA GB300", 297e9, "GB300"),
        ("NVIDIA H20", 102e9, "H20-96GB-SXM"),
        ("NVIDIA H20-3e", 151e9, "H20-141GB-SXM"),
        ("AMD Instinct MI325X", 274e9, "MI325X"),
        ("AMD Instinct MI355X", 309e9, "MI355X"),
    ],
)
def test_names_that_drivers_give(driver, memory, name):
    assert hardware.match_device(driver, int(memory)) == name


def test_a_file_completes_or_replaces_what_is_known(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('nodes = 2\ngpus_per_node = 4\ngpu = "H100"\ninter_node_gb_per_s = 100\nmemory_limit_gb = 70\n')
    cluster = parse(str(path))
    assert (cluster.name, cluster.count, cluster.gpu.name) == ("ours", 8, "H100-80GB-SXM")
    assert cluster.inter.bytes_per_s == pytest.approx(100e9 / 4 * 0.9) and cluster.memory_limit_bytes == 70e9
    path.write_text(
        'gpu = "Xpu"\nmemory_gb = 48\nmemory_gb_per_s = 1000\npeak_bf16_tflops = 200\nintra_latency_us = 2\n'
        "nvlink_gb_per_s = 100\n"
    )
    cluster = parse(path)
    assert cluster.gpu.peak_flops["bfloat16"] == 200e12 and cluster.gpu.memory_bytes == 48 * 2**30
    assert cluster.intra.latency_s == 2e-6 and cluster.intra.bytes_per_s == pytest.approx(65e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu = ", "is not TOML"),
        ("nodes = 2", "does not name the GPU"),
        ('gpu = "H100"\nnode = 2', "unknown key 'node'"),
        ('gpu = "H100"\nnodes = 0', "nodes = 0"),
        ('gpu = "H100"\nnodes = true', "nodes = True"),
        ('gpu = "H100"\nnvlink_gb_per_s = -1', "nvlink_gb_per_s = -1"),
        ('gpu = "H100"\nmemory_gb = "80"', "memory_gb = '80'"),
        ('gpu = "Xpu"\nmemory_gb = 80', "'Xpu' is not known"),
        ("gpu = 8", "gpu = 8 is not a name"),
        ('gpu = "H100"\nlocal = 1', "local = 1"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=message) as error:
        parse(path)
    assert error.value.hint


def test_a_memory_limit_is_the_users_word():
    assert parse("8xH100-80GB", memory_limit_bytes=10**10).memory_limit_bytes == 10**10
    with pytest.raises(DeviceError, match="-1 bytes"):
        parse("8xH100-80GB", memory_limit_bytes=-1)
    cluster = parse("8xH100-80GB")
    assert parse(cluster) is cluster


def test_every_constant_has_a_unit_and_a_source():
    found = [value for value in vars(constants).values() if isinstance(value, Constant)]
    assert len(found) > 10
    for constant in found:
        assert constant.value > 0 and constant.unit
        assert constant.source.split()[0].rstrip(":,") in (
            "assumed",
            "published",
            "measured",
            "library",
            "vendor",
            "fitted",
        )
    assert [f.name for f in fields(Constant)] == ["value", "unit", "source"]


def test_a_description_is_read_without_torch():
    code = "import sys; from autopar.devices import parse; parse('8xH100-80GB'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("devices", ["0", "-4", "9999999", "0x8xH100-80GB", "8xNOPE", "9" * 5000])
def test_the_command_line_refuses_devices_without_torch(devices):
    code = (
        "import sys\nfrom autopar.cli.app import cli\nfrom autopar.errors import DeviceError\n"
        "try:\n    cli.main(['plan', 'llama3-8b', '--devices', sys.argv[1]], standalone_mode=False)\n"
        "except DeviceError:\n    sys.exit('torch' in sys.modules)\nsys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code, devices]).returncode == 0


TWO_KINDS = """
name = "two generations"
between_gb_per_s = 40
[[group]]
nodes = 2
gpu = "H100-80GB"
[[group]]
nodes = 1
gpu = "A100-40GB-SXM"
memory_limit_gb = 30
"""


class TestGroups:
    def cluster(self, tmp_path: Path, text: str = TWO_KINDS) -> Cluster:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return parse(str(path))

    def test_stages_take_devices_in_order(self, tmp_path: Path) -> None:
        cluster = self.cluster(tmp_path)
        assert (cluster.count, cluster.nodes, cluster.memory_limit_bytes) == (24, 3, int(30e9))
        assert [stage.gpu.name for stage in cluster.stages(3)] == ["H100-80GB-SXM", "H100-80GB-SXM", "A100-40GB-SXM"]
        assert [stage.memory_limit_bytes > 60e9 for stage in cluster.stages(3)] == [True, True, False]
        whole, half = cluster.stages(1)[0], cluster.stages(2)[1]
        assert "+" in whole.gpu.name and "+" in half.gpu.name and cluster.stages(2)[0].gpu.name == "H100-80GB-SXM"
        assert whole.gpu.bytes_per_s == min(part.gpu.bytes_per_s for part in cluster.parts)
        assert cluster.peak_flops("bfloat16") == sum(p.count * p.gpu.peak_flops["bfloat16"] for p in cluster.parts)

    def test_what_is_sent_from_group_to_group_crosses_their_link(self, tmp_path: Path) -> None:
        inside, over = self.cluster(tmp_path).borders(3)
        assert over.inter.bytes_per_s < inside.inter.bytes_per_s / 4
        assert p2p_s(1e9, over, True) > 4 * p2p_s(1e9, inside, True)

    def test_collectives_across_pods_cross_the_slow_link(self, tmp_path: Path) -> None:
        pods = '[[group]]\nnodes = 2\ngpu = "H100-80GB"\n[[group]]\nnodes = 2\ngpu = "H100-80GB"\n'
        slow = self.cluster(tmp_path, "between_gb_per_s = 20\n" + pods)
        flat = parse("4x8xH100-80GB")
        outer, inner = Axis("pods", 2, 16), Axis("inside", 16, 1)

        def seconds(cluster: Cluster, axes: tuple[Axis, ...], what: Collective) -> float:
            return group_time_s(what, 1e9, group(axes, cluster), cluster)

        for what in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.SHIFT):
            assert seconds(slow, (outer,), what) > 4 * seconds(flat, (outer,), what)
            assert seconds(slow, (inner,), what) == pytest.approx(seconds(flat, (inner,), what))
            assert seconds(slow, (outer, inner), what) > 1.05 * seconds(flat, (outer, inner), what)

    def test_pods_that_are_alike_price_alike(self, tmp_path: Path) -> None:
        pods = '[[group]]\nnodes = 2\ngpu = "H100-80GB"\n[[group]]\nnodes = 1\ngpu = "H100-80GB"\n'
        first, second, third = self.cluster(tmp_path, pods).stages(3)
        assert first == second and first.gpu == third.gpu

    def test_a_limit_for_all_goes_before_those_of_the_groups(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.toml"
        path.write_text(TWO_KINDS)
        limited = parse(str(path), memory_limit_bytes=10)
        assert {stage.memory_limit_bytes for p in (1, 2, 3) for stage in limited.stages(p)} == {10}

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("group = 3", "not a list of tables"),
            ("group = []", "not a list of tables"),
            ('nodes = 2\n[[group]]\ngpu = "H100-80GB"', "unknown key 'nodes'"),
            ("[[group]]\nnodes = 2", "does not name the GPU"),
            ('[[group]]\ngpu = "H100-80GB"\nlocal = true', "unknown key 'local'"),
            ('between_gb_per_s = 0\n[[group]]\ngpu = "H100-80GB"', "not a positive number"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(DeviceError, match=words):
            self.cluster(tmp_path, text)


def test_a_devices_share_of_its_nodes_drives(tmp_path: Path) -> None:
    path, usable = tmp_path / "cluster.toml", constants.USABLE_NVME.value
    drives = 'nvme_gb = 8000\nnvme_read_gb_per_s = 20\nnvme_write_gb_per_s = 10\nnvme_path = "/nvme"\n'
    path.write_text('gpu = "H100-80GB"\n' + drives)
    file = parse(str(path))
    assert file.has_nvme and file.nvme_path == "/nvme" and file.nvme_limit_bytes == int(8e12 * usable) // 8
    assert file.nvme_s(read=20e9, written=0) == pytest.approx(8) and file.nvme_s(0, 20e9) == pytest.approx(16)
    path.write_text('gpu = "cpu"\ngpus_per_node = 2\n' + drives)
    assert parse(str(path)).nvme_limit_bytes == int(8e12 * usable) // 2
    # none, or those that a pin has assumed
    assert not parse("8xH100-80GB").has_nvme and not parse("8xH100-80GB").nvme_path
    assert parse("8xH100-80GB").nvme_limit_bytes == int(constants.DEFAULT_NVME_BYTES.value * usable) // 8
    other = '[[group]]\ngpu = "A100-40GB-SXM"\n'
    path.write_text('[[group]]\ngpu = "H100-80GB"\n' + drives + other)
    assert not parse(str(path)).has_nvme
    path.write_text(
        '[[group]]\ngpu = "H100-80GB"\n' + drives + other + drives.replace("8000", "500").replace("= 20", "= 30")
    )
    mixed = parse(str(path))
    assert mixed.nvme_limit_bytes == int(5e11 * usable) // 8 and mixed.nvme_s(20e9, 0) == pytest.approx(8)
    for text, words in (
        ("nvme_gb = 1", "has nvme_gb, and not nvme_read_gb_per_s"),
        ("nvme_gb = 0", "is not a positive number"),
    ):
        path.write_text(f'gpu = "H100-80GB"\n{text}')
        with pytest.raises(DeviceError, match=words):
            parse(str(path))


def test_a_devices_share_of_its_host(tmp_path):
    host = constants.HOST_MEMORY_EFFICIENCY.value, constants.USABLE_HOST_MEMORY.value
    eight, one = parse("8xH100-80GB"), parse("1xH100-80GB")
    assert one.host_limit_bytes == int(2048 * 2**30 * host[1]) and eight.host_limit_bytes == one.host_limit_bytes // 8
    assert one.host_bytes_per_s == 8 * eight.host_bytes_per_s == 614.4e9 * host[0]
    # alone a device has its link to itself; eight share the memory behind their links, which is read and written at once
    assert one.host_link_bytes_per_s == 63e9 * constants.HOST_LINK_EFFICIENCY.value
    assert eight.host_link_bytes_per_s == pytest.approx(614.4e9 * constants.MEMORY_EFFICIENCY.value / 16)
    assert parse(2).host is None and parse(2).host_limit_bytes == 0

    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "H100-80GB"\nhost_gb_per_s = 20\nhost_memory_gb = 512\nhost_memory_gb_per_s = 400')
    file = parse(str(path))
    assert file.host_link_bytes_per_s == 20e9 * constants.HOST_LINK_EFFICIENCY.value
    assert file.host_limit_bytes == int(512 * 2**30 * host[1]) // 8
    path.write_text('[[group]]\ngpu = "H100-80GB"\n[[group]]\ngpu = "A100-40GB-SXM"')
    mixed = parse(str(path))
    assert mixed.host_limit_bytes == parse("8xA100-40GB").host_limit_bytes < eight.host_limit_bytes
    assert mixed.host_bytes_per_s == parse("8xA100-40GB").host_bytes_per_s


def test_a_limit_above_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for head in ("", "[[group]]\n"):
        path.write_text(head + 'gpu = "H100-80GB"\nmemory_limit_gb = 800\n')
        with pytest.raises(DeviceError, match=r"memory_limit_gb is 800, and a H100-80GB-SXM has 8\d\.\d GB") as error:
            parse(path)
        assert error.value.hint
    with pytest.raises(DeviceError, match="the memory limit is infinite"):
        parse("8xH100-80GB", memory_limit_bytes=float("inf"))  # type: ignore[arg-type]


def test_a_limit_below_one_byte_is_never_zero(tmp_path: Path) -> None:
    """The search divides by it."""
    with pytest.raises(DeviceError, match="leaves room for nothing"):
        parse("8xH100-80GB", memory_limit_bytes=0.5)  # type: ignore[arg-type]
    path = tmp_path / "cluster.toml"
    for gpu in ("H100-80GB", "cpu"):
        path.write_text(f'gpu = "{gpu}"\nmemory_limit_gb = 1e-10\n')
        assert parse(path).memory_limit_bytes == 1


def test_a_latency_between_groups_counts_without_a_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    groups = '[[group]]\ngpu = "H100-80GB"\n[[group]]\ngpu = "H100-80GB"\n'
    for bandwidth in ("", "between_gb_per_s = 100000\n"):
        path.write_text(bandwidth + groups)
        plain = p2p_s(1e9, parse(path).borders(2)[0], True)
        path.write_text(f"{bandwidth}between_latency_us = 30000\n{groups}")
        slow = parse(path).borders(2)[0]
        assert p2p_s(1e9, slow, True) > plain + 0.02
        assert slow.inter.bytes_per_s == parse("2x8xH100-80GB").inter.bytes_per_s


@pytest.mark.parametrize("name", ["H100-80GB", "A100-40GB-SXM", "B200-180GB", "V100-32GB"])
def test_the_figures_of_a_data_sheet_again_change_nothing(tmp_path: Path, name: str) -> None:
    entry, known = hardware.table()[hardware.find(name)], parse(f"8x{name}").gpu
    path = tmp_path / "cluster.toml"
    path.write_text(
        f'gpu = "{name}"\nmemory_gb = {entry["hbm_gb"]}\nmemory_gb_per_s = {entry["hbm_gb_per_s"]}\n'
        f"peak_bf16_tflops = {known.peak_flops['bfloat16'] / 1e12}\n"
    )
    found = parse(path).gpu
    assert replace(found, sources=known.sources) == known
    assert dict(found.sources)["hbm"] == str(path)


def test_rates_that_follow_from_a_given_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "H100-80GB"\npeak_bf16_tflops = 800\npeak_fp32_tflops = 60\n')
    peaks = parse(path).gpu.peak_flops
    assert (peaks["float32"], peaks["tf32"], peaks["float8"]) == (60e12, 60e12, 800e12)


def test_a_kind_has_its_own_number_in_a_node(tmp_path: Path) -> None:
    path = tmp_path / "rack.toml"
    path.write_text('nodes = 18\ngpu = "GB200"\n')
    assert (parse(path).gpus_per_node, parse(path).count) == (4, 72)
    path.write_text('gpu = "X1"\nmemory_gb = 1\nmemory_gb_per_s = 1\npeak_bf16_tflops = 10\n')
    assert parse(path).gpus_per_node == 8


def test_the_devices_that_a_plan_uses() -> None:
    assert (parse("3x8xH100-80GB").used_by(16).nodes, parse("3xH100-80GB").used_by(2).count) == (2, 2)
    assert parse("16xH100-80GB").used_by(4).count == 16  # no search leaves so many idle
