"""Converts requests of the page to arguments of ``autopar plan``.

The page may name zoo models and those that the user named when the server started, or send a configuration; it may name devices by kind
or send a cluster file. It may not name files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from autopar.data_files import MalformedFileError, parse_json, shown
from autopar.errors import BatchError, DeviceError, ModelError, UsageError
from autopar.pins import PINS

OPTIONS = ("global-batch", "seq", "precision", "memory-limit", "time-limit")
_MOST_CHARACTERS = 1000  # of a word
_KEYS = ("model", "config", "name", "devices", "cluster", "options", "pins", "pin", "allow")


def arguments(request: Any, models: Collection[str], folder: Path) -> list[str]:
    """Return the arguments of ``autopar plan``; files that the page sent are written into ``folder``.

    Raises ``UsageError`` for an invalid request.
    """
    if not isinstance(request, dict) or not set(request) <= set(_KEYS):
        raise UsageError(
            "the request has fields that this page does not send", f"a JSON object with some of {', '.join(_KEYS)}"
        )
    found = [_model(request, models, folder), f"--devices={_devices(request, folder)}"]
    for name, value in _mapping(request, "options").items():
        if name not in OPTIONS:
            raise UsageError(f"there is no option {shown(name)}", f"the options are {', '.join(OPTIONS)}")
        found.append(f"--{name}={_word(name, value)}")
    for name, value in _mapping(request, "pins").items():
        if name not in PINS:
            raise UsageError(f"there is no pin {shown(name)}", f"the pins are {', '.join(PINS)}")
        found.append(f"--pin={name}={_word(name, value)}")
    for name in ("pin", "allow"):
        words = request.get(name) or []
        if not isinstance(words, list):
            raise UsageError(f"{name} is not a list", f'such as {name}: ["..."]')
        found += [f"--{name}={_word(name, word)}" for word in words]
    return found


def _model(request: Mapping[str, Any], models: Collection[str], folder: Path) -> str:
    config, model = request.get("config"), request.get("model")
    if config is None:
        if not isinstance(model, str) or model not in models:
            raise ModelError(f"this page has no model {shown(model)}", "choose one of the list, or send a config.json")
        return model
    if isinstance(config, str):
        try:
            config = parse_json(config)
        except MalformedFileError as error:
            raise ModelError(f"the configuration is not JSON: {error}", "paste a transformers config.json") from error
    if not isinstance(config, dict):
        raise ModelError("the configuration is not a JSON object", "paste a transformers config.json")
    title = request.get("name") or config.get("model_type") or "config"
    if not isinstance(title, str):
        raise ModelError(f"the name of the configuration is {shown(title)}, not text", "write a name, or none")
    name = re.sub(r"[^\w-]+", "-", title, flags=re.ASCII)[:60].strip("-")
    file = folder / f"{name or 'config'}.json"
    file.write_text(json.dumps(config), "utf-8")
    return str(file)


def _devices(request: Mapping[str, Any], folder: Path) -> str:
    cluster = request.get("cluster")
    if cluster is not None:
        if not isinstance(cluster, str):
            raise DeviceError(f"the cluster is {shown(cluster)}, not text", "paste the cluster file's text")
        file = folder / "cluster.toml"
        file.write_text(cluster, "utf-8")
        return str(file)
    devices = _word("devices", request.get("devices")).strip()
    if devices.lower().endswith(".toml"):
        raise DeviceError(f"this page does not read files, and {devices!r} is one", "paste the cluster file's text")
    return devices


def _mapping(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = request.get(name) or {}
    if not isinstance(found, dict):
        raise UsageError(f"{name} is not an object of names and values", f"such as {name}: {{...}}")
    return found


def _word(name: str, value: Any) -> str:
    is_word = isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()
    if isinstance(value, bool) or not (is_word or isinstance(value, int | float)):
        raise BatchError(f"{name} is {shown(value)}, not a word or a number", "write one value")
    return str(value)
