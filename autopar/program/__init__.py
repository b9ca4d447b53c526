"""The runtime of emitted programs: the files of a program's folder beside its own ``model.py``.

``copy_runtime`` copies those that a program needs into its folder. There they are siblings, and import torch, spmd-types and each other,
never autopar.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterable, Set
from pathlib import Path

FILES = (
    "agree.py",
    "arrivals.py",
    "box_exchange.py",
    "box_files.py",
    "boxes.py",
    "buffers.py",
    "checkpoint.py",
    "checkpoint_files.py",
    "checkpoint_metadata.py",
    "chimera.py",
    "claims.py",
    "collectives.py",
    "compiled.py",
    "custom.py",
    "finite.py",
    "flattened.py",
    "fsdp.py",
    "fsdp_split.py",
    "groups.py",
    "guards.py",
    "halves.py",
    "halves_experts.py",
    "host.py",
    "int8.py",
    "kernels.py",
    "kernels_ctc.py",
    "kernels_experts.py",
    "kernels_fp8.py",
    "kernels_logits.py",
    "kernels_norm.py",
    "kernels_overlap.py",
    "kernels_random.py",
    "kernels_ring.py",
    "kernels_rnn.py",
    "kernels_vocab.py",
    "loader.py",
    "local_group.py",
    "masters.py",
    "mesh_axes.py",
    "metrics.py",
    "microbatches.py",
    "offload.py",
    "opaque.py",
    "optimizer_state.py",
    "optimizers.py",
    "out_of_memory.py",
    "parameters.py",
    "pipeline.py",
    "pretrained.py",
    "processes.py",
    "publications.py",
    "reductions.py",
    "runtime.py",
    "saved_views.py",
    "scaling.py",
    "schedulers.py",
    "segments.py",
    "selective.py",
    "share.py",
    "spec.py",
    "split_pipeline.py",
    "state.py",
    "state_places.py",
    "tracing.py",
    "train.py",
    "type_check.py",
    "values.py",
    "watch.py",
    "weight_gradients.py",
    "weights.py",
    "whole_tensors.py",
    "world.py",
)


def copy_runtime(folder: str | os.PathLike[str], uses: Iterable[str], compiled: bool = False) -> None:
    """Write the runtime into a program's folder: ``train.py``, the modules that ``model.py`` ``uses``, and all that these import.

    Imports of each other become imports of siblings. In a program with ``compiled`` layers the modules take the collectives of spmd-types
    from ``compiled.py``. A file of an earlier program in the folder that this one does not need is removed.
    """
    there = Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    needed = needed_files({"train", *uses, *(["compiled"] if compiled else [])})
    for name in FILES:
        if name in needed:
            (there / name).write_text(_as_sibling(name, compiled))
        elif (there / name).is_file() and (there / name).read_text() in (
            _as_sibling(name, compiled=False),
            _as_sibling(name, compiled=True),
        ):
            (there / name).unlink()


def needed_files(modules: Set[str]) -> set[str]:
    """The names of the files of ``modules``, and of all that these import."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found:
            found.add(name)
            waiting += _imported(name)
    return found


@functools.cache
def _imported(name: str) -> tuple[str, ...]:
    """The modules of this package that a file imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse((Path(__file__).parent / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == __name__:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{__name__}."):
            found.append(str(node.module).removeprefix(f"{__name__}."))
    return tuple(found)


def _as_sibling(name: str, compiled: bool) -> str:
    """The text of a file as it is in a program's folder."""
    text = (Path(__file__).parent / name).read_text()
    if compiled and name != "compiled.py":
        text = text.replace("import spmd_types as spmd\n", "from compiled import spmd\n")
    return text.replace("from autopar.program.", "from ").replace("from autopar.program import", "import")
