"""Assigns nodes to the model's repeated blocks, by the ``nn_module_stack`` that export records on every node.

A block is the outermost member of a module list or ``Sequential`` around the node. A block that is only a chain of smaller blocks (a
stage of a ResNet, a level of a U-Net) is replaced by those smaller blocks.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopar.ops.meta import meta

Block = tuple[str, str]
"""A module's path in the user's model, and an id of the call (of the module and its parents); two empty strings outside of blocks."""


def stack(node: fx.Node) -> list[tuple[str, str, str]]:
    """Return (path in the user's model, call, class name) of the submodules that contain the node, outermost first."""
    modules = []
    for key, (path, cls) in (meta(node).get("nn_module_stack") or {}).items():
        if path.startswith("module."):
            name = cls if isinstance(cls, str) else cls.__qualname__
            call = key.rsplit("@", 1)[1] if "@" in key else ""
            modules.append((path.removeprefix("module.").split("@")[0], call, name.rsplit(".", 1)[-1]))
    return modules


def parent(path: str) -> str:
    """Return the path of the parent module; ``""`` is the model."""
    return path.rpartition(".")[0]


def is_leaf(path: str, classes: dict[str, str]) -> bool:
    """Return whether the module has no submodules. ``classes`` maps module paths to class names."""
    return not any(other.startswith(path + ".") for other in classes)


def blocks(main: list[fx.Node], classes: dict[str, str]) -> list[Block]:
    """Return the block of each node of ``main``, in execution order."""
    found = [_outermost(node, classes) for node in main]
    members: dict[Block, list[int]] = {}
    for index, block in enumerate(found):
        members.setdefault(block, []).append(index)
    pending = [block for block in members if block[0]]
    while pending:
        block = pending.pop()
        inner = [_outermost(main[i], classes, below=block[0]) for i in members[block]]
        if not _is_chain([main[i] for i in members[block]], inner, classes):
            continue
        for index, smaller in zip(members[block], inner, strict=True):
            found[index] = smaller
            members.setdefault(smaller, []).append(index)
        pending += dict.fromkeys(smaller for smaller in inner if smaller[0])
    return found


def _outermost(node: fx.Node, classes: dict[str, str], below: str = "") -> Block:
    """Return the outermost block that contains the node, or the outermost one inside the block ``below``."""
    calls_above = ""
    for path, call, _ in stack(node):
        calls_above += f"@{call}" if call else ""
        parts = path.split(".")
        for k, part in enumerate(parts):
            prefix, container = ".".join(parts[: k + 1]), ".".join(parts[:k])
            member = part.isdigit() or classes.get(container) == "Sequential"
            if member and classes.get(prefix) != "Sequential" and (not below or prefix.startswith(below + ".")):
                return prefix, calls_above
    return "", ""


def _is_chain(nodes: list[fx.Node], inner: list[Block], classes: dict[str, str]) -> bool:
    """Return whether the nodes are a chain of the blocks ``inner``, of which at least two have the same class.

    Each block reads the results of the block before it, or of code after that block; that code doesn't read older values, as a residual
    around the blocks would. The blocks themselves may read older values, such as a time embedding.
    """
    chain = [block for block in dict.fromkeys(inner) if block[0]]
    kinds = Counter(classes.get(path) for path, _ in chain if not is_leaf(path, classes))
    if max(kinds.values(), default=0) < 2:
        return False
    step = {block: index for index, block in enumerate(chain)}
    steps: dict[fx.Node, int] = {}  # the step of the chain in which each node is computed
    linked = {0}
    current = -1
    for node, block in zip(nodes, inner, strict=True):
        current = step.get(block, current)
        steps[node] = current
        operands = [steps.get(n, -1) for n in node.all_input_nodes if meta(n)["needs_input"] or n.op != "placeholder"]
        if block[0] and current - 1 in operands:
            linked.add(current)
        if not block[0] and current >= 0 and any(step_of < current for step_of in operands):
            return False
    return len(linked) == len(chain)
