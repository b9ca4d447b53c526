"""Defines ``spmd``, a copy of the namespace of ``spmd_types`` that all modules here use: ``compiled.py`` replaces its collectives."""

from __future__ import annotations

from types import SimpleNamespace

import spmd_types

spmd = SimpleNamespace(**vars(spmd_types))
