"""Forks of the process of the tests."""

from __future__ import annotations

import signal

from tests.forked import run_script

COLLECTS_IN_FORKED_CHILDREN = """
import gc, os
from datetime import timedelta
from torch.distributed import HashStore, ProcessGroupGloo
import tests.forked
tests.forked.FORK_SECONDS = 20
class Owner:
    def __init__(self, owned):
        self.owned, self.itself = owned, self
os.register_at_fork(after_in_child=gc.collect)
Owner(ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60)))
def fork_again():
    tests.forked.in_fork(int)
    gc.collect()
print(tests.forked.end_of(tests.forked.fork(fork_again)))
"""


def test_children_do_not_destroy_the_garbage_of_the_process_that_forked_them() -> None:
    done = run_script(COLLECTS_IN_FORKED_CHILDREN)
    assert done.stdout == "0\n"


HANGS = """
import ctypes, tests.forked
def hang():
    ctypes.PyDLL(None).pause()  # with the interpreter's lock, as an extension may
def fork_again():
    tests.forked.FORK_SECONDS = 1
    print(tests.forked.end_of(tests.forked.fork(hang)), flush=True)
tests.forked.in_fork(fork_again)
"""


def test_a_child_of_a_child_that_hangs_in_c_is_ended_and_its_stacks_are_printed() -> None:
    done = run_script(HANGS)
    assert done.stdout == f"{-signal.SIGALRM}\n"
    assert "in hang" in done.stderr
