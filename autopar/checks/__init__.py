"""Checks autopar's results: executes sharding rules on shards (``rules``), type-checks emitted programs (``types``), and compares a
program's collectives with the planned and priced ones (``collectives``).

``python -m autopar.checks`` executes the table of rules and prints the counts.
"""
