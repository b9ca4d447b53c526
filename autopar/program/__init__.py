"""The runtime of a program: ``model.py`` beside this folder is the model, ``train.py`` trains it.

The files import torch, spmd-types and each other. Every program that needs a file has the same one.
"""

__version__ = "0.1.0"
