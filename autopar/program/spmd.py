"""``spmd``: what ``spmd_types`` defines, under one name for all files here. ``compiled.py`` replaces its collectives."""

from __future__ import annotations

from types import SimpleNamespace

import spmd_types

spmd = SimpleNamespace(**vars(spmd_types))
