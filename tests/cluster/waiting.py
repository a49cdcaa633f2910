"""Wait for a cluster to get somewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONGEST_WAIT_SECONDS = 90.0
_POLL_SECONDS = 0.3


def wait_until(check: Callable[[], T | None], what: str, *, seconds: float = LONGEST_WAIT_SECONDS) -> T:
    """Return what `check` returns once it is true.

    Raises:
        AssertionError: It was not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(_POLL_SECONDS)
