"""Checks of what autopar made: its rules by execution on shards (``rules``), the types of an emitted program (``types``), and the
collectives of a program against those that were decided and priced (``collectives``).

``python -m autopar.checks`` executes the whole table of rules and prints what it did.
"""
