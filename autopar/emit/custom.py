"""Finds the modules that define custom ops, which a program imports."""

from __future__ import annotations

from autopar.emit.opaque import RESERVED
from autopar.errors import ProgramError
from autopar.graph import Graph
from autopar.ops.facts import is_custom, op_of
from autopar.torch_private import custom_op_module

_HINT = f"define it with torch.library.custom_op in a separate Python file, not named {' or '.join(sorted(RESERVED))}, and import it"


def custom_modules(graph: Graph) -> tuple[str, ...]:
    """Return the sorted names of the modules that define the custom ops of ``graph``.

    Raises ``ProgramError`` for an op without an importable module.
    """
    nodes = [node for cls in graph.classes.values() for node in cls.graph.graph.nodes]
    nodes += [] if graph.prelude is None else list(graph.prelude.graph.nodes)
    found = set()
    for target in {node.target for node in nodes if node.op == "call_function" and is_custom(node.target)}:
        module = custom_op_module(target)
        if module is None:
            raise ProgramError(f"no Python module is known to define the op {op_of(target).name}", _HINT)
        if module == "__main__" or module.partition(".")[0] in RESERVED:
            place = "the script itself" if module == "__main__" else f"a module named {module}"
            raise ProgramError(
                f"the op {op_of(target).name} is defined in {place}, where the program cannot import it", _HINT
            )
        if not all(part.isidentifier() for part in module.split(".")):
            raise ProgramError(
                f"the op {op_of(target).name} is defined in {module!r}, which Python cannot import", _HINT
            )
        found.add(module)
    return tuple(sorted(found))
