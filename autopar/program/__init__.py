"""The runtime library of an emitted program: ``model.py`` in the parent folder defines the model, and ``train.py`` there trains it.

Besides the standard library, its modules import only torch, spmd-types and each other. A module is the same in every program that has it.
"""

__version__ = "0.1.0"
