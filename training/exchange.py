"""Values of all ranks, exchanged through the group's store: bounded, and says who did not answer.

A collective would wait for the group timeout and then blame nobody.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from training.errors import RunError

_POLL_SECONDS = 0.005


class Exchange:
    """One conversation of all ranks of the default group; every rank makes the same calls in order."""

    def __init__(self, name: str, *, timeout_seconds: float) -> None:
        """Begin.

        Args:
            name: Unique among the conversations of a process group.
            timeout_seconds: Longest wait for the other ranks at one call.
        """
        self._store = PrefixStore(f"exchange/{name}", _get_default_store())
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._timeout_seconds = timeout_seconds
        self._round = 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in order of rank.

        Args:
            what: What the ranks are asked for; part of the error.
            value: This rank's answer.

        Raises:
            RunError: Some ranks did not answer in time.
        """
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self._rank], json.dumps(value))
        deadline = time.monotonic() + self._timeout_seconds
        # polled, not waited for: see process_group._wait_for_all
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RunError(
                    f"{what}: no answer of ranks {missing} within {self._timeout_seconds:g} s; see their logs"
                )
            time.sleep(_POLL_SECONDS)
        return [json.loads(raw) for raw in self._store.multi_get(keys)]

    def first(self, what: str, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return self.gather(what, value if self._rank == 0 else None)[0]
