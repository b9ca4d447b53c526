"""Pipelines whose schedules run backward passes in two parts (``weight_gradients``): zero bubble, ZBV and DualPipeV."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .parameters import ParameterGroup
from .pipeline import Pipeline, Place, TracedStage
from .weight_gradients import Product, deferred


class SplitStage(TracedStage):
    """A stage of torch's pipeline whose backward passes may run in two parts.

    ``groups`` have the stage's parameters. Their ``adders`` add the gradients of the second part; autograd accumulates those of the first
    part.
    """

    def __init__(self, place: Place, *, groups: Sequence[ParameterGroup], **options: Any) -> None:
        super().__init__(*place, **options, dw_builder=self._second_part)
        self._adders, self._groups = [group.adders for group in groups], groups
        self._products: list[Product] = []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
            return
        with deferred() as self._products:
            super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)

    def _second_part(self) -> Callable[[], None]:
        """Return a function for the second part of the backward pass that has just run; an unsplit pass leaves it nothing to add."""
        products, self._products = self._products, []
        return functools.partial(self._add_weight_gradients, products)

    @torch.no_grad()
    def _add_weight_gradients(self, products: list[Product]) -> None:
        """Compute and add the weight gradients, in the order of the backward pass; free each product's operands."""
        while products:
            product = products.pop(0)
            (add,) = [found for adders in self._adders if (found := adders.get(id(product.weight)))]
            add(product.weight_gradient())
        for group in self._groups:
            group.finish_adding()


class SplitPipeline(Pipeline):
    """A pipeline of ``SplitStage``s."""

    ends_backwards = False

    def _make_stage(self, place: Place, options: dict[str, Any]) -> TracedStage:
        return SplitStage(place, groups=self._groups[place[1]], **options)
