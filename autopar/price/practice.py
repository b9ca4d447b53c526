"""How a trainer runs the arithmetic that a plan distributes: what a price needs to know besides the plan.

The defaults are those of the programs that autopar emits, run eagerly. Published runs differ in them, and the same plan
costs something else with other kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Practice:
    """Kernels and overlaps.

    ======================  ==========================================================================================
    ``fused``               a chain of pointwise ops and reductions is one kernel and keeps only what it read, as with
                            hand-written kernels or ``torch.compile``
    ``flash``               attention keeps no scores
    ``gradient_bytes``      of a 16-bit parameter's gradient, all copies that stay from microbatch to microbatch: 2 alone, 4
                            summed in float32, 6 with DDP's buckets, 10 with a flat float32 copy besides
    ``fresh_bytes``         of the gradient that a backward leaves until it is added to those: as activations go, it comes
    ``fsdp``                under ZeRO-3 the shard at rest is the float32 parameter itself, as FSDP keeps it: no master copy besides
    ``loss_copies``         tensors as large as the logits that the loss's backward makes besides its result: 1 in PyTorch's
                            cross entropy (the gradient of the log-probabilities), 2 in its loss parallel, 0 where the
                            probabilities are turned into the gradient where they lie
    ``products_add``        a product adds to its parameter's gradient itself, so that no pass over memory follows
    ``regather``            a sharded value that a product reads whole is kept sharded, and gathered again in its backward
    ``by_parameter``        ZeRO-3 gathers parameters one by one, not a layer at a time
    ``bucketed``            reductions of all layers follow each other without a break, so that latency is paid once
    ``overlap_data``        microbatches under whose backward a layer's gradients are reduced, and under whose forward its
                            parameters are gathered
    ``overlap_tensor``      the fraction of tensor-parallel communication that is hidden under matrix products
    ``apart``               gradients are made apart from the buffer in which they add up (ZeRO 0 and 1), and each layer is an FSDP
                            root of its own (2 and 3): nothing is fetched ahead, and what a layer sent to its reduction stays
                            until the microbatch's backward has ended
    ``published``           selective recomputation keeps what Megatron's and torchtitan's do, see ``price.selective``
    ``query_layout``        attention's result lies in memory as the queries do, and so merging heads may copy; flash attention
                            on GPUs writes it merged
    ``cloned``              a reduce-scatter works on a copy of its input, as gloo does
    ``update_copies``       tensors of a parameter's size that the optimizer makes while it updates it: AdamW on CPUs makes 2
    ======================  ==========================================================================================
    """

    fused: bool = False
    flash: bool = True
    gradient_bytes: int | None = None
    fresh_bytes: int = 0
    fsdp: bool = False
    loss_copies: int = 0
    products_add: bool = False
    regather: bool = False
    by_parameter: bool = False
    bucketed: bool = False
    overlap_data: int = 0
    overlap_tensor: float = 0.0
    apart: bool = False
    published: bool = False
    query_layout: bool = False
    cloned: bool = False
    update_copies: int = 0


EMITTED = Practice(apart=True, gradient_bytes=4)


def on_cpu(practice: Practice) -> Practice:
    """The practice with PyTorch's kernels for CPUs, and gloo."""
    return replace(practice, query_layout=True, cloned=True, update_copies=2)
