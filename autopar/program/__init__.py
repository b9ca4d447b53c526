"""The files that every program's folder holds beside its own ``model.py``: written once here, copied there.

Here they are modules of this package, checked and tested like the rest; there they are each other's siblings, and know nothing
of autopar. ``copy_runtime`` makes the one from the other.
"""

from __future__ import annotations

import os
from pathlib import Path

FILES = (
    "agree.py",
    "collectives.py",
    "custom.py",
    "flattened.py",
    "guards.py",
    "kernels.py",
    "kernels_ctc.py",
    "kernels_experts.py",
    "kernels_norm.py",
    "kernels_overlap.py",
    "kernels_random.py",
    "kernels_ring.py",
    "kernels_rnn.py",
    "offload.py",
    "opaque.py",
    "optimizers.py",
    "segments.py",
    "selective.py",
    "state.py",
    "world.py",
    "buffers.py",
    "parameters.py",
    "reductions.py",
    "runtime.py",
    "train.py",
    "weight_gradients.py",
)


def copy_runtime(folder: str | os.PathLike[str]) -> None:
    """Write the runtime's files into a program's folder; their imports of each other become those of siblings."""
    here, there = Path(__file__).parent, Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (there / name).write_text(
            (here / name)
            .read_text()
            .replace("from autopar.program.", "from ")
            .replace("from autopar.program import", "import")
        )
