"""One thread a test process: these machines are small, and threads change no result here.

No costs are measured or read unless a test does so itself: they would take seconds, land in the
cache of whoever runs the tests, and make schedules depend on the machine.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

os.environ["DSPARK_NO_PROFILE"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_works() -> None:
    """A shell starts background jobs deaf to it, test runs included."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
