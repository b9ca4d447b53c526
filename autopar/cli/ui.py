"""``autopar ui`` serves a local page for planning."""

from __future__ import annotations

import signal
import sys
import webbrowser
from typing import Any

import click

import autopar
from autopar.cli.load import check_factory
from autopar.devices import hardware
from autopar.pins import PINS
from autopar.techniques.technique import ANY
from autopar.trainers import TRAINERS
from autopar.ui import Choices, Server
from autopar.zoo import CATALOGUE

WORKER = (sys.executable, "-W", "ignore", "-m", "autopar.cli.planner")


def ui_command(model: tuple[str, ...], port: int, browser: bool) -> None:
    """Print the address of the page, and serve the page until an interrupt."""
    for name in model:
        check_factory(name)
    for number in (signal.SIGINT, signal.SIGTERM):  # raise KeyboardInterrupt, so that ``finally`` runs
        signal.signal(number, signal.default_int_handler)
    server = Server(choices(model), WORKER, port)
    try:
        click.echo(server.address)
        click.echo(
            "only this machine can open the address, and anyone with it can use this server; Ctrl-C ends it", err=True
        )
        if browser:
            webbrowser.open(server.write_redirect_page().as_uri())
        server.serve()
    finally:
        server.stop()


def choices(own: tuple[str, ...] = ()) -> Choices:
    """Return the models, devices and pins that the page offers; ``own`` are the models from the command line."""
    models: list[dict[str, Any]] = [{"name": name, "kind": "your model", "parameters": None} for name in own]
    keys = ("name", "kind", "parameters", "seq", "global_batch")
    models += [{key: getattr(entry, key) for key in keys} for entry in CATALOGUE]
    devices = [{"name": name, "memory_bytes": hardware.gpu(name).memory_bytes} for name in hardware.gpu_names()]
    pins = [
        {key: getattr(pin, key) for key in ("name", "meaning", "least", "most")}
        | {"values": [name for name in pin.names if not name.endswith(":K")], "any": ANY}
        for pin in PINS.values()
        if not pin.former
    ]
    trainers = [{"name": each.name, "title": each.title} for each in TRAINERS.values()]
    return Choices(models, devices, trainers, pins, autopar.__version__)
