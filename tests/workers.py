"""The pool of warm gloo processes, as tests use it.

    def check(x):                       # module-level function of a test module
        dist.all_reduce(x)
        return x

    def test_sum(workers2):
        assert workers2.run("test_mine:check", torch.ones(1))[0] == 2

A rank that raises, dies or hangs fails the test with its error; the next call finds a new pool.
"""

from autopar.run.pool import WorkerPool

__all__ = ["WorkerPool"]
