"""Tables of zeros take memory where they are written, and nowhere else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark.errors import ResourceError
from dspark.models.tables import lazy_zeros

MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process really has."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_zeros_of_any_shape_can_be_written() -> None:
    table = lazy_zeros((3, 5, 7), np.float32)
    assert table.shape == (3, 5, 7) and table.dtype == np.float32 and not table.any()
    table[1, 2] = 4
    assert table.sum() == 28
    assert lazy_zeros((4, 0), np.int16).shape == (4, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_row_of_every_large_part_takes_a_page_and_not_two_mebibytes() -> None:
    table = lazy_zeros((128, 2 * MIB), np.int16)
    before = resident()
    table[:, 0] = 1
    assert resident() - before < 16 * MIB  # huge pages: 256 MiB


def test_a_table_without_room_says_how_large_it_is() -> None:
    with pytest.raises(ResourceError, match=r"MiB.*--max-context"):
        lazy_zeros((2**60,), np.int16)
