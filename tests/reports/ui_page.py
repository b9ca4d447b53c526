"""The page of `autopar ui` in a browser: ``make report NAME=ui`` writes ``docs/evidence/ui.md`` and the pictures beside it.

Chromium opens the page, plans, pins a degree with a slider, which plans again, compares the two plans and writes the program, as a user
does; on a desktop, on a phone and in dark colours the page is checked and photographed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from browser import Browser, browser, missing
from places import EVIDENCE
from report_pages import CONTRAST, PICTURE_BYTES, UNNAMED, VIEWS, View

from autopar.cli.ui import WORKER, choices
from autopar.ui import Server

MODEL, DEVICES, BATCH, PIN = "llama3-8b", "2x8xH100-80GB", "128", ("tensor", "2")
IDLE = "!document.getElementById('go').disabled"
_FILL = """const [model, devices, batch] = arguments, put = (id, value) => { document.getElementById(id).value = value; };
put('model', model); document.getElementById('model').dispatchEvent(new Event('change'));
put('devices', devices); put('global-batch', batch); document.getElementById('go').click()"""
_PIN = """const [name, value] = arguments, slider = document.getElementById(`pin-${name}`);
for (let i = 0; slider.getAttribute('aria-valuetext') !== value; i++) { slider.value = i; slider.dispatchEvent(new Event('input')); }"""


def use(session: Browser) -> None:
    """Two plans, one of them with a pin."""
    session.run(_FILL, MODEL, DEVICES, BATCH)
    session.wait("document.querySelector('h1.strategy') && " + IDLE, 600)
    session.run(_PIN, *PIN)
    session.wait("document.querySelectorAll('#plans li').length == 2 && " + IDLE, 600)


def checks(session: Browser, server: Server, view: View) -> Iterator[tuple[str, bool]]:
    """Everything that the page must do in a view, by name."""
    yield "is as wide as the screen", session.run("return document.documentElement.scrollWidth") == view.width
    yield "has text with a contrast of 4.5 or more", session.run(CONTRAST) >= 4.5
    yield "names every section, control and table", session.run(UNNAMED) == []
    title = session.run("return document.querySelector('h1').textContent.replaceAll('\\u00a0', ' ')")
    yield "has the strategy as headline", title.startswith("DP 8 x TP 2")
    yield "draws every GPU", session.run("return document.querySelectorAll('.gpu').length") == 16
    yield "has no frame", session.run("return document.querySelectorAll('iframe').length") == 0
    cost = session.run("return document.querySelector('.pin-costs').textContent")
    yield "says what the pin costs", "=".join(PIN) in cost and "%" in cost
    session.run("document.getElementById('go').focus({focusVisible: true})")
    outline = "const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2"
    yield "shows where the focus is", session.run(outline)
    asked = {urlsplit(address).netloc for address in session.requests() if not address.startswith("data:")}
    yield "asks no other server than its own", asked <= {f"127.0.0.1:{server.port}"}
    yield "writes nothing to the console", session.complaints() == []


def photograph(session: Browser, view: View) -> None:
    """The report, on a desktop also the comparison with the first plan, and in dark colours the program."""
    pictures = {f"ui-{view.name}": ""}
    if view.dark:
        session.run("document.getElementById('tab-Program').click(); document.querySelector('#panel button').click()")
        session.wait("document.querySelector('.files pre') && document.querySelector('.files pre').textContent", 600)
    elif not view.touch:
        pictures["ui-compare"] = "document.querySelector('#plans li button:not(.pick)').click()"
    for name, first in pictures.items():
        session.run("document.getElementById('result').scrollIntoView()" if view.touch else "scrollTo(0, 0)")
        session.run(first)
        time.sleep(1)
        path = EVIDENCE / f"{name}.png"
        session.picture(path)
        assert path.stat().st_size < PICTURE_BYTES, path
    session.run("document.getElementById('tab-Report').click()")


def main() -> None:
    if why := missing():
        raise SystemExit(why)
    server = Server(choices(), WORKER)
    server.start()
    found: dict[str, dict[str, bool]] = {}
    try:
        with browser() as session:
            version = session.devtools("Browser.getVersion", {})["product"].partition("/")[2]
            session.view(VIEWS[0].width, VIEWS[0].height)
            session.visit(server.address)
            session.wait("document.documentElement.dataset.ready")
            use(session)
            for view in VIEWS:
                session.view(view.width, view.height, view.dark, view.touch)
                time.sleep(0.5)
                for name, holds in checks(session, server, view):
                    found.setdefault(name, {})[view.name] = holds
                photograph(session, view)
    finally:
        server.close()
    lines = [
        "# The page of `autopar ui` in a browser\n",
        f"Chromium {version} opened the page without a window, planned {MODEL} on {DEVICES} with a batch of {BATCH}, "
        f"moved the slider to {'='.join(PIN)}, which planned again, compared both plans and wrote the program.\n",
        f"| check | {' | '.join(view.name for view in VIEWS)} |",
        f"|---|{'---|' * len(VIEWS)}",
        *(
            f"| {name} | {' | '.join('holds' if holds else '**not**' for holds in of.values())} |"
            for name, of in found.items()
        ),
        *(f"\n![The page, {name}](ui-{name}.png)" for name in ("desktop", "compare", "phone", "dark")),
        "\nMade by `make report NAME=ui`. Do not edit.\n",
    ]
    (EVIDENCE / "ui.md").write_text("\n".join(lines))
    if not all(all(of.values()) for of in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
