"""Collectives as NCCL would run them: every rank recorded on CPUs without communication, and proved free of deadlock.

``recorder`` is the process group that records, ``records`` what it writes, ``graph`` the order of events under NCCL's rules, ``findings``
what is wrong. ``autopar.verify.recording`` runs a plan's ranks with it. One of the exactness matrix's cases, from a checkout::

    .venv/bin/python tests/reports collectives --models llama --kinds "pipeline 4, Chimera"
"""
