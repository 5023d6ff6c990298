"""A disk that is soon full, for this process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_than(nbytes: int) -> Iterator[None]:
    """No file grows beyond it: the system's answer is an OSError, as where the disk is full (Python ignores the signal
    that comes with it)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
