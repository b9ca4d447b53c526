"""A configurable cost model of other trainers: kernels, gradient copies, overlap."""

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
from autopar.price.collectives import FLAT, SHARDED, RankGroup, group_time_s, overlapped_s
from autopar.price.live_memory import LayerMemory
from autopar.price.moves import Move
from autopar.price.op_costs import OpCosts, OpSlot
from autopar.price.selective import Selection
from autopar.price.state import Precision
from autopar.price.trace import INTERNAL, Saved, Trace
from autopar.price.trainer import TrainerModel
from autopar.sharding import AxisTypes
from autopar.trainers.attention import unfuse_attention, with_scores
from autopar.trainers.selective import select_published
from autopar.types import Collective


@dataclass(frozen=True)
class OtherTrainer(TrainerModel):
    """A trainer, described by its kernels, gradient copies and overlap.

    All of them pipeline data-parallel collectives (hiding latency), allocate nothing at stage borders, replace PyTorch's cross entropy, and
    prefetch the next layer's parameters under ZeRO 2 and 3.

    ==================  ==============================================================================================
    ``flash``           flash attention, which saves no scores
    ``gradient_bytes``  bytes of a 16-bit parameter's gradient, all copies that persist from microbatch to microbatch: 2 for a single
    copy,
                        4 for a float32 sum, 6 with DDP's buckets, 10 with another flat float32 copy
    ``fresh_bytes``     bytes of the gradient from one backward, until it is added to those: it exists while activations do not
    ``fsdp``            under ZeRO-3 the stored shard is the float32 parameter itself, and there is no other master copy
    ``loss_copies``     tensors as large as the logits that the loss's backward makes in addition to its result: 1 in PyTorch's cross
                        entropy (the gradient of the log-probabilities), 2 in its loss parallel, 0 where probabilities turn into
                        the gradient in place
    ``products_add``    a product adds to its parameter's gradient itself, so no extra pass over memory is needed
    ``regather``        a sharded value that a product reads gathered is saved sharded, and gathered again in the backward
    ``by_parameter``    ZeRO gathers parameters one by one, not a layer at a time
    ``overlap_data``    the number of microbatches that hide collectives of data parallelism: a layer's gradients are reduced during
                        their backward, its parameters gathered during their forward
    ``overlap_tensor``  the fraction of tensor-parallel communication that is hidden under matrix products
    ==================  ==============================================================================================
    """

    flash: bool = True
    gradient_bytes: int = 2
    fresh_bytes: int = 0
    fsdp: bool = False
    loss_copies: int = 0
    products_add: bool = False
    regather: bool = False
    by_parameter: bool = False
    overlap_data: int = 0
    overlap_tensor: float = 0.0
    starts_early: bool = False  # part of ``overlap_tensor``
    compiles: bool = False  # the kernels of other trainers are described by ``fused``

    def precision(self, name: str, allow: Collection[str] = ()) -> Precision:
        own = TrainerModel.precision(self, name, allow)
        if not own.master:
            return own
        if self.fsdp:  # the master copy is the shard
            own = dataclasses.replace(own, shard=4, optimizer=own.optimizer - 4)
        narrow = NARROW_GRADIENTS in allow
        gradient, fresh = (own.width, 0) if narrow else (self.gradient_bytes, self.fresh_bytes)
        reduced = min(gradient, 4)
        copies = fresh > 0 or gradient > reduced  # gradients both in 16 bits and as a wide sum
        if self.products_add:
            accumulated = 0
        elif copies:  # the sum is read and written, the backward's own result written and read
            accumulated = 2 * reduced + 2 * own.width
        else:  # the product itself adds to a single wide sum, hidden under its arithmetic
            accumulated = 0 if reduced > own.width else 3 * reduced
        return dataclasses.replace(
            own,
            gradient=gradient,
            fresh=fresh,
            at_rest=0,
            accumulated=accumulated,
            averaged=own.width if copies else reduced,  # DDP reduces the 16-bit copy
            unscaled=0,  # their optimizers divide by the loss scale as they read the gradient
        )

    def trace(self, cls: LayerClass) -> Trace:
        run = TrainerModel.trace(self, cls)
        return run if self.flash else with_scores(run, tuple(cls.graph.graph.nodes))

    def adapt(self, costs: OpCosts) -> None:
        costs.torch_loss = False
        if not self.flash:
            unfuse_attention(costs)
        if self.loss_copies:
            self._add_loss_copies(costs)
        TrainerModel.adapt(self, costs)

    def _add_loss_copies(self, costs: OpCosts) -> None:
        for i, node in enumerate(costs.nodes):
            if facts(node).is_cross_entropy and costs.run.requires_grad[node.name]:
                logits = operands(node)[0]
                made = self.loss_copies * float(sum(costs.size(t) for t in cost.tensors(logits.meta["val"])))
                costs.slots.append(OpSlot(i, INTERNAL, node.name, 0.0, 0.0, made, made))

    def selection(
        self, cls: LayerClass, ops: Sequence[fx.Node], run: Trace, saved: Sequence[Saved]
    ) -> tuple[tuple[Saved, ...], Selection]:
        return select_published(ops, run, saved, self.flash)

    def saves_shard(self, types: AxisTypes, node: fx.Node, operand: int) -> bool:
        if self.regather and operand >= 0 and types.produced[operands(node)[operand].name].sharded:
            return True
        return TrainerModel.saves_shard(self, types, node, operand)

    def conversions(self, moves: list[Move], gradient: bool) -> list[Move]:
        if not (self.regather and gradient):
            return moves
        gathers = [move for move in moves if move.forward is Collective.ALL_GATHER]
        again = [dataclasses.replace(m, forward=Collective.NONE, backward=Collective.ALL_GATHER) for m in gathers]
        return moves + again

    def data_collective_s(
        self, collective: Collective, size: int, tensors: int, members: RankGroup, cluster: Cluster, around_layer: bool
    ) -> float:
        calls = tensors if self.by_parameter and collective is Collective.ALL_GATHER else 1
        return calls * group_time_s(
            collective, size / calls, members, cluster, not around_layer, SHARDED if around_layer else FLAT
        )

    def sharded_copies_s(
        self, gathered_bytes: float, gradient_bytes: float, reduced_bytes: float, cluster: Cluster
    ) -> tuple[float, float]:
        """Return zeros: the constants of published runs were fitted without them."""
        return 0.0, 0.0

    def exposed_tensor_s(self, communication_s: float) -> float:
        return (1.0 - self.overlap_tensor) * communication_s

    def exposed_reduction_s(self, communication_s: float, backward_s: float, slowdown: float) -> float:
        return overlapped_s(self.overlap_data * backward_s, communication_s, slowdown)

    def exposed_gather_s(self, communication_s: float, forward_s: float, slowdown: float) -> float:
        return overlapped_s(self.overlap_data * forward_s, communication_s, slowdown)

    def border_bytes(self, size: float) -> float:
        return 0.0

    def live_bytes(
        self, share: LayerMemory, gradients: int, data: int, zero: int, whole_gradients: bool, numbers: Precision
    ) -> tuple[float, float]:
        transient = share.kept.working_bytes - share.kept.saved_bytes + share.peaks.activations
        if zero >= 2:  # one gradient filled and the last one reduced; parameters of this layer and the next
            gathered = share.parameters * numbers.width if zero == 3 else 0
            transient += 2 * share.trainable * numbers.gradient + 2 * gathered
        return gradients, transient
