"""Figures of the pages of evidence that other pages quote: written between ``<!-- quoted NAME -->`` marks, from the pages themselves.

``python tests/reports quoted`` writes them; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from places import DOCS, EVIDENCE, ROOT

PAGES = (ROOT / "README.md", DOCS / "guide" / "peers.md", EVIDENCE / "validation.md")


def _text(page: str) -> str:
    return (EVIDENCE / page).read_text()


def _row(page: str, name: str) -> list[str]:
    """The cells of the first row of that name in a page's tables, behind the name."""
    line = next(line for line in _text(page).splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def errors() -> str:
    """Errors of predictions, in-sample and with each source left out of the fit."""
    time_s, _, time_left, memory, _, memory_left = _row("fit.md", "all rows")
    others_s, _, others_left, *_ = _row("fit.md", "all but HF's sweep")
    return f"""| median / 90th percentile of the relative error | in-sample | source left out |
|---|---|---|
| step time, all rows | {time_s} | {time_left} |
| step time, all but the layout sweep of one source | {others_s} | {others_left} |
| memory, all rows | {memory} | {memory_left} |
"""


def choice() -> str:
    """How far the automatic layout is from the best of a published sweep."""
    small, large = re.findall(
        r"Regret ([\d.]+)% on average and ([\d.]+)% at worst over (\d+) cells", _text("published.md")
    )
    mean, worst, cells = small
    return f"""In a published sweep of nanotron layouts, the layout that autopar picks is {mean} % slower than the best measured one, on
average over {cells} cells (one model on one number of nodes) of up to 16 nodes ({worst} % at worst), and \
{float(large[0]):.0f} % slower in the only cell of 64 nodes.
"""


def gaps() -> str:
    """The gaps of two requests of the report ``endtoend``."""
    small, large = (
        _row("endtoend.md", name)[5].strip("*").removesuffix("%") for name in ("Llama-3-70B", "Llama-3-405B")
    )
    return f"""For example, the gap is {small} % for Llama-3-70B on 1,024 GPUs, and {large} % for Llama-3-405B on 16,384, where the bound \
of interleaved pipelines is loose.
"""


BLOCKS = {"errors": errors, "choice": choice, "gaps": gaps}


def written(page: Path) -> str:
    """The page with the figures as they are now."""
    text = page.read_text()
    for name, block in BLOCKS.items():
        pattern = rf"(<!-- quoted {name} -->\n).*?(<!-- end quoted -->)"
        text = re.sub(pattern, lambda found, block=block: f"{found[1]}{block()}{found[2]}", text, flags=re.DOTALL)
    return text


def main() -> None:
    for page in PAGES:
        page.write_text(written(page))


if __name__ == "__main__":
    main()
