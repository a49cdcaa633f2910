"""Page locks of a slot: without them the GPU copies at 7 GB/s instead of 55.

The driver stands still while it locks, and with it every kernel launch of the process: 0.1 s a GB. So a slot
is locked in units, which fit between two steps while the host is ahead of the device. No copy may cross
the border of two units.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from training.errors import RunError

UNIT_BYTES = 128 << 20


class PageLocks:
    """The locks of one mapped buffer."""

    def __init__(self, buffer: Tensor, what: str) -> None:
        """Lock nothing yet.

        Args:
            buffer: Page-aligned host memory.
            what: Its name in errors.
        """
        self._buffer, self._what = buffer, what
        self._locked_bytes = 0

    @property
    def are_complete(self) -> bool:
        return self._locked_bytes == self._buffer.nbytes

    def extend(self, *, seconds: float) -> None:
        """Lock further units until the time is over, one at least.

        Raises:
            RunError: The driver refuses.
        """
        deadline = time.perf_counter() + seconds
        while not self.are_complete:
            size = min(UNIT_BYTES, self._buffer.nbytes - self._locked_bytes)
            start = self._buffer.data_ptr() + self._locked_bytes
            result = torch.cuda.cudart().cudaHostRegister(start, size, 0)
            if int(result) != 0:
                raise RunError(
                    f"{self._what}: cudaHostRegister failed with {int(result)}; raise the memlock limit"
                )
            self._locked_bytes += size
            if time.perf_counter() >= deadline:
                return

    def release(self) -> None:
        for offset in range(0, self._locked_bytes, UNIT_BYTES):
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr() + offset)
        self._locked_bytes = 0


def spans(offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the parts of a range that cross no border of two units."""
    end = offset + size_bytes
    while offset < end:
        border = min(end, (offset // UNIT_BYTES + 1) * UNIT_BYTES)
        yield offset, border - offset
        offset = border
