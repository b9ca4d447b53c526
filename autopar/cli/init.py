"""``autopar dev init`` writes a cluster file, and a script that trains a model on the cluster."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.cli.commands import default_precision
from autopar.cli.console import Messages, show
from autopar.cli.load import SizeOptions, call_factory, config_file, is_pretrained, load_model
from autopar.cli.options import PlanRequest
from autopar.devices import Cluster, parse
from autopar.errors import ModelError, UsageError
from autopar.workload import Workload

CLUSTER, SCRIPT = "cluster.toml", "train.py"
HERE = "this machine"
_SCRIPT = '''"""Trains {title} on the devices of cluster.toml{where}:

    {command}
"""

{imports}
from pathlib import Path

{own}

HERE = Path(__file__).resolve().parent
STEPS = 10


def say(step: int, loss: float, record: dict) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"step {{step + 1}} loss {{loss:.4f}}", flush=True)


def main() -> None:
{make}
    with autopar.compile(model, HERE / "cluster.toml", batch, {keywords}lr=3e-4) as program:
        # program.loader reads a data set in place of this batch, each process its own rows
        program.train([batch], STEPS, say)
        program.save(HERE / "checkpoints")


if __name__ == "__main__":
    main()
'''


def init_command(request: PlanRequest, output: str, as_json: bool) -> None:
    """Write ``cluster.toml`` and ``train.py``, or raise ``UsageError`` if one of them exists."""
    home = Path(output)
    for name in (CLUSTER, SCRIPT):
        if (home / name).exists():
            raise UsageError(
                f"{home / name} exists, and init does not overwrite files", "name another folder with -o DIR"
            )
    words, cluster = _cluster(request.devices)
    sizes = SizeOptions(request.seq, request.global_batch)
    workload = load_model(request.model, sizes, default_precision=default_precision(cluster))
    texts = {CLUSTER: words, SCRIPT: _script(request.model, cluster, workload, sizes)}
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{home} cannot be made: {error.strerror}", "give a folder that can be made and written to"
        ) from error
    for name, text in texts.items():
        with (home / name).open("x") as file:
            file.write(text)
    start, files = _command(cluster, home / SCRIPT), [str(home / name) for name in texts]
    show(as_json, {"files": files, "start": start}, *files)
    with Messages() as messages:
        messages.say(f"{start}\n    trains {'here' if cluster.local else 'on every node'}")
        plan = shlex.join(["autopar", "plan", request.model, "--devices", str(home / CLUSTER)])
        messages.say(f"{plan}\n    shows the plan")


def _cluster(text: str) -> tuple[str, Cluster]:
    """Return the text of the cluster file for a description (``64 H100``, ``this machine``, or a file to copy), and the cluster."""
    if text.endswith(".toml"):
        cluster = parse(text)
        return Path(text).read_text("utf-8"), cluster
    if text == HERE:
        text = str(torch.cuda.device_count() or min(2, os.cpu_count() or 1))
    cluster = parse(re.sub(r"^(\d+)\s+(?=[A-Za-z])", r"\1x", text))
    gpu = "cpu" if cluster.kind == "cpu" else cluster.gpu.name
    lines = [f'name = "{HERE if cluster.local else cluster.name}"']
    lines += [f"nodes = {cluster.nodes}"] if cluster.nodes > 1 else []
    lines += [f'gpu = "{gpu}"', f"gpus_per_node = {cluster.gpus_per_node}"]
    if cluster.local:
        lines.append("local = true  # the devices are this machine's")
    else:
        lines.append("# inter_node_gb_per_s, memory_limit_gb and more: docs/reference/cluster-toml.md")
    return "\n".join([*lines, ""]), cluster


def _command(cluster: Cluster, script: Path) -> str:
    """Return the command that starts the script, for every node to run."""
    if cluster.local:
        return shlex.join(["python", str(script)])
    nodes = f"--nnodes {cluster.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 " if cluster.nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.gpus_per_node} {shlex.quote(str(script))}"


def _script(model: str, cluster: Cluster, workload: Workload, sizes: SizeOptions) -> str:
    """Return the text of the script, which makes the model and the batch, calls ``autopar.compile``, and trains."""
    modules, own, make, keywords = (
        _factory_parts(model, sizes) if ":" in model else _config_parts(model, default_precision(cluster), workload)
    )
    return _SCRIPT.format(
        title=workload.name or model,
        where="" if cluster.local else ", started on every node",
        command=_command(cluster, Path(SCRIPT)),
        imports="\n".join(f"import {name}" for name in sorted(["os", *modules])),
        own="\n".join(own),
        make="\n".join(f"    {line}" for line in make),
        keywords=keywords,
    )


_Parts = tuple[list[str], list[str], list[str], str]
"""The parts of the script that depend on the model: standard modules to import, other import lines, lines that make ``model`` and
``batch``, further arguments of ``autopar.compile``."""


def _factory_parts(model: str, sizes: SizeOptions) -> _Parts:
    """Return the script's parts for a factory."""
    result, arguments = call_factory(model, sizes)
    count = len(result) if isinstance(result, (tuple, list)) else 1
    if count == 1:
        raise ModelError(f"{model} returns no batch, and the script needs one", "return (module, batch)")
    source, _, name = model.rpartition(":")
    path = Path(source).resolve() if source.endswith(".py") else None
    if path is not None and not path.stem.isidentifier():
        raise ModelError(f"{source} has a name that Python cannot import", "call it like a module, such as model.py")
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    names = "model, batch" if count == 2 else "model, batch, loss_fn"
    own = ["import autopar", *([] if path is None else ["", f"sys.path.insert(0, {str(path.parent)!r})"])]
    own.append(f"from {source if path is None else path.stem} import {name} as make  # noqa: E402")
    on_meta = any(parameter.is_meta for parameter in result[0].parameters())
    keywords = ("loss_fn, " if count == 3 else "") + ('init="own", ' if on_meta else "")
    return ["sys"] if path else [], own, [f"{names} = make({given})"], keywords


def _config_parts(model: str, precision: str, workload: Workload) -> _Parts:
    """Return the script's parts for a zoo or configuration model, which is on meta and has a random batch."""
    batch: dict[str, Any] = workload.batch
    shape = next(iter(batch.values())).shape
    given = f'seq={shape[1] if len(shape) == 2 else None}, global_batch={shape[0]}, precision="{precision}"'
    if (file := config_file(model)) is not None:
        modules, source = ["json"], "from autopar.zoo.hf import build_config"
        make = [f"config = json.loads(Path({str(file.resolve())!r}).read_text())"]
        make.append(f"model, _ = build_config(config, {given})  # on meta: without values")
    else:
        modules, source = [], "from autopar import zoo"
        make = [f'model, _ = zoo.build("{model}", {given})  # on meta: without values']
    make += ["torch.manual_seed(0)", "batch = {  # random numbers stand for your data"]
    make += [f'    "{name}": {_random(tensor, workload.model)},' for name, tensor in batch.items()]
    init = repr(str(Path(model).resolve())) if is_pretrained(model) else '"own"'
    return modules, ["import torch", "", "import autopar", source], [*make, "}"], f"init={init}, "


def _random(tensor: Tensor, model: torch.nn.Module) -> str:
    """Return Python code for a random tensor like ``tensor``; integers are valid labels or token ids of ``model``."""
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return f"torch.randn({shape}, dtype={tensor.dtype})"
    config = getattr(model, "config", None)
    most = getattr(config, "num_labels" if tensor.dim() == 1 else "vocab_size", None) or 2
    return f"torch.randint(0, {most}, {shape})"
