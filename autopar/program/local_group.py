"""The simplest group of parameters: no other rank has them, and the master copies are the parameters themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .masters import Master, alike, set_parameter
from .world import Layout, LoadedProgram, World


class LocalGroup:
    """Parameters with gradients that no other rank and no other stage adds to, and with masters of the stage's own dtype.

    Autograd accumulates their gradients over microbatches, as it does on one device, and the optimizer updates the parameters themselves.
    """

    shared = None

    def __init__(self, stage: nn.Module, layouts: Sequence[Layout], world: World, program: LoadedProgram) -> None:
        self.layouts = tuple(layouts)
        self._world = world
        self._params: dict[Layout, nn.Parameter] = {}
        self.masters: list[Master] = []
        self.frozen: list[Master] = []
        for layout in layouts:
            values = torch.zeros(
                stage.get_parameter(layout.name).shape, dtype=program.dtypes(layout)[0], device=world.device
            )
            param = self._params[layout] = nn.Parameter(values, layout.trainable)
            set_parameter(stage, layout.name, param)
            mine = self.masters if layout.trainable else self.frozen
            mine.append(Master(layout, param, alike(layout, (), world)))

    def own_gradients(self) -> list[Tensor]:
        """The gradients of this rank's masters."""
        return [master.tensor.grad for master in self.masters if master.tensor.grad is not None]

    def adders(self) -> Mapping[int, Callable[[Tensor], None]]:
        """As of ``Group``."""

        def adder(param: nn.Parameter) -> Callable[[Tensor], None]:
            def add(gradient: Tensor) -> None:
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)

            return add

        return {id(master.tensor): adder(master.tensor) for master in self.masters}

    def finish_adding(self) -> None:
        """Nothing."""

    @torch.no_grad()
    def load(self, source: Callable[[Layout], Tensor]) -> None:
        """Fill the parameters with this rank's slices of the original parameters from ``source``."""
        for layout, param in self._params.items():
            param.copy_(layout.slice(source(layout), self._world.coordinates))

    def zero_grad(self) -> None:
        """Free the gradients of the last step."""
        for master in self.masters:
            master.tensor.grad = None

    def finish_reduction(self) -> None:
        """Set the gradients of parameters that got none in this step to zero. Padding has no gradient."""
        for master in self.masters:
            if master.tensor.grad is None:
                master.tensor.grad = torch.zeros_like(master.tensor)
            for dim, start, length in master.layout.beyond(self._world.coordinates):
                master.tensor.grad.narrow(dim, start, length).zero_()

    def average(self) -> None:
        """Nothing: no replica has a copy."""

    def upload(self) -> None:
        """Nothing: the masters are the parameters themselves."""

    def publish(self) -> None:
        """Nothing, likewise."""

    def values(self) -> dict[str, Tensor]:
        """This rank's whole slice of every parameter, by its name in the stage."""
        return {layout.name: param.detach() for layout, param in self._params.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's whole slice of every trainable parameter's gradient, by its name in the stage."""
        return {m.layout.name: m.tensor.grad for m in self.masters if m.tensor.grad is not None}
