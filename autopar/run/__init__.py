"""Running an emitted program: local worker processes, and the ``Program`` that a user holds."""
