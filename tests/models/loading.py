"""Training from a data set, in workers: each rank's own rows against the whole global batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from autopar.run import remote
from autopar.run.folder import import_runtime, program_modules


class Counting(Dataset[dict[str, Tensor]]):
    """A data set in memory that notes which rows are read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.read = tensors, list[int]()

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        self.read.append(row)
        return {name: tensor[row] for name, tensor in self.tensors.items()}


class Drawn(Counting):
    """A data set whose rows are drawn when they are read."""

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: tensor + random.random() for name, tensor in super().__getitem__(row).items()}


def keys(folder: str, drawn: bool) -> list[bool]:
    """In a worker: whether a data set has no checksum, and whether the next random numbers are those of before."""
    options = {"optimizer": None, "lr": 0.0, "seed": 0, "max_norm": None, "state": None}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    loader = trainer.loader((Drawn if drawn else Counting)(made()))
    before = random.getstate(), torch.get_rng_state()
    key = loader.key
    return [key == loader.order, before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())]


def order(rows: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order of ``DistributedSampler`` on one rank."""
    data = torch.utils.data.DistributedSampler(range(rows), num_replicas=1, rank=0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type, var-annotated]
    data.set_epoch(epoch)
    return torch.tensor(list(data))


def stopped(runtime: Any, trainer: Any, rows: Any) -> str:
    """Why a step stops in which the first layer of the last stage has a result that is not finite."""
    stage = max(trainer.stages)
    hooks = []
    if stage == len(trainer.program.spec.stages) - 1:
        layer = dict(trainer.stages[stage].named_children())["layer_1"]
        hooks.append(layer.register_forward_hook(lambda module, args, result: result * float("inf")))
    before = trainer.steps, [master.tensor.clone() for group in trainer._groups for master in group.masters]
    try:
        trainer.step(rows, "stop")
    except runtime.NonFiniteLossError as error:
        after = [master.tensor for group in trainer._groups for master in group.masters]
        assert before[0] == trainer.steps and all(torch.equal(a, b) for a, b in zip(before[1], after, strict=True))
        return str(error.message)
    finally:
        for hook in hooks:
            hook.remove()
    return ""


def compared(folder: str, state: str | dict[str, Tensor], data: dict[str, Tensor], file: str) -> dict[str, Any]:
    """Losses and gradients of whole global batches, and of own rows from a data set and from a file; and what was read."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program), state=state)
        batch, length = int(program.plan["global_batch"]), len(next(iter(data.values())))
        counting = Counting(data)
        how = runtime.Order(shuffle=True, seed=3)
        loaders = [trainer.loader(counting, how), trainer.loader(runtime.Tensors.read(file), how)]
        found: dict[str, Any] = {"same": [], "evaluated": [], "rows": []}
        permuted = order(length, True, 3, 0)
        for step in range(length // batch):
            whole = {name: tensor[permuted[step * batch : (step + 1) * batch]] for name, tensor in data.items()}
            loss = trainer.forward_backward(whole)
            wanted = [group.gradients() for group in trainer._groups]
            for loader in loaders:
                counting.read.clear()
                rows, _ = loader.read((0, step * batch))
                again = trainer.forward_backward(rows)
                grads = [group.gradients() for group in trainer._groups]
                pairs = [pair for a, b in zip(wanted, grads, strict=True) for pair in zip(a, b, strict=True)]
                found["same"].append(loss == again and all(torch.equal(a, b) for a, b in pairs) and len(wanted) > 0)
                if loader is loaders[0]:
                    found["rows"].append(list(counting.read))
            if not program.spec.no_evaluation:
                found["evaluated"].append(abs(trainer.evaluate(rows) - loss) <= 1e-15 * abs(loss))
                found["evaluated"].append(trainer.evaluate(whole) == trainer.evaluate(rows))
                found["same"].append(trainer.forward_backward(rows) == loss)
        found["same"].append(loss == trainer.forward_backward(whole))  # evaluation left nothing over
        padded, _ = trainer.loader(data, runtime.Order(last="pad")).read((0, 24))
        found["padded"] = trainer.forward_backward(padded), trainer.gradients()
        trainer.forward_backward(whole)
        share = trainer._schedule.share
        share._prelude = replace(share._prelude, by_rows=False)  # then the labels are gathered
        found["same"].append(loss == trainer.forward_backward(rows))
        found["stopped"] = stopped(runtime, trainer, rows)
        if program.spec.mesh.get("tensor", 1) > 1:
            try:
                trainer.loader(uneven()).read((0, 0))
            except runtime.DataError as error:
                found["uneven"] = error.message
        return found


ROWS = 30


def made() -> dict[str, Tensor]:
    """Rows for the hand-written program."""
    from programs import mlp_batch

    batches = [mlp_batch(seed) for seed in range(4)]
    return {name: torch.cat([batch[name] for batch in batches])[:ROWS] for name in batches[0]}


def dataset() -> Counting:
    return Counting(made())


class Broken(Counting):
    """A data set whose row 11 cannot be read, and whose row 20 has another shape."""

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if row == 11:
            raise OSError("row 11 is on a bad sector")
        found = super().__getitem__(row)
        return {name: tensor[:2] for name, tensor in found.items()} if row in range(16, 24) else found


def broken() -> Broken:
    return Broken(made())


def uneven() -> Counting:
    """A data set that gives every process other labels, as augmentation without a seed of its own would."""
    data = made()
    data["labels"] = (data["labels"] + dist.get_rank()) % 11
    return Counting(data)


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from dataset()


def stream() -> Stream:
    return Stream()


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def epochs(folder: str, state: str, file: str, saved: str) -> dict[str, Any]:
    """Two epochs of the data in ``file`` by the program's own rows, a checkpoint in the middle of the second one, and the rest of it again.

    ``reads`` has the rows that this rank reads of each input, epoch by epoch, and ``bytes`` what it copies out of the file; ``same`` says
    whether losses and gradients are those of whole global batches, bit for bit, and ``resumed`` whether rows and losses after the
    checkpoint are.
    """
    options = {"optimizer": sgd, "lr": 0.0, "seed": 0, "max_norm": None, "state": state}
    data = torch.load(file, weights_only=True, mmap=True)
    how = {"shuffle": True, "seed": 3}

    def opened() -> tuple[Any, Any]:
        trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
        return trainer, trainer.loader(data, how)

    reads, copied = list[list[int]](), 0

    def watched(loader: Any) -> None:
        kind = type(loader._dataset)
        plain = kind.__getitems__

        def counted(self: Any, rows: list[int]) -> Any:
            nonlocal copied
            found = plain(self, rows)
            reads.append(list(rows))
            copied += sum(tensor.numel() * tensor.element_size() for tensor in found.values())
            return found

        kind.__getitems__ = counted

    trainer, loader = opened()
    watched(loader)
    same, steps = [], loader.rows // loader.batch
    for step in range(2 * steps):
        epoch, first = divmod(step, steps)
        rows = order(loader.rows, True, 3, epoch)[first * loader.batch : (first + 1) * loader.batch]
        whole = trainer.forward_backward({name: tensor[rows] for name, tensor in data.items()})
        wanted = [gradient.clone() for group in trainer._groups for gradient in group.gradients()]
        own, _ = loader.read((epoch, first * loader.batch))
        loss = trainer.forward_backward(own)
        gradients = [gradient for group in trainer._groups for gradient in group.gradients()]
        same.append(loss == whole and all(torch.equal(a, b) for a, b in zip(wanted, gradients, strict=True)))
    first_epochs, total = [sum(reads[e * steps : (e + 1) * steps], []) for e in range(2)], copied

    for _ in range(steps + 1):
        trainer.step_from(loader)
    trainer.save(saved)
    reads.clear()
    losses = [trainer.step_from(loader)[0] for _ in range(steps - 1)]
    followed = list(reads)
    again, other = opened()
    watched(other)
    again.load(saved)
    reads.clear()
    resumed = [again.step_from(other)[0] for _ in range(steps - 1)] == losses and reads == followed
    names = loader._share.inputs
    return {"inputs": names, "reads": first_epochs, "bytes": total // 2, "same": all(same), "resumed": resumed}


class Waits(TorchDispatchMode):
    """Counts the tensors that the host reads: on a GPU it waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def unread(folder: str, state: dict[str, Tensor], data: dict[str, Tensor]) -> dict[str, Any]:
    """Three steps, of which nobody reads the first two losses, against three that are read; and a loss that is not finite."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "max_norm": 0.5}
        trainers = [runtime.Trainer(program, world, state=state, **sgd) for _ in range(2)]
        loaders = [trainer.loader(data) for trainer in trainers]
        scalars, reduced = list[int](), dist.all_reduce

        def noted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            scalars.append(tensor.numel())
            return reduced(tensor, *args, **options)

        read = [trainers[0].step_from(loaders[0], "stop")[0] for _ in range(3)]
        dist.all_reduce = noted
        try:
            for _ in range(2):
                rows, after = loaders[1].read(trainers[1].positions.get(loaders[1].key, (0, 0)), ahead=True)
                scalars.clear()
                with Waits() as waits:
                    trainers[1].advance(rows)
                trainers[1].positions[loaders[1].key] = after
            of_advance = list(scalars)
            rows, _ = loaders[1].read(after)
            scalars.clear()
            with Waits() as last:
                loss = trainers[1].step(rows, "stop")
        finally:
            dist.all_reduce = reduced
        states = [[m.tensor.clone() for g in trainer._groups for m in g.masters] for trainer in trainers]
        found = {
            "same": read[2] == loss and all(torch.equal(a, b) for a, b in zip(*states, strict=True)),
            "waits": (waits.count, last.count),
            "scalars": (of_advance, list(scalars)),
            "late": "",
        }
        trainers[1].save(Path(folder) / "saved")
        trainers[1].advance(rows)
        trainers[1].load(Path(folder) / "saved")
        found["undone"] = len(trainers[1]._unread)
        trainers[1].advance(rows)
        for master in (m for group in trainers[1]._groups for m in group.masters):
            master.tensor.data.fill_(float("inf"))
        trainers[1]._publications.start()
        trainers[1].advance(rows)
        try:
            trainers[1].check_unread()
        except runtime.NonFiniteLossError as error:
            found["late"] = f"{error.message}; {error.late}"
        return found
