"""A failing model made smaller: lines are taken out and numbers lowered for as long as the failure stays of its kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from model_text import Text

ROUNDS = 6


def shrink(text: Text, fails: Callable[[Text], bool], tries: int = 600) -> Text:
    """The smallest text found of which ``fails`` still holds; ``fails`` must refuse (return ``False``) what eager PyTorch does not run."""
    left = tries

    def holds(candidate: Text) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(candidate)

    for _ in range(ROUNDS):
        before = text
        text = _without_lines(text, holds)
        text = _simpler_lines(text, holds)
        if text == before or left <= 0:
            break
    return text


def _without_lines(text: Text, holds: Callable[[Text], bool]) -> Text:
    """Groups of lines, long ones first, then single ones, from the end to the beginning: uses stand behind what they use."""
    size = max(1, len(text.lines) // 4)
    while True:
        start = len(text.lines)
        while start > 0:
            start -= size
            first, last = max(0, start), start + size
            candidate = Text((*text.lines[:first], *text.lines[last:]))
            if any(line.strip() for line in text.lines[first:last]) and holds(candidate):
                text = candidate
                start = min(start, len(text.lines))
        if size == 1:
            return text
        size = max(1, size // 2)


def _simpler_lines(text: Text, holds: Callable[[Text], bool]) -> Text:
    index = 0
    while index < len(text.lines):
        for line in _simpler(text.lines[index]):
            candidate = Text((*text.lines[:index], line, *text.lines[index + 1 :]))
            if holds(candidate):
                text = candidate
                break
        index += 1
    return text


def _simpler(line: str) -> Iterator[str]:
    """The line in simpler forms: without a residual, without an argument, with a smaller size."""
    if match := re.match(r"(\s*)x = x [+*] (.*)$", line):
        yield f"{match[1]}x = {match[2]}"
    if match := re.match(r"(\s*)return (.*)$", line):
        yield f"{match[1]}return x.square().mean()"
    if match := re.match(r"(\s*)(\w+) = .*$", line):
        for value in ("x", "h"):
            if match[2] != value:
                yield f"{match[1]}{match[2]} = {value}"
    yield from _unwrapped(line)
    if match := re.match(r"(\s*mask = mask) [&|] (.*)$", line):
        yield f"{match[1].removesuffix(' mask')} {match[2]}"
    if line.startswith("B, S"):
        names, _, values = line.partition(" = ")
        numbers = [int(value) for value in values.split(",")]
        for place, number in enumerate(numbers):
            for smaller in (1, 2, 4):
                if smaller < number:
                    yield f"{names} = {', '.join(map(str, (*numbers[:place], smaller, *numbers[place + 1 :])))}"
    if match := re.search(r"range\((\d)\)\]", line):
        for count in range(1, int(match[1])):
            yield line.replace(match[0], f"range({count})]")


def _unwrapped(line: str) -> Iterator[str]:
    """The line with one call replaced by its first argument."""
    for match in re.finditer(r"(?:self|F|torch)\.\w+\(", line):
        depth, first = 1, ""
        for place in range(match.end(), len(line)):
            depth += (line[place] in "([{") - (line[place] in ")]}")
            if not first and (depth == 0 or (depth == 1 and line[place] == ",")):
                first = line[match.end() : place]
            if depth == 0:
                yield line[: match.start()] + first + line[place + 1 :]
                break
