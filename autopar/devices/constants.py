"""Constants of the cost model that aren't in specifications, each with its unit and source.

Vendor specifications are in ``kinds/*.toml``, measured bandwidths in ``networks/*.toml``. The constants here are achieved fractions of
peaks, latencies, and low estimates for a machine without a GPU. A source starts with its kind: *measured*, *library* (from its source
code), *published*, *vendor* (a data sheet), *assumed*, or *fitted* to published measurements. docs/evidence/validation.md lists all
constants, including those in the files and in ``autopar.trainers``.
"""

from __future__ import annotations

from autopar.units import Constant

_NCCL = "library: NCCL src/graph/tuning.cc, hwLat and baseLat, protocol Simple"
_CALCULON = "published: calculon-ai/calculon systems/h100_80g_nvl8.json and a100_80g.json"
_GLOO = "measured: gloo, 2 cores; float32 all_reduce of 1 MiB and 64 MiB takes 9.6 and 198 ms on 4 processes"

# -- memory -----------------------------------------------------------------------------------------------------------
USABLE_MEMORY = Constant(
    0.84,
    "fraction of device memory",
    "fitted: the layouts of nanotron's sweep that need more fail or run 2-4 times slower (CUDA context, NCCL's buffers, the "
    "allocator's fragmentation and its retries)",
)
ALLOCATOR_RESERVE = Constant(
    1.08,
    "reserved over allocated bytes",
    "published: 1.03 to 1.08 in the 16 runs of SimuMax's table for B200; reserved memory in BigScience's and torchtitan's rows is closer "
    "with the upper end",
)
FP8_PASSES = Constant(
    3.0,
    "ratio of bytes",
    "assumed: an operand is read for its largest value, read and written in 8 bits, and read: 6 bytes for 2",
)
FP8_ROUNDING = Constant(
    4.5,
    "ratio of bytes",
    "library: program/kernels_fp8.py: 16-bit numbers are read for the largest, read and written scaled, read and written in 8 bits",
)
FP8_KERNELS = Constant(
    20.0,
    "kernels of one product",
    "library: program/kernels_fp8.py: ten for each operand (its largest value, the scale, the rounding); the product is the last",
)
FUSED_FP8_ROUNDING = Constant(
    2.5,
    "ratio of bytes",
    "library: program/kernels_fp8.py on GPUs: 16-bit numbers are read for the largest, read and written in 8 bits",
)
FUSED_FP8_KERNELS = Constant(
    15.0,
    "kernels of one product",
    "library: program/kernels_fp8.py on GPUs: Inductor generates 8 (one scale per tensor) to 14 (blockwise) for both operands of a "
    "forward product, in its code for CPUs; the product is the last",
)
DISPATCH_ROUNDING = Constant(
    18.0,
    "bytes moved in memory per byte sent",
    "library: program/kernels_fp8.py: TiledRows: the sender moves 9 bytes to round a 16-bit number (FP8_ROUNDING), and reads and writes it "
    "beside the scales; the receiver reads it, writes it in 16 bits, and reads and writes it scaled",
)
FUSED_DISPATCH_ROUNDING = Constant(
    10.0,
    "bytes moved in memory per byte sent",
    "library: program/kernels_fp8.py: TiledRows on GPUs: the sender moves 5 bytes to round a 16-bit number (FUSED_FP8_ROUNDING), and "
    "reads and writes it beside the scales; the receiver reads it and writes it in 16 bits",
)
DISPATCH_KERNELS = Constant(
    15.0,
    "kernels of one dispatch",
    "library: program/kernels_fp8.py: TiledRows: ten to round, one to pack, four to unpack",
)
FUSED_DISPATCH_KERNELS = Constant(
    10.0,
    "kernels of one dispatch",
    "library: program/kernels_fp8.py: TiledRows on GPUs: Inductor generates seven to round and pack, and three to unpack, in its "
    "code for CPUs",
)
USABLE_MEMORY_CPU = Constant(
    0.7,
    "fraction of the machine's memory",
    "assumed: the operating system, and about 0.4 GB of interpreter and libraries per process",
)
GIB_PER_VENDOR_GB = Constant(
    2**30,
    "bytes",
    "published: the GB in a GPU's name are GiB: nvidia-smi shows 81,920 MiB for A100-80GB; 178.35 GiB are "
    "seen of B200-180GB",
)
USABLE_HOST_MEMORY = Constant(
    0.8,
    "fraction of a node's memory",
    "assumed: the operating system, file caches, data loading, the processes themselves",
)

# -- compute ----------------------------------------------------------------------------------------------------------
MATMUL_EFFICIENCY = Constant(
    0.8,
    "fraction of peak FLOP/s",
    "published: best achievable matmul over peak, 0.87 (A100-80GB-SXM) and 0.80 (H100-80GB-SXM) in kinds/; used "
    "for GPUs without such a measurement",
)
SUSTAINED = Constant(
    0.77,
    "ratio",
    "fitted: what products and copies reach in training over what they reach in a benchmark, on parts whose power limit a "
    "training run meets (H100 and later); published steps of nanotron, MPT and the DGX Cloud recipes",
)
MEMORY_EFFICIENCY = Constant(
    0.83,
    "fraction of peak bytes/s",
    "measured by NVIDIA: HBM copy of 4.01 of 4.8 TB/s on H200 (samuel-bohman/AI-benchmarking-guide, ND_H200_v5_results)",
)
OP_FLOOR_S = Constant(1e-5, "s", "assumed: dispatch of one op with autograd from Python; kernels cannot start faster")
KERNEL_S = Constant(2e-6, "s", "fitted: start and tail of one kernel on the device; published steps of all sources")
ATTENTION_EFFICIENCY = Constant(
    0.35,
    "fraction of peak FLOP/s",
    "fitted: FlashAttention-2 reaches 35 % of an H100's peak (arXiv:2407.08608, section 1), chosen among published figures by the rows",
)
FP32_OVER_BF16 = Constant(
    1 / 16,
    "ratio of peak FLOP/s",
    "vendor: without TF32 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100 (B200: 75 of 2,250)",
)
FP32_OVER_FP16_VOLTA = Constant(
    0.125,
    "ratio of peak FLOP/s",
    "vendor: V100 has 15.7 TFLOP/s in float32 for 125 in float16, and no TF32 or bfloat16",
)
FP64_OVER_BF16 = Constant(
    1 / 16, "ratio of peak FLOP/s", "vendor: 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100 (B200: 40 of 2,250)"
)

# -- links ------------------------------------------------------------------------------------------------------------
HOST_S = Constant(
    3.5e-4,
    "s per collective",
    "fitted: with one sequence a microbatch nanotron needs 72 ms for 16 layers at any tensor degree up to 8; about ten "
    "collectives a layer",
)
OVERLAP_SLOWDOWN = Constant(
    0.13,
    "fraction of hidden communication",
    "published: overlap_slowdown_coefficient 1.1256 of PKU-DAIR/Hetu-Galvatron",
)
INTRA_NODE_EFFICIENCY = Constant(0.65, "fraction of peak bytes/s", _CALCULON)
DISPATCH_NVLINK_EFFICIENCY = Constant(
    0.77,
    "fraction of peak bytes/s",
    "published: kernels that dispatch tokens to experts and combine their results reach 153 and 158 of an H800's 200 GB/s inside a node "
    "(deepseek-ai/DeepEP docs/legacy.md), 674 and 735 of a B200's 900 (its branch hybrid-ep, docs/README_Hybrid-EP.md)",
)
INTER_NODE_EFFICIENCY = Constant(0.9, "fraction of peak bytes/s", _CALCULON)
COLLECTIVE_BASE_S = Constant(8.4e-6, "s", _NCCL)
NVLINK_HOP_S = Constant(3.4e-6, "s", _NCCL + ", ring")
PCIE_HOP_S = Constant(5.7e-6, "s", _NCCL + ", ring")
NETWORK_HOP_S = Constant(14e-6, "s", _NCCL + ", ring")
DEFAULT_INTER_NODE_BYTES_PER_S = Constant(
    12.5e9, "bytes/s per GPU", "assumed: one 100 Gb/s port per GPU, where the kind's file has no figure for the node"
)
HOST_LINK_EFFICIENCY = Constant(
    0.85,
    "fraction of peak bytes/s",
    "assumed: copies from and to pinned memory reach about 54 of the 63 GB/s of a PCIe 5.0 x16 link, 26 of the 31.5 of a 4.0 one",
)
HOST_MEMORY_EFFICIENCY = Constant(
    0.5,
    "fraction of peak bytes/s",
    "assumed: a vectorised Adam reaches half of what all sockets' memory has together",
)
DEFAULT_HOST_MEMORY_BYTES = Constant(
    512 * 2.0**30, "bytes per node", "assumed: of a node of 8, where the kind's file says nothing of the host"
)
DEFAULT_HOST_LINK_BYTES_PER_S = Constant(
    31.5e9, "bytes/s per GPU, one direction", "assumed: PCIe 4.0 x16, for a GPU that a file describes"
)
DEFAULT_HOST_BYTES_PER_S = Constant(
    204.8e9, "bytes/s per node", "assumed: 8 channels of DDR4-3200, where the kind's file says nothing of the host"
)
_NVME = "assumed where states=nvme is pinned and the cluster file says nothing: one PCIe 4.0 drive"
DEFAULT_NVME_BYTES = Constant(3.84e12, "bytes per node", f"{_NVME} of 3.84 TB")
DEFAULT_NVME_READ_BYTES_PER_S = Constant(6.9e9, "bytes/s per node", f"{_NVME}, data sheet of Samsung's PM9A3")
DEFAULT_NVME_WRITE_BYTES_PER_S = Constant(4.1e9, "bytes/s per node", f"{_NVME}, data sheet of Samsung's PM9A3")
USABLE_NVME = Constant(0.9, "fraction of the capacity", "assumed: file systems keep a part for themselves")

# -- processes on this machine's CPU ----------------------------------------------------------------------------------
CPU_FLOPS = Constant(3e10, "FLOP/s per process, float32", "assumed: one core with 256-bit vectors, half busy")
CPU_BYTES_PER_S = Constant(5e9, "bytes/s per process", "assumed: a desktop's memory bandwidth over four processes")
CPU_LOW_PRECISION = Constant(0.25, "ratio to float32", "assumed: 16-bit arithmetic is emulated on most CPUs")
CPU_OP_FLOOR_S = Constant(1e-5, "s", "assumed: dispatch of one op with autograd")
GLOO_HOP_S = Constant(1.1e-3, "s", _GLOO + "; over the 6 steps of a ring of 4")
GLOO_BYTES_PER_S = Constant(5.3e8, "bytes/s per process", _GLOO + "; 1.5 x 63 MiB in the difference")
