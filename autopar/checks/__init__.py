"""Checks of autopar's results: rules by execution on shards (``rules``), types of an emitted program (``types``), and collectives of a
program against the planned and priced ones (``collectives``).

``python -m autopar.checks`` executes the table of rules and prints the counts.
"""
