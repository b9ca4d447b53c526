"""Emits a compiled layer that computes half of a microbatch. Its ``compute`` is a generator that yields for the other half's turn, and
``torch.compile`` doesn't compile generators: ``compute`` keeps the yields and the async collectives, and calls a compiled method (a piece)
for the ops between two yields."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.emit.body import issue_lines, statements, value_name
from autopar.emit.expressions import Text, literal
from autopar.emit.names import Names
from autopar.ops.meta import meta

COMPILED = "    @torch.compile(dynamic=False, options=OPTIONS)"
"""The decorator of a compiled method."""


def compiled_pieces(nodes: list[fx.Node], texts: dict[fx.Node, Text], names: Names) -> tuple[list[str], list[str]]:
    """Return the lines of the generator, and those of its pieces' methods. ``texts`` has the source text of the layer's arguments and
    attributes (``self.weight``); the text of each value that the generator computes is added."""
    pieces: list[list[fx.Node]] = [[]]
    for node in nodes:
        if (
            meta(node).get("other_half_before")
            or meta(node).get("kernel_async_op")
            or meta(node.prev).get("kernel_async_op")
        ):
            pieces.append([])
        pieces[-1].append(node)
    piece_of = {node: k for k, piece in enumerate(pieces) for node in piece}
    piece_of |= {sent: piece_of[node] for node in nodes for sent in meta(node).get("issued_after", ())}
    handles: dict[fx.Node, str] = {}
    lines: list[str] = []
    methods: list[str] = []
    for k, piece in enumerate(pieces):
        if any(meta(node).get("other_half_before") for node in piece):
            lines.append("        yield  # the other half's turn")
        given = [node for node in piece if node.op == "placeholder"]
        for node in given:
            lines += issue_lines(node, texts, names, handles)
        for node in (node for node in piece if meta(node).get("async_op")):
            texts[node] = Text(names.fresh(value_name(node)))
            lines.append(f"        {texts[node].text} = {handles[node]}.wait()")
        if meta(piece[-1]).get("kernel_async_op"):  # its kernel is a generator, too
            lines += statements(piece[-1:], texts, names, compiled=True)
        issued = ("async_op", "kernel_async_op")
        ops = [n for n in piece if n.op == "call_function" and not any(meta(n).get(key) for key in issued)]
        lines += _piece(k, ops, texts, names, methods)
        for node in piece[len(given) :]:
            lines += issue_lines(node, texts, names, handles)
        dead = [node for node in texts if _last_reader(node, piece_of) == k and texts[node].text.isidentifier()]
        if dead and k + 1 < len(pieces):
            lines.append(f"        del {', '.join(texts[node].text for node in dead)}")
    output = nodes[-1]
    assert output.op == "output", output
    lines.append(f"        return {', '.join(literal(result, texts) for result in _results(output))}")
    return lines, methods


def _piece(k: int, ops: list[fx.Node], texts: dict[fx.Node, Text], names: Names, methods: list[str]) -> list[str]:
    """Return the line that calls piece number ``k``, and append the piece's method to ``methods``."""
    inside = set(ops)
    read = dict.fromkeys(operand for node in ops for operand in node.all_input_nodes if operand not in inside)
    inputs = [node for node in read if not texts[node].text.startswith("self.")]
    sent = {conversion.args[0] for node in ops for conversion in meta(node).get("issued_after", ())}
    outputs = [node for node in ops if node in sent or any(user not in inside for user in node.users)]
    if not outputs:
        assert not ops, ops
        return []
    local_names = Names()
    local = {node: text for node, text in texts.items() if text.text.startswith("self.")}
    local |= {node: Text(local_names.fresh(texts[node].text)) for node in inputs}
    arguments = "".join(f", {local[node].text}: torch.Tensor" for node in inputs)
    returns = "torch.Tensor" if len(outputs) == 1 else "tuple[torch.Tensor, ...]"
    body = statements(ops, local, local_names, compiled=True)
    methods += [
        "",
        COMPILED,
        f"    def piece_{k}(self{arguments}) -> {returns}:",
        *body,
        f"        return {', '.join(local[node].text for node in outputs)}",
    ]
    call = f"self.piece_{k}({', '.join(texts[node].text for node in inputs)})"
    texts.update({node: Text(names.fresh(value_name(node))) for node in outputs})
    return [f"        {', '.join(texts[node].text for node in outputs)} = {call}"]


def _last_reader(node: fx.Node, piece_of: dict[fx.Node, int]) -> int:
    """Return the number of the last piece that reads the node's value, or -1; an async conversion counts where it is issued."""
    return max((piece_of[user] for user in node.users), default=-1)


def _results(output: fx.Node) -> Sequence[object]:
    results = output.args[0]
    return results if isinstance(results, tuple | list) else [results]
