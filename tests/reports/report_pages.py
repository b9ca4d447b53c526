"""Pages of plans in a browser: ``make report NAME=pages`` writes ``docs/evidence/pages.{jsonl,md}`` and the pictures beside them.

Chromium opens the page of each plan without a window on a desktop, on a phone and in dark colours. Plans and pages are kept in
``build/pages``; what is there is not made again (``--fresh`` makes all).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browser import Browser, browser, missing
from places import EVIDENCE, ROOT
from planning import machine_words

FOLDER = ROOT / "build" / "pages"
OPEN_S = 2.0
PICTURE_BYTES = 300_000
LOADS = 5

PLANS = {
    "405b": ("llama3-405b", "--devices", "2048x8xH100-80GB"),
    "8b": ("llama3-8b", "--devices", "4x8xH100-80GB", "--pin", "pipeline=4"),
    "8b-zero-bubble": (
        "llama3-8b",
        "--devices",
        "4x8xH100-80GB",
        "--pin",
        "pipeline=2",
        "--pin",
        "schedule=zero-bubble",
    ),
}
PAGES = {  # the plans of a page, and options of `autopar report`
    "405b": (("405b",), ()),
    "8b": (("8b",), ("--explain",)),
    "two": (("8b", "8b-zero-bubble"), ()),
}


@dataclass(frozen=True)
class View:
    """How a page is looked at."""

    name: str
    width: int
    height: int
    dark: bool = False
    touch: bool = False


VIEWS = (View("desktop", 1280, 1000), View("phone", 390, 844, touch=True), View("dark", 1280, 1000, dark=True))
PICTURES = {  # page, view, what is in sight, what is done first
    "pages-8b-desktop": ("8b", "desktop", "main", ""),
    "pages-8b-phone": ("8b", "phone", "main", ""),
    "pages-405b-desktop": ("405b", "desktop", "main", ""),
    "pages-405b-dark": ("405b", "dark", "timeline", "tooltip"),
    "pages-8b-phone-memory": ("8b", "phone", "timeline", ""),
    "pages-8b-zoomed": ("8b", "desktop", "timeline", "zoom"),
    "pages-8b-alternatives": ("8b", "desktop", "why", ""),
    "pages-two-desktop": ("two", "desktop", "main", ""),
}


def make(fresh: bool) -> None:
    """Plans and pages, those that are not there yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, request in PLANS.items():
        file = FOLDER / f"{name}.json"
        if fresh or not file.is_file():
            file.write_text(_autopar("plan", *request, "--time-limit", "600", "--json"))
    for name, (plans, options) in PAGES.items():
        page = FOLDER / f"{name}.html"
        if fresh or not page.is_file():
            _autopar("report", *(str(FOLDER / f"{plan}.json") for plan in plans), *options, "-o", str(page))


def _autopar(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "autopar", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "AUTOPAR_CALIBRATION": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def look(session: Browser, name: str, view: View) -> dict[str, Any]:
    """One page in one view: seconds until it is loaded (of each of ``LOADS`` times), and every check."""
    path, loads = FOLDER / f"{name}.html", []
    session.view(view.width, view.height, view.dark, view.touch)
    for _ in range(LOADS):
        session.open(path)
        loads.append(session.run("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1e3)
    return {
        "page": name,
        "view": view.name,
        "bytes": path.stat().st_size,
        "actions": session.run(_ACTIONS),
        "load_s": [round(seconds, 3) for seconds in loads],
        "load": round(os.getloadavg()[0], 2),
        "checks": dict(checks(session, path, view)),
    }


_ACTIONS = """return JSON.parse(document.getElementById('figures').textContent).plans
  .map((plan) => plan.step.ranks.reduce((sum, rank) => sum + rank.starts_us.length, 0)).reduce((a, b) => a + b)"""
CONTRAST = """
const style = getComputedStyle(document.documentElement);
const light = (name) => {
  const hex = style.getPropertyValue('--' + name).trim().slice(1);
  const bright = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = [0, 2, 4].map((i) => bright(parseInt(hex.slice(i, i + 2), 16) / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const pairs = [...['text', 'soft', 'accent', 'better', 'worse'].flatMap((front) => ['card', 'page'].map((back) => [front, back])),
  ['on-accent', 'accent'], ['on-colour', 'forward'], ['on-backward', 'backward']];
return Math.min(...pairs.map(([front, back]) => ratio(front, back)));"""
UNNAMED = """
const unnamed = [];
for (const one of document.querySelectorAll('section, [tabindex="0"], button, select, input'))
  if (!one.getAttribute('aria-label') && !document.getElementById(one.getAttribute('aria-labelledby')) && !one.textContent.trim()
    && !(one.labels && one.labels.length)) unnamed.push(one.outerHTML.slice(0, 80));
for (const one of document.querySelectorAll('table')) if (!one.caption || !one.querySelector('th[scope=row]')) unnamed.push('a table');
return unnamed"""
_COLOURS = """
const canvas = document.querySelector('.timeline canvas'), seen = new Set();
const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
for (let i = 0; i < pixels.length; i += 4) seen.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
return seen.size"""
_MIDDLE = """
const box = document.querySelector('.timeline canvas').getBoundingClientRect();
const rows = JSON.parse(document.getElementById('figures').textContent).plans[0].step.ranks.length;
const row = (box.height - 22) / rows;  // 22 pixels above the rows
return [box.x + box.width / 2, box.y + 22 + row * (Math.floor(rows / 3) + 0.5)]"""
_SHOWN = "return document.querySelector('.timeline').dataset.shown || ''"
_LIVE = "return document.getElementById('live').textContent"


def checks(session: Browser, path: Path, view: View) -> Iterator[tuple[str, bool]]:
    """Everything that a page must do, by name."""
    yield (
        "is drawn",
        session.run("return document.documentElement.dataset.ready") == "yes" and session.run(_COLOURS) > 5,
    )
    yield "asks the network for nothing", set(session.requests()) == {path.resolve().as_uri()}
    yield "is as wide as the screen", session.run("return document.documentElement.scrollWidth") == view.width
    yield "has text with a contrast of 4.5 or more", session.run(CONTRAST) >= 4.5
    tiles = session.run("return document.querySelectorAll('.cards').length")
    strategies = session.run("return [...document.querySelectorAll('.strategy')].map((one) => one.textContent)")
    yield (
        "has the strategy as headline, and the figures once",
        0 < tiles == sum("microbatch" in one for one in strategies),
    )
    drawn = session.run("return [...document.querySelectorAll('.gpu')].map((one) => one.getAttribute('aria-label'))")
    yield "draws each distinct GPU once, with its memory", bool(drawn) and all("memory" in one for one in drawn)
    yield "names every section, control, chart and table", session.run(UNNAMED) == []
    session.run("document.activeElement.blur(); document.getElementById('timeline').scrollIntoView()")
    session.hover(*session.run(_MIDDLE))
    tip = session.run("const tip = document.querySelector('.tip'); return tip ? tip.textContent : ''")
    yield "shows a tooltip under the mouse", "pipeline rank" in tip and "devices" in tip
    session.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
    first = session.run(_SHOWN)
    session.run("document.querySelector('[aria-label=\"Later\"]').click()")
    second = session.run(_SHOWN)
    yield "zooms and moves by its buttons", bool(first) and second != first
    session.run("document.querySelector('.timeline').focus({focusVisible: true})")
    session.keys(["0", "down"])
    before = session.run(_LIVE)
    session.keys(["right", "right"])
    after = session.run(_LIVE)
    yield "goes from action to action by keys and says so", "pipeline rank" in before and after not in (before, "")
    session.keys(["+"])
    zoomed = session.run(_SHOWN)
    session.keys(["0"])
    yield "zooms by keys", zoomed != session.run(_SHOWN)
    session.keys(["tab"])
    yield (
        "shows where the focus is",
        session.run(
            "const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2"
        ),
    )
    session.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    time.sleep(0.2)
    yield (
        "has a table behind every chart",
        session.run(
            "return [...document.querySelectorAll('figure')].every((figure) => figure.querySelector('details table tbody tr'))"
        ),
    )
    plans = session.run("return JSON.parse(document.getElementById('figures').textContent).plans.length")
    if plans > 1:
        rows = session.run("return document.querySelectorAll('#comparison tbody tr').length")
        yield (
            "compares both plans",
            rows > 15 and session.run("return document.querySelectorAll('.timeline').length") == 2,
        )
    yield (
        "stays as wide as the screen when all is open",
        (session.run("return document.documentElement.scrollWidth") == view.width),
    )
    yield "writes nothing to the console", session.complaints() == []


def photograph(session: Browser) -> None:
    """The pictures of the page of evidence."""
    views = {view.name: view for view in VIEWS}
    for name, (page, shown, section, first) in PICTURES.items():
        view = views[shown]
        session.view(view.width, view.height, view.dark, view.touch)
        session.open(FOLDER / f"{page}.html")
        session.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        if first == "zoom":
            for _ in range(3):
                session.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
        if first:
            session.hover(*session.run(_MIDDLE))
        time.sleep(0.3)
        path = EVIDENCE / f"{name}.png"
        session.picture(path)
        assert path.stat().st_size < PICTURE_BYTES, path


def page(lines: list[dict[str, Any]]) -> str:
    """The page of evidence."""
    names = list(dict.fromkeys(name for line in lines for name in line["checks"]))
    parts = [
        "# Pages of plans in a browser\n",
        f"`autopar report` wrote the pages, Chromium {lines[0]['browser']} opened them without a window. {machine_words(lines)}\n",
        f"Seconds until the page is loaded and drawn: the slowest of {LOADS} times each. At most {OPEN_S:.0f} s are wanted.\n",
        "| page | plans | view | size | actions drawn | loaded after | checks |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        plans, options = PAGES[line["page"]]
        requests = " and ".join(f"`autopar plan {' '.join(PLANS[plan])}`" for plan in plans)
        slowest, passed = max(line["load_s"]), sum(line["checks"].values())
        took = f"{slowest:.2f} s" if slowest <= OPEN_S else f"**{slowest:.2f} s**"
        parts.append(
            f"| {' '.join((line['page'], *options))} | {requests} | {line['view']} | {line['bytes'] / 1e3:.0f} kB | {line['actions']:,} | "
            f"{took} | {passed} of {len(line['checks'])} |"
        )
    parts += [
        "",
        "Each check on every page and in every view (desktop 1280, phone 390 pixels wide):\n",
        "| check | holds |",
        "|---|---|",
    ]
    for name in names:
        found = [(line["page"], line["view"], line["checks"][name]) for line in lines if name in line["checks"]]
        wrong = [f"{one} on {view}" for one, view, holds in found if not holds]
        parts.append(f"| {name} | {f'{len(found)} of {len(found)}' if not wrong else 'not: ' + ', '.join(wrong)} |")
    for name, (which, view, _, _) in PICTURES.items():
        parts.append(f"\n![Page {which}, {view}]({name}.png)")
    return "\n".join(parts) + "\n\nMade by `make report NAME=pages`. Do not edit.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="make plans and pages anew")
    fresh = parser.parse_args().fresh
    if why := missing():
        raise SystemExit(why)
    make(fresh)
    lines = []
    with browser() as session:
        version = session.devtools("Browser.getVersion", {})["product"].partition("/")[2]
        for name in PAGES:
            for view in VIEWS:
                lines.append({"browser": version} | look(session, name, view))
                print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
        photograph(session)
    (EVIDENCE / "pages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (EVIDENCE / "pages.md").write_text(page(lines))
    if not all(all(line["checks"].values()) and max(line["load_s"]) <= OPEN_S for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
