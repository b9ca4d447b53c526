"""Constants of other trainers, each with its unit and its source (``devices.constants``)."""

from __future__ import annotations

from autopar.devices.constants import Constant

DEEPSPEED_GRADIENT_BYTES = Constant(
    10,
    "bytes per parameter",
    "fitted: DeepSpeed's bfloat16 optimizer in BigScience's runs; 2 of the backward's gradient, 4 of the flat float32 sum, which is not "
    "sharded, and as much again",
)
RECIPE_GRADIENT_BYTES = Constant(
    2,
    "bytes per parameter",
    "published: grad_sync_dtype bf16 beside distributed_fused_adam, NVIDIA/dgxc-benchmarking nemo_megatron/gpt3_175b_hydra.yaml",
)
_NANOTRON = "library: nanotron src/nanotron/optim/gradient_accumulator.py"
DDP_GRADIENT_BYTES = Constant(6, "bytes per parameter", _NANOTRON + ": 4 of the float32 sum, 2 of DDP's bucket")
SUMMED_GRADIENT_BYTES = Constant(
    4, "bytes per parameter", _NANOTRON + ": the float32 sum; without data parallelism there is no bucket"
)
FRESH_GRADIENT_BYTES = Constant(
    2, "bytes per parameter", _NANOTRON + ": the backward's own gradient, which is added to the sum when all are there"
)
FLOAT32_LOSS_COPIES = Constant(
    2,
    "tensors of the 16-bit logits' size",
    "library: nanotron src/nanotron/parallel/tensor_parallel/functional.py: logits in float32, whose exponentials become their gradient",
)
GATHERED_COPIES_BYTES = Constant(
    4,
    "bytes per parameter",
    "library: nanotron src/nanotron/distributed.py: under ZeRO 1 all_gather_coalesced flattens the parameters of all ranks in 16 bits, and "
    "NCCL's gather into a list of tensors does so again",
)
TENSOR_OVERLAP = Constant(
    0.3,
    "fraction of tensor-parallel communication",
    "fitted: nanotron's asynchronous tensor parallelism in its layout sweep, besides reductions of input gradients",
)
HEAVY_HEAD = Constant(
    2.0,
    "blocks",
    "fitted: from this much arithmetic on, the head counts when blocks are assigned to stages (nanotron's sweep)",
)
DELAYED_FP8_PASSES = Constant(
    2.0,
    "ratio of bytes",
    "library: Transformer Engine's delayed scaling knows the scale before the pass: an operand is read, written in 8 bits and read by the "
    "product, 4 bytes for 2",
)
NATURAL_IMBALANCE = Constant(
    1.52,
    "load of the busiest rank over the mean",
    "published: MaxVio of 0.52 plus 1 under an auxiliary loss, 3B parameters (arXiv:2408.15664, table 2); a rank averages several",
)
PERMUTATION_PASSES = Constant(
    1.66,
    "ratio of bytes",
    "published: permutations of tokens reach 0.50 of a B200's peak memory bandwidth (MooreThreads/SimuMax "
    "configs/system/b200_bf16_ceperm.json, permute_fwd and permute_bwd), copies 0.83 (MEMORY_EFFICIENCY)",
)
INTERNEVO_STEP_BYTES = Constant(
    12,
    "bytes per updated parameter",
    "assumed: the step converts gradients to float32 (4: InternLM/InternEvo internlm/solver/optimizer/hybrid_zero_optim.py), and AdamW "
    "allocates the square root of a moment and its sum with eps (8: PyTorch's foreach AdamW; a fused one allocates nothing). "
    "InternEvo's published table, the only source, is closer with 12 bytes than with 4",
)
MEGATRON_PREPARED_BYTES = Constant(
    8,
    "bytes per gradient",
    "library: NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py: float32 sums are zeroed (4), and checked for NaN (4)",
)
MEGATRON_SCALED_BYTES = Constant(
    8,
    "bytes per gradient with data parallelism",
    "library: NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py: float32 sums are scaled before their reduction",
)
MEGATRON_UPDATE_BYTES = Constant(
    14,
    "bytes per updated parameter",
    "library: NVIDIA/Megatron-LM megatron/core/optimizer/clip_grads.py: gradients are read for their norm (4), and scaled (8); "
    "distrib_optimizer.py reads master weights again to copy them (2 more than a parameter's own width)",
)
INTERNEVO_GRADIENT_BYTES = Constant(
    2,
    "bytes per parameter",
    "library: InternLM/InternEvo internlm/solver/optimizer/hybrid_zero_optim.py: gradients stay in 16 bits until the shard's update",
)
