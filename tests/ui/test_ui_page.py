"""The page of ``autopar ui`` in a browser: a plan, a pin and its cost and the program by keyboard, an error, a cancelled search."""

from __future__ import annotations

import json
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


def plans(session: Browser) -> int:
    return int(session.run("return document.querySelectorAll('#plans li').length"))


def texts(session: Browser, selector: str) -> list[str]:
    found: list[str] = session.run(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent.replaceAll('\u00a0', ' '))",
        selector,
    )
    return found


def a_plan_its_report_a_slider_and_its_program_by_keyboard(page: tuple[Browser, Server]) -> None:
    session, server = page
    focus(session, "#model")
    assert session.run("return document.getElementById('model').value") == MLP
    focus(session, "#global-batch")
    press(session, *"64")
    press(session, "enter")
    session.wait("document.querySelector('h1.strategy') && " + IDLE)
    assert "one step takes" in session.run(LIVE)
    assert session.run("return document.activeElement.id") == "global-batch"  # the focus stays where it was
    assert texts(session, "h1")[0].startswith("DP 8, ")
    focus(session, "#pin-tensor")
    assert texts(session, "#pin-tensor + output") == ["auto 1"]  # what the plan chose
    press(session, "right", "right")  # auto, 1, 2: one plan, when the slider rests
    assert session.run("return document.activeElement.getAttribute('aria-valuetext')") == "2"
    session.wait("document.querySelectorAll('#plans li').length == 2 && " + IDLE)
    assert session.run("return document.activeElement.id") == "pin-tensor" and plans(session) == 2
    assert "TP 2" in texts(session, "h1")[0] and "--pin tensor=2" in texts(session, ".command code")[0]
    (costs,) = texts(session, ".pin-costs")
    assert "tensor=2" in costs and "%" in costs and "Plan without tensor" in costs
    compared = texts(session, "#plans .compared")
    assert compared[0].endswith("faster") and compared[1] == "shown"

    focus(session, "[role=tab][aria-selected=true]")
    press(session, "right", "right")
    assert session.run("return document.activeElement.textContent") == "Program"
    focus(session, "#panel button")
    press(session, "enter")
    session.wait("document.querySelector('.files pre') && document.querySelector('.files pre').textContent")
    assert "def main" in session.run("return document.querySelector('.files pre').textContent")
    names = session.run("return [...document.querySelectorAll('.files li button')].map((one) => one.textContent)")
    assert names[0].startswith("train.py") and len(names) > 5
    session.run("document.getElementById('tab-Report').click()")


def the_report_is_a_part_of_the_page_and_prints_no_figure_twice(page: tuple[Browser, Server]) -> None:
    session, _ = page
    assert session.run("return document.querySelectorAll('iframe').length") == 0
    assert session.run("return document.querySelectorAll('h1').length") == 1
    names = texts(session, ".cards dt")
    assert len(names) == len(set(names)) == 6
    step_time = session.run("return document.querySelector('.cards dd').firstChild.textContent")
    # the card of the gap has the bound, whose digits may be those of the step time
    outside = session.run(
        "const page = document.body.cloneNode(true); page.querySelector('#plans').remove();"
        "const names = [...page.querySelectorAll('.cards dt')];"
        "names.find((name) => name.textContent === 'gap').parentElement.remove(); return page.textContent"
    )
    assert "gap" in names
    assert outside.count(step_time) == 1
    assert session.run("return document.querySelectorAll('.gpu').length") == 8
    assert session.run("return document.querySelectorAll('.timeline canvas').length") == 1


def sliders_offer_the_divisors_that_are_left(page: tuple[Browser, Server]) -> None:
    session, _ = page
    offered = """const slider = document.getElementById(arguments[0]), found = [];
      const move = (i) => { slider.value = i; slider.dispatchEvent(new Event('input')); return slider.getAttribute('aria-valuetext'); };
      for (let i = 0; i <= Number(slider.max); i++) found.push(move(i));
      move(0);
      return found"""
    assert session.run(offered, "pin-data") == ["auto", "1", "2", "4"]  # tensor is 2, of 8 devices
    assert session.run(offered, "pin-zero") == ["auto", "0", "1", "2", "3"]
    assert session.run(offered, "pin-microbatches")[-1] == "64"
    session.run("document.getElementById('all-auto').click()")
    assert session.run(offered, "pin-data") == ["auto", "1", "2", "4", "8"]
    session.wait("document.querySelectorAll('#plans li').length == 3 && " + IDLE)  # the last movement alone is planned
    assert "--pin" not in texts(session, ".command code")[0]


def two_plans_side_by_side(page: tuple[Browser, Server]) -> None:
    session, _ = page
    session.run("document.querySelectorAll('#plans li')[1].querySelector('button:not(.pick)').click()")
    assert session.run("return document.querySelector('[role=tab][aria-selected=true]').textContent") == "Compare"
    rows = session.run(
        "return [...document.querySelectorAll('.versus tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    found = {row[0]: row[1:] for row in rows}
    assert found["TP"][:2] == ["2", "1"] and found["DP"] == ["2", "8"]  # a pipeline of 2 with tensor 2
    assert found["one step"][2].startswith("−") and "plan 3 is" in texts(session, ".verdict")[0]
    assert {"parameters", "gradients", "optimizer states", "activations", "buffers", "exposed communication"} <= set(
        found
    )
    session.view(390, 844, touch=True)
    assert session.run("return document.documentElement.scrollWidth") == 390
    session.view(1280, 900)
    session.run("document.getElementById('tab-Report').click()")


def copy_buttons_copy_the_command_and_the_plan(page: tuple[Browser, Server]) -> None:
    session, _ = page
    session.devtools("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    session.devtools(
        "Emulation.setFocusEmulationEnabled", {"enabled": True}
    )  # pages without focus can't read the clipboard
    for i, begins in enumerate(("autopar plan ", "{")):
        session.run("document.querySelectorAll('.command .copy')[arguments[0]].click()", i)
        session.wait(f"document.querySelectorAll('.command .copy')[{i}].textContent === 'Copied'")
        copied = session.run("return navigator.clipboard.readText()")
        assert copied.startswith(begins)
    assert json.loads(copied)["devices"] == "8xH100-80GB-SXM"


def the_flags_of_a_trainer_are_shown_and_copied(page: tuple[Browser, Server]) -> None:
    session, _ = page
    before = plans(session)
    session.run(
        "document.getElementById('model').value = 'gpt2'; document.getElementById('trainer').value = 'megatron'; "
        "document.getElementById('go').click()"
    )
    session.wait(f"document.querySelectorAll('#plans li').length == {before + 1} && " + IDLE)
    assert "--trainer megatron" in texts(session, ".command code")[0]
    assert "Program" not in texts(session, "[role=tab]")
    (flags,) = texts(session, "#configuration pre")
    assert "--use-distributed-optimizer" in flags and "--global-batch-size 64" in flags
    session.run("document.querySelector('#configuration .copy').click()")
    session.wait("document.querySelector('#configuration .copy').textContent === 'Copied'")
    assert session.run("return navigator.clipboard.readText()") == flags
    session.run(
        "document.getElementById('trainer').value = ''; document.getElementById('model').value = arguments[0]", MLP
    )


def a_pin_that_is_given_twice_is_refused(page: tuple[Browser, Server]) -> None:
    session, _ = page
    session.run("for (let i = 0; i < 3; i++) document.getElementById('add-pin').click()")
    names = "return [...document.querySelectorAll('.pin-name')].map((select) => select.value)"
    assert len(set(session.run(names))) == 3
    first = session.run(names)[0]
    session.run("const [, second] = document.querySelectorAll('.pin-name'); second.selectedIndex = 0")
    session.run("document.getElementById('go').click()")
    session.wait("document.querySelector('[role=alert] .wrong')")
    assert f"the pin {first} is given twice" in session.run("return document.querySelector('[role=alert]').textContent")


def what_is_wrong_is_an_alert_with_a_hint_and_a_search_is_cancelled(page: tuple[Browser, Server]) -> None:
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


def the_page_is_narrow_dark_named_and_silent(page: tuple[Browser, Server]) -> None:
    session, server = page
    for width, dark, touch in ((390, True, True), (1280, False, False)):
        session.view(width, 844, dark, touch)
        assert session.run("return document.documentElement.scrollWidth") == width
    unnamed = session.run("""return [...document.querySelectorAll('button, select, input, textarea, table, [tabindex="0"]')]
      .filter((one) => !one.getAttribute('aria-label') && !one.title && !one.textContent.trim() && !(one.labels && one.labels.length))
      .map((one) => one.outerHTML.slice(0, 80))""")
    assert unnamed == []
    silent = [line for line in session.complaints() if "400" not in line]
    assert silent == []
    asked = {urlsplit(address).netloc for address in session.requests() if not address.startswith("data:")}
    assert asked == {f"127.0.0.1:{server.port}"}


def test_one_visit(page: tuple[Browser, Server]) -> None:
    """Each part goes on where the former one ends, in one page."""
    a_plan_its_report_a_slider_and_its_program_by_keyboard(page)
    the_report_is_a_part_of_the_page_and_prints_no_figure_twice(page)
    sliders_offer_the_divisors_that_are_left(page)
    two_plans_side_by_side(page)
    copy_buttons_copy_the_command_and_the_plan(page)
    the_flags_of_a_trainer_are_shown_and_copied(page)
    a_pin_that_is_given_twice_is_refused(page)
    what_is_wrong_is_an_alert_with_a_hint_and_a_search_is_cancelled(page)
    the_page_is_narrow_dark_named_and_silent(page)
