"""A configurable cost model of other trainers (Megatron-LM, DeepSpeed, FSDP): kernels, gradient copies, overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.devices import Cluster
from autopar.graph import LayerClass
from autopar.ops import cost
from autopar.ops.facts import facts
from autopar.ops.operands import operands
from autopar.plan import NARROW_GRADIENTS
from autopar.price.collective_pairs import CollectivePair
from autopar.price.collectives import FLAT, SHARDED, RankGroup, group_time_s, overlapped_s
from autopar.price.elementwise import most
from autopar.price.live_memory import LayerMemory
from autopar.price.op_costs import OpCosts, OpSlot
from autopar.price.selective import Selection
from autopar.price.state import Precision
from autopar.price.trace import INTERNAL, Saved, Trace
from autopar.price.trainer import TrainerModel
from autopar.sharding import AxisTypes
from autopar.trainers.attention import unfuse_attention, with_scores
from autopar.trainers.experts import fused_rows, in_float8, price_experts
from autopar.trainers.selective import select_modules, select_published
from autopar.types import Collective


@dataclass(frozen=True)
class OtherTrainer(TrainerModel):
    """A trainer, described by its kernels, gradient copies and overlap.

    All these trainers pipeline data-parallel collectives (which hides latency), allocate nothing at stage borders, replace PyTorch's cross
    entropy, and prefetch the next layer's parameters under ZeRO 2 and 3.

    ========================  =========================================================================================
    ``flash``                 flash attention, which saves no scores
    ``gradient_bytes``        bytes per gradient of a 16-bit parameter, in all copies that persist between microbatches: 2 for a
                              single copy, 4 for a float32 sum, 6 with DDP's buckets, 10 with another flat float32 copy
    ``fresh_bytes``           bytes per gradient that one backward pass writes, and that are added to the sum once activations are freed
    ``reduces_sums``          the float32 sum of gradients is reduced, not a 16-bit copy
    ``step_bytes``            bytes per updated parameter that the optimizer's step allocates, when activations are freed
    ``gather_bytes``          bytes per parameter that the gather under ZeRO 1 allocates, when activations are freed
    ``prepared_bytes``        memory traffic per float32 gradient, before its reduction (``Precision.prepared``)
    ``update_bytes``          memory traffic per float32 gradient's update, besides reading and writing what is stored
    ``fsdp``                  under ZeRO-3 the stored shard is the float32 parameter itself, and there is no other master copy
    ``loss_copies``           tensors of the logits' size that the loss's backward allocates in addition to its result: 1 in
                              PyTorch's cross entropy (the gradient of the log-probabilities), 2 in PyTorch's loss parallel and in
                              a loss in float32, 0 if the gradient overwrites the probabilities
    ``accumulation_fusion``   the weight-gradient product adds to the gradient itself, without another pass over memory
    ``regather``              a sharded value that a product reads gathered is saved sharded, and gathered again in the backward
    ``gathers_by_parameter``  ZeRO gathers parameters one by one, not a layer at a time
    ``overlap_data``          the number of microbatches that hide data-parallel collectives (ZeRO 0 and 1): a layer's gradients
                              are reduced during their backwards, its parameters gathered during their forwards
    ``overlap_tensor``        the fraction of tensor-parallel communication that is hidden under matrix products
    ``recomputes_modules``    selective recomputation is Megatron-Core's, of modules
    ``saves_float8``          products save their operands as they read them, in 8 bits
    ``fused_experts``         an expert's products, what is between them and the rounding of their operands are one kernel
    ``overlap_experts``       the fraction of passes that run as pairs: exchanges of one microbatch's tokens with their experts run under
                              the other pass of another microbatch
    ========================  =========================================================================================
    """

    flash: bool = True
    gradient_bytes: int = 2
    fresh_bytes: int = 0
    reduces_sums: bool = False
    step_bytes: int = 0
    prepared_bytes: int = 0
    update_bytes: int = 0
    fsdp: bool = False
    gather_bytes: int = 0
    loss_copies: int = 0
    accumulation_fusion: bool = False
    regather: bool = False
    gathers_by_parameter: bool = False
    overlap_data: int = 0
    overlap_tensor: float = 0.0
    overlap_experts: float = 0.0
    fused_experts: bool = False
    recomputes_modules: bool = False
    saves_float8: bool = False
    starts_early: bool = False
    compiles: bool = False  # ``fused`` describes the kernels instead

    def precision(self, name: str, allow: Collection[str] = ()) -> Precision:
        emitted = TrainerModel.precision(self, name, allow)
        if not emitted.master:
            return emitted
        if self.fsdp:  # the master copy is the shard
            emitted = dataclasses.replace(emitted, shard=4, optimizer=emitted.optimizer - 4)
        narrow = NARROW_GRADIENTS in allow
        gradient, fresh = (emitted.width, 0) if narrow else (self.gradient_bytes, self.fresh_bytes)
        reduced = min(gradient, 4)
        copies = fresh > 0 or gradient > reduced  # there are gradients both in 16 bits and as a wide sum
        if self.accumulation_fusion:
            accumulated = 0
        elif copies:  # the sum is read and written, the backward's result written and read
            accumulated = 2 * reduced + 2 * emitted.width
        else:  # the product adds to a single wide sum, hidden under its arithmetic; a narrow sum takes a kernel with three tensors
            accumulated = 0 if reduced > emitted.width else 3 * reduced
        wide = reduced > emitted.width
        return dataclasses.replace(
            emitted,
            gradient=gradient,
            fresh=fresh,
            at_rest=0,
            accumulated=accumulated,
            averaged=emitted.width if copies and not self.reduces_sums else reduced,  # DDP reduces the 16-bit copy
            unscaled=0,  # their optimizers divide by the loss scale as they read the gradient
            converted=self.update_bytes if wide else 0,  # they convert as they read and write
            prepared=self.prepared_bytes if wide else 0,
        )

    def trace(self, cls: LayerClass) -> Trace:
        run = TrainerModel.trace(self, cls)
        nodes = tuple(cls.graph.graph.nodes)
        run = fused_rows(run, nodes) if self.fused else run
        run = in_float8(run, nodes) if self.saves_float8 else run
        return run if self.flash else with_scores(run, nodes)

    def adapt(self, costs: OpCosts) -> None:
        costs.torch_loss = False
        if not self.flash:
            unfuse_attention(costs)
        if self.loss_copies:
            self._add_loss_copies(costs)
        if self.fused:
            summed = self.gradient_bytes if self.accumulation_fusion else 0
            price_experts(costs, self.dispatches, self.fused_experts, summed)
        TrainerModel.adapt(self, costs)

    def _add_loss_copies(self, costs: OpCosts) -> None:
        for i, node in enumerate(costs.nodes):
            if facts(node).is_cross_entropy and costs.trace.requires_grad[node.name]:
                logits = operands(node)[0]
                size = self.loss_copies * float(sum(costs.size(t) for t in cost.tensors(logits.meta["val"])))
                costs.slots.append(OpSlot(i, INTERNAL, node.name, 0.0, 0.0, size, size))

    def selection(
        self, cls: LayerClass, ops: Sequence[fx.Node], run: Trace, saved: Sequence[Saved]
    ) -> tuple[tuple[Saved, ...], Selection]:
        if self.recomputes_modules and self.flash:
            return select_modules(ops, run, saved, max((v.shape[-1] for v in cls.activations if v.shape), default=0))
        return select_published(ops, run, saved, self.flash)

    def saves_shard(self, types: AxisTypes, node: fx.Node, operand: int) -> bool:
        if self.regather and operand >= 0 and types.produced[operands(node)[operand].name].sharded:
            return True
        return TrainerModel.saves_shard(self, types, node, operand)

    def conversions(self, pairs: list[CollectivePair], gradient: bool) -> list[CollectivePair]:
        if not (self.regather and gradient):
            return pairs
        # with ``starts_early`` a gather overlaps the product of the input's gradient, which takes as long as that of the weight's
        gathers = [pair for pair in pairs if pair.forward is Collective.ALL_GATHER]
        regathers = [dataclasses.replace(m, forward=Collective.NONE, backward=Collective.ALL_GATHER) for m in gathers]
        return pairs + regathers

    def data_collective_s(
        self, collective: Collective, size: int, tensors: int, members: RankGroup, cluster: Cluster, around_layer: bool
    ) -> float:
        calls = tensors if self.gathers_by_parameter and collective is Collective.ALL_GATHER else 1
        return calls * group_time_s(
            collective, size / calls, members, cluster, not around_layer, SHARDED if around_layer else FLAT
        )

    def sharded_copies_s(
        self, gathered_bytes: float, gradient_bytes: float, reduced_bytes: float, cluster: Cluster
    ) -> tuple[float, float]:
        """Return zeros: the constants were fitted to published runs by a model without such copies."""
        return 0.0, 0.0

    def exposed_tensor_s(self, communication_s: float) -> float:
        return (1.0 - self.overlap_tensor) * communication_s

    def exposed_exchange_s(self, communication_s: float, compute_s: float, slowdown: float) -> float:
        exposed_s = overlapped_s(compute_s, communication_s, slowdown)
        return communication_s - self.overlap_experts * (communication_s - exposed_s)

    def exposed_reduction_s(self, communication_s: float, backward_s: float, slowdown: float) -> float:
        return overlapped_s(self.overlap_data * backward_s, communication_s, slowdown)

    def exposed_gather_s(self, communication_s: float, forward_s: float, slowdown: float) -> float:
        return overlapped_s(self.overlap_data * forward_s, communication_s, slowdown)

    def boundary_bytes(self, size: float) -> float:
        return 0.0

    def live_bytes(
        self,
        share: LayerMemory,
        gradients: int,
        data: float,
        zero: int,
        unsharded_gradients: bool,
        precision: Precision,
    ) -> tuple[float, float]:
        transient = share.kept.working_bytes - share.kept.saved_bytes + share.peaks.activations
        # gradients of this layer and of the one whose gradients are being reduced; parameters of this layer and the next
        if zero >= 2:
            gathered = share.parameters * precision.width if zero == 3 else 0
            transient += 2 * share.trainable * precision.gradient + 2 * gathered
        # the optimizer's step allocates when the layer's activations are free
        step = self.step_bytes * precision.master * share.trainable / (data if zero else 1)
        if zero == 1:
            step = step + self.gather_bytes * share.parameters
        return gradients + most(0.0, step - share.kept.saved_bytes), transient

    def lasting_gradients(self, gradients: int, zero: int, microbatches: int) -> int:
        return gradients
