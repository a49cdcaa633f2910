"""The in-process layer's store: a client of the control store that outlives the loss of it.

NVRx's Wrapper takes a lost store for the end: its monitor thread and its monitor process die of the first
network error, and a later exception then leaves the rank spinning. Here reads and writes wait for the store
instead, and a wait times out as if nothing had happened; when the store is back, empty or not, what was to
be said is said.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.store import StoreMixin
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from training.process_group import STORE_TIMEOUT_SECONDS

RETRY_SECONDS = 0.5
# A client serves its threads one by one: none may wait long for a key that another is about to set.
WAIT_SECONDS = 0.1
# As long as a launcher waits for a control store that is late.
LOST_SECONDS = 600.0

log = logging.getLogger(__name__)


class ControlStore(Store, StoreMixin):  # type: ignore[misc]
    """A store that nobody in the job hosts, so no rank is critical."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        super().__init__()
        self._address, self._prefix = (host, port), prefix
        self._lock = threading.Lock()
        self._client: Store | None = self._connect()

    def set(self, key: str, value: str) -> None:
        self._until_done(lambda client: client.set(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._until_done(lambda client: client.get(key))  # type: ignore[no-any-return]

    def add(self, key: str, value: int) -> int:
        return self._until_done(lambda client: client.add(key, value))  # type: ignore[no-any-return]

    def append(self, key: str, value: str) -> None:
        self._until_done(lambda client: client.append(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._until_done(lambda client: client.check(list(keys)))  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._until_done(lambda client: client.compare_set(key, expected, desired))  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        return self._until_done(lambda client: client.delete_key(key))  # type: ignore[no-any-return]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._until_done(lambda client: client.multi_get(list(keys)))  # type: ignore[no-any-return]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._until_done(lambda client: client.multi_set(list(keys), list(values)))

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, whether or not the store can be reached.

        Raises:
            DistStoreError: They are not there in time.
        """
        seconds = STORE_TIMEOUT_SECONDS if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._connected().wait(list(keys), timedelta(seconds=min(left, WAIT_SECONDS)))
            except dist.DistStoreError:
                continue
            except (OSError, RuntimeError) as error:
                self._lose(error)
                time.sleep(min(left, RETRY_SECONDS))
            else:
                return
        raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")

    def _until_done(self, operation: Callable[[Any], Any]) -> Any:
        deadline = time.monotonic() + LOST_SECONDS
        while True:
            try:
                return operation(self._connected())
            except dist.DistStoreError:
                raise
            except (OSError, RuntimeError) as error:
                self._lose(error)
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def _connected(self) -> Any:
        with self._lock:
            self._client = self._client or self._connect()
            return self._client

    def _connect(self) -> Store:
        # without it, torch repeats the attempt until its own timeout
        socket.create_connection(self._address, timeout=STORE_TIMEOUT_SECONDS).close()
        timeout = timedelta(seconds=STORE_TIMEOUT_SECONDS)
        client = TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(self._prefix, client)

    def _lose(self, error: Exception) -> None:
        with self._lock:
            if self._client is not None:
                reason = str(error).splitlines()[0]
                log.warning("control store lost (%s): restarts in the process wait for it", reason)
            self._client = None
