"""Checks of autopar's own results: its rules by execution on shards (``rules``), the types of an emitted program (``types``), and the
collectives of a program against the decided and priced ones (``collectives``).

``python -m autopar.checks`` executes the whole table of rules and prints the counts.
"""
