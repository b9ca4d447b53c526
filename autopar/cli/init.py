"""``autopar init``: three questions, and the answers as a cluster file and a script that trains."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import Tensor

from autopar.cli.commands import default_precision
from autopar.cli.load import Sizes, called_factory, is_pretrained, load_model
from autopar.devices import Cluster, parse
from autopar.errors import AutoparError, ModelError, UsageError
from autopar.workload import Workload

T = TypeVar("T")
CLUSTER, SCRIPT = "cluster.toml", "train.py"
HERE = "this machine"


def init_command(
    folder: str,
    model: str | None,
    devices: str | None,
    global_batch: int | None,
    seq: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Asks for what no option says, and writes both files; nothing is replaced."""
    home = Path(folder)
    for name in (CLUSTER, SCRIPT):
        if (home / name).exists():
            raise UsageError(
                f"{home / name} exists, and init does not overwrite files", "name another folder: autopar dev init DIR"
            )
    if yes and not model:
        raise UsageError("--yes asks no question, but there is no --model", "add --model, such as --model gpt2")
    model = model or _ask("model: a name of `autopar help models`, a config.json, or file.py:factory", str, "gpt2")
    devices = HERE if yes and not devices else devices
    words, cluster = (
        _cluster(devices) if devices else _ask("devices: 8xH100-80GB, 64 H100, this machine", _cluster, HERE)
    )
    sizes = Sizes(seq, global_batch)
    ask_sizes = not yes and sizes == Sizes() and ":" not in model
    workload = load_model(model, sizes, default_precision=default_precision(cluster))
    if ask_sizes:
        own = "x".join(map(str, _first(workload.batch).shape[:2]))
        sizes = _ask("global batch, or global batch x tokens of a sequence", _sizes, own)
        workload = load_model(model, sizes, default_precision=default_precision(cluster))
    script = _script(model, cluster, workload, sizes)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{home} cannot be made: {error.strerror}", "give a folder that can be made and written to"
        ) from error
    for name, text in ((CLUSTER, words), (SCRIPT, script)):
        with (home / name).open("x") as file:
            file.write(text)
        if not as_json:
            click.echo(home / name)
    if as_json:
        click.echo(
            json.dumps({"files": [str(home / CLUSTER), str(home / SCRIPT)], "start": _command(cluster, home / SCRIPT)})
        )
    where = "here" if cluster.local else "on every node"
    click.echo(
        f"{_command(cluster, home / SCRIPT)}\n    trains {where}\nautopar plan {model} --devices {home / CLUSTER}\n    shows the plan",
        err=True,
    )


def _ask(question: str, read: Callable[[str], T], default: str) -> T:
    """The answer as ``read`` understands it; asked again as long as it does not."""

    def value(text: str) -> T:
        try:
            return read(text.strip())
        except AutoparError as error:
            raise click.UsageError(str(error)) from error

    answer: T = click.prompt(question, default=default, value_proc=value, err=True)
    return answer


def _sizes(text: str) -> Sizes:
    found = re.fullmatch(r"(\d+)(?:\s*[x×*]\s*(\d+))?", text)
    if found is None:
        raise UsageError(f"{text!r} is not a batch", "write 512, or 512x4096 for sequences of 4,096 tokens")
    return Sizes(int(found[2]) if found[2] else None, int(found[1]))


def _cluster(text: str) -> tuple[str, Cluster]:
    """The text of a cluster file, and the cluster, for devices as people write them."""
    if text.endswith(".toml"):
        cluster = parse(text)
        return Path(text).read_text("utf-8"), cluster
    if text.lower() in (HERE, "here", "local", ""):
        text = str(torch.cuda.device_count() or min(2, os.cpu_count() or 1))
    if loose := re.fullmatch(r"(\d+)\s+([A-Za-z].*)", text):
        text = f"{loose[1]}x{loose[2]}"
    cluster = parse(text)
    gpu = "cpu" if cluster.kind == "cpu" else cluster.gpu.name
    lines = [f'gpu = "{gpu}"', f"gpus_per_node = {cluster.gpus_per_node}"]
    if cluster.nodes > 1:
        lines.insert(0, f"nodes = {cluster.nodes}")
    if cluster.local:
        lines.append("local = true  # the devices are this machine's")
    else:
        lines.append("# inter_node_gb_per_s, memory_limit_gb and more: docs/reference/cluster-toml.md")
    return "\n".join([f'name = "{cluster.name if not cluster.local else HERE}"', *lines, ""]), cluster


def _first(batch: Any) -> Tensor:
    tensors = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else [batch]
    found = next(tensor for tensor in tensors if isinstance(tensor, Tensor))
    return found


def _command(cluster: Cluster, script: Path) -> str:
    """The command that starts the script, on every node."""
    if cluster.local:
        return f"python {script}"
    nodes = f"--nnodes {cluster.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 " if cluster.nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.gpus_per_node} {script}"


@dataclass(frozen=True)
class _Parts:
    """What differs between scripts: modules to import, a line that imports from the model's own, lines that make ``model`` and
    ``batch``, keywords of ``autopar.compile``."""

    modules: tuple[str, ...]
    own: tuple[str, ...]
    make: tuple[str, ...]
    keywords: str


def _script(model: str, cluster: Cluster, workload: Workload, sizes: Sizes) -> str:
    """The script: model, batch, ``autopar.compile``, training."""
    parts = _factory(model, sizes) if ":" in model else _described(model, cluster, workload)
    standard = sorted({"os", *parts.modules} - {"torch"})
    command = _command(cluster, Path(SCRIPT))
    return "\n".join(
        [
            f'"""Trains {workload.name or model} on the devices of {CLUSTER}{"" if cluster.local else ", started on every node"}:',
            "",
            f"    {command}",
            '"""',
            "",
            *(f"import {name}" for name in standard),
            "from pathlib import Path",
            "",
            *(["import torch", ""] if "torch" in parts.modules else []),
            "import autopar",
            *parts.own,
            "",
            "HERE = Path(__file__).resolve().parent",
            "STEPS = 10",
            "",
            "",
            "def say(step: int, loss: float, record: dict) -> None:",
            '    if os.environ.get("RANK", "0") == "0":',
            '        print(f"step {step + 1} loss {loss:.4f}", flush=True)',
            "",
            "",
            "def main() -> None:",
            *(f"    {line}" for line in parts.make),
            f'    with autopar.compile(model, HERE / "{CLUSTER}", batch, {parts.keywords}lr=3e-4) as program:',
            "        # program.loader reads a data set in place of this batch, each process its own rows",
            "        program.train([batch], STEPS, say)",
            '        program.save(HERE / "checkpoints")',
            "",
            "",
            'if __name__ == "__main__":',
            "    main()",
            "",
        ]
    )


def _factory(model: str, sizes: Sizes) -> _Parts:
    """The parts for a factory."""
    result, arguments = called_factory(model, sizes)
    count = len(result) if isinstance(result, (tuple, list)) else 1
    if count == 1:
        raise ModelError(f"{model} returns no batch, and the script needs one", "return (module, batch)")
    source, _, name = model.rpartition(":")
    path = Path(source).resolve() if source.endswith(".py") else None
    if path is not None and not path.stem.isidentifier():
        raise ModelError(f"{source} has a name that Python cannot import", "call it like a module, such as model.py")
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    names = "model, batch" if count == 2 else "model, batch, loss_fn"
    own = [] if path is None else ["", f"sys.path.insert(0, {str(path.parent)!r})"]
    own.append(f"from {source if path is None else path.stem} import {name} as make  # noqa: E402")
    on_meta = any(parameter.is_meta for parameter in result[0].parameters())
    keywords = ("loss_fn, " if count == 3 else "") + ('init="own", ' if on_meta else "")
    return _Parts(("sys",) if path else (), tuple(own), (f"{names} = make({given})",), keywords)


def _described(model: str, cluster: Cluster, workload: Workload) -> _Parts:
    """The parts for a model of the zoo or of a configuration: on meta, with random numbers for a batch."""
    shape = _first(workload.batch).shape
    seq = shape[1] if len(shape) == 2 else None
    given = f'seq={seq}, global_batch={shape[0]}, precision="{default_precision(cluster)}"'
    modules: tuple[str, ...] = ("torch",)
    if model.endswith(".json") or is_pretrained(model):
        path = Path(model, "config.json") if is_pretrained(model) else Path(model)
        modules, own = ("json", "torch"), "from autopar.zoo.hf import build_config"
        make = [
            f"config = json.loads(Path({str(path.resolve())!r}).read_text())",
            f"model, _ = build_config(config, {given})  # on meta: without values",
        ]
    else:
        own = "from autopar import zoo"
        make = [f'model, _ = zoo.build("{model}", {given})  # on meta: without values']
    make += ["torch.manual_seed(0)", "batch = {  # random numbers stand for your data"]
    assert isinstance(workload.batch, dict)
    make += [f'    "{name}": {_random(tensor, workload.model)},' for name, tensor in workload.batch.items()]
    init = repr(str(Path(model).resolve())) if is_pretrained(model) else '"own"'
    return _Parts(modules, (own,), (*make, "}"), f"init={init}, ")


def _random(tensor: Tensor, model: torch.nn.Module) -> str:
    """A tensor of random numbers like ``tensor``, as Python. Whole numbers are indices: below the size of what they look up."""
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return f"torch.randn({shape}, dtype={tensor.dtype})"
    config = getattr(model, "config", None)
    most = getattr(config, "num_labels" if tensor.dim() == 1 else "vocab_size", None) or 2
    return f"torch.randint(0, {most}, {shape})"
