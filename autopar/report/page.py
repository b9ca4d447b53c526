"""Makes the page of ``autopar report``: one self-contained HTML file with its style, script and figures.

``page.min.js`` is built from ``web/`` (``make page``). Names of models and modules are data: they are in a JSON script element, and the
page's script inserts them into the document as text, never as HTML.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from autopar.report.figures import MAX_ACTIONS, PlanFigures, figures


def page(subjects: Sequence[PlanFigures]) -> str:
    """Return the HTML page of one plan, or of two side by side."""
    return page_of([figures(subject, MAX_ACTIONS // len(subjects)) for subject in subjects])


def page_of(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page of plans whose figures are ``plans``."""
    title = " and ".join(f"{plan['model']} on {plan['devices']}" for plan in plans)
    parts = {
        "title": html.escape(f"{title} - autopar"),
        "style": _file("page.css"),
        "data": as_script({"plans": plans}),
        "script": _file("page.min.js"),
    }
    # one pass over the template, so that inserted parts aren't substituted again
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def as_script(data: Any) -> str:
    """Return ``data`` as JSON with every ``<`` escaped, so that it can't end its script element or begin another."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return resources.files("autopar.report").joinpath(name).read_text("utf-8")
