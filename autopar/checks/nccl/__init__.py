"""Checks collectives as NCCL would run them: records every rank on CPUs without communication, and proves that there is no deadlock.

``recorder`` is the recording process group, ``records`` its traces, ``graph`` the order of events under NCCL's rules, ``findings`` the
checks. ``autopar.verify.recording`` runs a plan's ranks with it. A case of the exactness matrix, from a checkout::

    .venv/bin/python tests/reports collectives --models llama --kinds "pipeline 4, Chimera"
"""
