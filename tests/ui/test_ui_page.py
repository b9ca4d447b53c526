"""The page of ``autopar ui`` in a browser: a plan, a pin and its cost and the program by keyboard, an error, a cancelled search."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from browser import Browser, browser, missing
from places import ROOT

from autopar.cli.ui import WORKER, choices
from autopar.ui import Server

MLP = f"{ROOT}/examples/mlp.py:model"
IDLE = "!document.getElementById('go').disabled"
LIVE = "return document.getElementById('live').textContent"


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[Browser, Server]]:
    if why := missing():
        pytest.skip(why)
    server = Server(choices((MLP,)), WORKER)
    server.start()
    with browser() as session:
        session.view(1280, 900)
        session.visit(server.address)
        session.wait("document.documentElement.dataset.ready")
        yield session, server
    server.close()


def press(session: Browser, *keys: str) -> None:
    session.keys(keys)


def focus(session: Browser, name: str) -> None:
    """Press the tab key until an element has the focus."""
    for _ in range(60):
        if session.run("return document.activeElement.matches(arguments[0])", name):
            return
        press(session, "tab")
    raise AssertionError(f"the tab key never comes to {name}")


def test_a_plan_its_report_a_pin_and_its_program_by_keyboard(page: tuple[Browser, Server]):
    session, server = page
    focus(session, "#model")
    assert session.run("return document.getElementById('model').value") == MLP
    focus(session, "#global-batch")
    press(session, *"64")
    press(session, "enter")
    session.wait("document.querySelector('iframe') && " + IDLE)
    assert "one step takes" in session.run(LIVE)
    assert session.run("return document.activeElement.id") == "global-batch"  # the focus stays where it was
    focus(session, "#add-pin")
    press(session, "enter")
    assert session.run("return document.activeElement.className") == "pin-name"
    press(session, *"tensor")
    focus(session, ".pin-value")
    press(session, "up")
    focus(session, "#go")
    press(session, "enter")
    session.wait("document.querySelectorAll('section[aria-label=Plans] tbody tr').length == 2 && " + IDLE)
    costs = session.run("return document.querySelector('#title ~ .wide').textContent")
    assert "tensor=2" in costs and "%" in costs and "Plan without tensor" in costs
    compared = session.run(
        "return [...document.querySelectorAll('section[aria-label=Plans] td:nth-child(3)')].map((one) => one.textContent)"
    )
    assert compared[0].endswith("faster") and compared[1] == "in sight"

    focus(session, "[role=tab][aria-selected=true]")
    press(session, "right")
    assert session.run("return document.activeElement.textContent") == "Program"
    focus(session, "#panel button")
    press(session, "enter")
    session.wait("document.querySelector('.files pre') && document.querySelector('.files pre').textContent")
    assert "def main" in session.run("return document.querySelector('.files pre').textContent")
    names = session.run("return [...document.querySelectorAll('.files li button')].map((one) => one.textContent)")
    assert names[0].startswith("train.py") and len(names) > 5


def test_a_pin_that_is_given_twice_is_refused(page: tuple[Browser, Server]):
    session, _ = page
    session.run("document.getElementById('pins').replaceChildren()")
    session.run("for (let i = 0; i < 3; i++) document.getElementById('add-pin').click()")
    names = "return [...document.querySelectorAll('.pin-name')].map((select) => select.value)"
    assert len(set(session.run(names))) == 3
    session.run("const [, second] = document.querySelectorAll('.pin-name'); second.selectedIndex = 0")
    session.run("document.getElementById('go').click()")
    session.wait("document.querySelector('[role=alert] .wrong')")
    assert "the pin pipeline is given twice" in session.run("return document.querySelector('[role=alert]').textContent")


def test_what_is_wrong_is_an_alert_with_a_hint_and_a_search_is_cancelled(page: tuple[Browser, Server]):
    session, _ = page
    session.run("document.getElementById('devices').value = '8xT4'; document.getElementById('pins').replaceChildren()")
    session.run("document.getElementById('go').click()")
    session.wait("document.querySelector('[role=alert] .wrong') && " + IDLE)
    said = session.run("return document.querySelector('[role=alert]').textContent")
    assert "the GPU 'T4' is not known" in said and "Hint: " in said
    session.run("document.getElementById('devices').value = '64x8xH100-80GB'")
    session.run(
        "const m = document.getElementById('model'); m.value = 'llama3-405b'; m.dispatchEvent(new Event('change'))"
    )
    session.run("document.getElementById('global-batch').value = ''; document.getElementById('go').click()")
    session.wait("document.querySelector('.stages li')")
    session.run("document.getElementById('cancel').click()")
    session.wait(IDLE)
    assert session.run(LIVE) == "cancelled"
    session.run(
        "const m = document.getElementById('model'); m.value = [...m.options].at(-1).value; m.dispatchEvent(new Event('change'))"
    )
    hostile = '{"model_type": "<img src=x onerror=document.title=1>"}'
    session.run(
        "document.getElementById('config').value = arguments[0]; document.getElementById('go').click()", hostile
    )
    session.wait("document.querySelector('[role=alert] .wrong') && " + IDLE)
    assert "<img src=x" in session.run("return document.querySelector('[role=alert]').textContent")
    assert session.run("return document.querySelectorAll('img').length") == 0


def test_the_page_is_narrow_dark_named_and_silent(page: tuple[Browser, Server]):
    session, server = page
    for width, dark, touch in ((390, True, True), (1280, False, False)):
        session.view(width, 844, dark, touch)
        assert session.run("return document.documentElement.scrollWidth") == width
    unnamed = session.run("""return [...document.querySelectorAll('button, select, input, textarea, iframe, table, [tabindex="0"]')]
      .filter((one) => !one.getAttribute('aria-label') && !one.title && !one.textContent.trim() && !(one.labels && one.labels.length))
      .map((one) => one.outerHTML.slice(0, 80))""")
    assert unnamed == []
    silent = [line for line in session.complaints() if "400" not in line]
    assert silent == []
    asked = {urlsplit(address).netloc for address in session.requests() if not address.startswith("data:")}
    assert asked == {f"127.0.0.1:{server.port}"}
