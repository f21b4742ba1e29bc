"""Tables of zeros that take memory where they are written.

A cache has room for `num_slots` long texts and mostly holds short ones. Zeros straight from the
operating system cost nothing until a page is touched, but a page may be a *huge* one: NumPy asks
Linux for pages of 2 MiB in large arrays. The keys of one head of one layer lie together, position
by position, so the first token of a text would touch a huge page for each of them: 360 MiB and
0.4 s a slot of the default model, for what needs less than one. These tables ask for small pages.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dspark.errors import ResourceError


def lazy_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """An array of zeros, in the operating system's smallest pages. Raises ResourceError."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not size or not hasattr(mmap, "MAP_PRIVATE"):  # Windows has no huge pages to refuse
        return np.zeros(shape, dtype)
    try:
        free = getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | free)
    except (OSError, OverflowError) as e:
        raise ResourceError(
            f"no room for a cache of {size / 2**20:.0f} MiB ({e}): lower the context"
            " (--max-context) or the number of users"
        ) from e
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
