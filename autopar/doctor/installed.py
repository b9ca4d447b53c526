"""Checks Python, required and optional packages, and the compiler."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util

from autopar.doctor.findings import ABSENT, BROKEN, OK, WARNING, Finding

PART = "installed"
_PYTHON = (3, 11)
_IMPORTED_AS = {"pyyaml": "yaml", "spmd-types": "spmd_types"}


def installed() -> Iterator[Finding]:
    """Check Python, the packages (an installed package must also import), the compiler and torchrun."""
    new = sys.version_info[:2] >= _PYTHON
    wanted = ".".join(map(str, _PYTHON))
    yield Finding(
        PART,
        "python",
        OK if new else BROKEN,
        platform.python_version(),
        "" if new else f"make an environment with Python {wanted} or later",
        {"executable": sys.executable},
    )
    try:
        required = metadata.requires("autopar") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            PART,
            "autopar",
            WARNING,
            "not installed as a package: its requirements are not known",
            "pip install autopar",
        )
        required = []
    for line in required:
        name, least, extra = _requirement(line)
        if extra in ("", "hf"):
            yield _package(name, least, extra)
    yield _compiler()
    found = util.find_spec("torch.distributed.run") if util.find_spec("torch") else None
    script = shutil.which("torchrun") or f"{sys.executable} -m torch.distributed.run"
    yield Finding(
        PART,
        "torchrun",
        OK if found else BROKEN,
        script if found else "torch.distributed.run is not there",
        "" if found else "reinstall torch: `pip install --force-reinstall torch`",
    )


def _requirement(line: str) -> tuple[str, str, str]:
    """Return the name, minimum version and extra of a requirement such as ``transformers>=5.0; extra == 'hf'``."""
    found = re.match(r"([\w.-]+)\s*(?:\(?>=\s*([\w.]+))?", line)
    assert found is not None, line
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
    return found[1], found[2] or "0", extra[1] if extra else ""


def _package(name: str, least: str, extra: str) -> Finding:
    missing, install = (ABSENT, f"autopar[{extra}]") if extra else (BROKEN, f"{name}>={least}")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        use = " (for models from configurations, and most of the built-in ones)" if extra else ""
        return Finding(PART, name, missing, f"not installed{use}", f"pip install '{install}'")
    figures = {"version": version, "least": least}
    try:
        importlib.import_module(_IMPORTED_AS.get(name, name))
    except Exception as error:  # a broken package may raise anything
        text = f"{version}, and its import fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Finding(PART, name, WARNING if extra else BROKEN, text, f"pip install --force-reinstall {name}", figures)
    if _numbers(version) < _numbers(least):
        text = f"{version} is too old: {least} or later is needed"
        return Finding(
            PART, name, WARNING if extra else BROKEN, text, f"pip install --upgrade '{name}>={least}'", figures
        )
    return Finding(PART, name, OK, version, figures=figures)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, such as (2, 11, 0) for ``2.11.0+cu126``."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def _compiler() -> Finding:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    path = next((found for name in names if (found := shutil.which(name.split()[0]))), None)
    if path is None:
        text = f"no C++ compiler found ({', '.join(names)}): torch.compile needs one"
        return Finding(
            PART, "C++ compiler", WARNING, text, "install one (`apt-get install g++`), or run with --pin compile=none"
        )
    return Finding(PART, "C++ compiler", OK, path)
