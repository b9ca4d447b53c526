"""Graph rewrites, and nothing else: each pass takes a ``GraphModule`` and returns one.

The package knows torch and the vocabulary of the plan; it knows nothing of cost, search or the command line.
"""
