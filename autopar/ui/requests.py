"""Converts the web page's requests to arguments of ``autopar plan``.

A request names a model of the zoo, or one that the user named on the command line of the server, or it contains a configuration. It names
devices by kind, or contains the text of a cluster file. It can't name files.
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

OPTIONS = ("global-batch", "seq", "precision", "memory-limit", "time-limit", "trainer")
_MAX_CHARACTERS = 1000  # per value
_FIELDS = ("model", "config", "name", "devices", "cluster", "options", "pins", "pin", "allow")


def arguments(request: Any, models: Collection[str], folder: Path) -> list[str]:
    """Return the arguments of ``autopar plan`` for a request, and write the files that the request contains into ``folder``.

    Raises ``UsageError``, ``ModelError``, ``DeviceError`` or ``BatchError`` for an invalid request.
    """
    if not isinstance(request, dict) or not set(request) <= set(_FIELDS):
        raise UsageError("the request has unknown fields", f"send a JSON object with some of {', '.join(_FIELDS)}")
    argv = [_model(request, models, folder), f"--devices={_devices(request, folder)}"]
    for name, value in _mapping(request, "options").items():
        if name not in OPTIONS:
            raise UsageError(f"there is no option {shown(name)}", f"the options are {', '.join(OPTIONS)}")
        argv.append(f"--{name}={_text(name, value)}")
    for name, value in _mapping(request, "pins").items():
        if name not in PINS:
            raise UsageError(f"there is no pin {shown(name)}", f"the pins are {', '.join(PINS)}")
        argv.append(f"--pin={name}={_text(name, value)}")
    for name in ("pin", "allow"):
        values = request.get(name) or []
        if not isinstance(values, list):
            raise UsageError(f"{name} is not a list", f'send {name}: ["..."]')
        argv += [f"--{name}={_text(name, value)}" for value in values]
    return argv


def _model(request: Mapping[str, Any], models: Collection[str], folder: Path) -> str:
    config, model = request.get("config"), request.get("model")
    if config is None:
        if not isinstance(model, str) or model not in models:
            raise ModelError(f"this page has no model {shown(model)}", "choose one in the list, or send a config.json")
        return model
    if isinstance(config, str):
        try:
            config = parse_json(config)
        except MalformedFileError as error:
            raise ModelError(f"the configuration is not JSON: {error}", "paste a transformers config.json") from error
    if not isinstance(config, dict):
        raise ModelError("the configuration is not a JSON object", "paste a transformers config.json")
    name = request.get("name") or config.get("model_type") or "config"
    if not isinstance(name, str):
        raise ModelError(f"the name of the configuration is {shown(name)}, not text", "write a name, or none")
    stem = re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[:60].strip("-")
    file = folder / f"{stem or 'config'}.json"
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
    devices = _text("devices", request.get("devices")).strip()
    if devices.lower().endswith(".toml"):
        raise DeviceError(f"this page does not read files, and {devices!r} is one", "paste the cluster file's text")
    return devices


def _mapping(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    mapping = request.get(name) or {}
    if not isinstance(mapping, dict):
        raise UsageError(f"{name} is not an object of names and values", f"send {name}: {{...}}")
    return mapping


def _text(name: str, value: Any) -> str:
    is_text = isinstance(value, str) and len(value) <= _MAX_CHARACTERS and value.isprintable()
    if isinstance(value, bool) or not (is_text or isinstance(value, int | float)):
        raise BatchError(f"{name} is {shown(value)}, not a short text or a number", "write one value")
    return str(value)
