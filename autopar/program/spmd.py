"""Defines ``spmd``, a namespace with everything in ``spmd_types`` that all modules here use; ``compiled.py`` replaces its collectives."""

from __future__ import annotations

from types import SimpleNamespace

import spmd_types

spmd = SimpleNamespace(**vars(spmd_types))
