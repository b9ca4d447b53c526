"""How many layers ahead FSDP gathers: one is enough for layers that are alike, which is why the search does not try more."""

from __future__ import annotations

import itertools

import pytest

Seconds = tuple[int, int, int]
"""Of one layer in one pass: its gather, its computation, its reduction (0: none)."""


def pass_s(layers: list[Seconds], ahead: int) -> int:
    """Seconds of a pass: collectives come one after the other in the order of issue, and so do computations. A layer's computation waits
    for its gather; when it starts, the gathers of the next ``ahead`` layers are issued, and when it ends its reduction is."""
    wire = device = 0
    gathered: list[int] = []
    for i, (_, compute, reduce) in enumerate(layers):
        for upto, issue in ((i + 1, device), (i + 1 + ahead, None)):
            now = max(device, gathered[i]) if issue is None else issue
            while len(gathered) < min(upto, len(layers)):
                wire = max(wire, now) + layers[len(gathered)][0]
                gathered.append(wire)
        device = max(device, gathered[i]) + compute
        wire = max(wire, device) + reduce if reduce else wire
    return max(device, wire)


@pytest.mark.parametrize("ahead", [2, 3, 8])
def test_more_than_one_layer_ahead_gains_less_than_one_computation_for_layers_that_are_alike(ahead: int) -> None:
    """And nothing where nothing is reduced. What it gains is at the end of a pass: more layers do not gain more."""
    for layer in itertools.product(range(1, 6), range(1, 6), range(4)):
        few, many = (pass_s([layer] * n, 1) - pass_s([layer] * n, ahead) for n in (16, 64))
        assert few == many, layer
        assert few < layer[1] if layer[2] else few == 0, layer


def test_layers_that_alternate_gain_by_two() -> None:
    layers = [(1, 6, 0), (1, 1, 0), (6, 1, 0)] * 4
    assert pass_s(layers, 2) < pass_s(layers, 1)
