"""A launcher's conversation with the control store, in a thread of its own.

A call to a store whose process is stopped, or whose machine is frozen, ignores its timeout
(torch's TCPStore sets none on its socket). The launcher must go on watching its ranks meanwhile, so it
never asks the store itself while they train.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 0.5
PROBE_SECONDS = 1.0
CONNECT_SECONDS = 5.0
# A call that takes longer has met a stopped store.
ANSWER_SECONDS = 5.0
STORE_ID_KEY = "holdfast/store_id"


def read_store_id(store: Store) -> str:
    """Return the name that a control store gives itself, empty if it has none (yet)."""
    return store.get(STORE_ID_KEY).decode() if store.check([STORE_ID_KEY]) else ""


class ControlWatch:
    """Beats for this node, and looks for one key, as long as the launcher lives."""

    def __init__(self, store: TCPStore, *, heartbeat_key: str) -> None:
        """Begin.

        Args:
            store: The launcher's own client, which tells where the store is, and which it is.
            heartbeat_key: Counter that says to the control that this launcher lives.
        """
        self._patience_seconds = ANSWER_SECONDS
        self._talk = _Talk(store, store_id=read_store_id(store), heartbeat_key=heartbeat_key)
        self._talk.start()

    @property
    def store(self) -> TCPStore:
        """Client for the launcher's own use: the one it brought, or a new one after a loss."""
        return self._talk.store

    @property
    def store_id(self) -> str:
        """Name of the store that the launcher has met; empty as long as that had none."""
        return self._talk.store_id

    def is_set(self, key: str) -> bool:
        """Say whether the store had a key when it was last asked for it; False until it was."""
        self._talk.key = key
        return self._talk.found == key

    def is_replaced(self) -> bool:
        """Say whether another store answers now: nothing of the old one is in it."""
        return self._talk.is_replaced

    def problem(self) -> str | None:
        """Return why the store cannot be asked, None while it answers."""
        if self._talk.problem is not None:
            return self._talk.problem
        silent = time.monotonic() - self._talk.answered
        if silent < ANSWER_SECONDS:
            return None
        if silent > self._patience_seconds:
            # Twice the time for each, so that a store that never answers leaves few threads behind
            self._patience_seconds = 2 * silent
            self._talk = self._talk.successor()
        return f"no answer for {silent:.0f} s"

    def close(self) -> None:
        self._talk.stopped.set()


class _Talk(threading.Thread):
    """One thread, which a stopped store may hold for ever."""

    def __init__(self, store: TCPStore, *, store_id: str, heartbeat_key: str) -> None:
        super().__init__(name="control-watch", daemon=True)
        self.store, self.store_id, self._heartbeat_key = store, store_id, heartbeat_key
        self._host, self._port = store.host, store.port
        self._timeout: timedelta = store.timeout  # type: ignore[attr-defined]
        self._next_heartbeat = 0.0
        self.key = self.found = ""
        self.problem: str | None = None
        self.is_replaced = False
        self.answered = time.monotonic()
        self.stopped = threading.Event()

    def successor(self) -> _Talk:
        """Return a thread with a connection of its own, already at work, and let this one end."""
        self.stopped.set()
        talk = _Talk(self.store, store_id=self.store_id, heartbeat_key=self._heartbeat_key)
        talk.key, talk.answered = self.key, self.answered
        talk.problem = "it has stopped answering"
        talk.start()
        return talk

    def run(self) -> None:
        while not self.stopped.is_set() and not self.is_replaced:
            try:
                self._ask(self._connect())
            except (OSError, RuntimeError) as error:
                self.problem = str(error).splitlines()[0]
                self.stopped.wait(PROBE_SECONDS)

    def _connect(self) -> TCPStore:
        socket.create_connection((self._host, self._port), timeout=CONNECT_SECONDS).close()
        client = self._new_client(timedelta(seconds=CONNECT_SECONDS))
        store_id = read_store_id(client)
        if not store_id:
            raise ConnectionError("the control store is not ready")
        # A launcher that was quick has met the store before that had named itself
        self.store_id = self.store_id or store_id
        self.is_replaced = store_id != self.store_id
        if self.problem is not None:
            # The launcher's may hold a late answer, which its next question would take for its own
            self.store = self._new_client(self._timeout)
        return client

    def _new_client(self, timeout: timedelta) -> TCPStore:
        return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _ask(self, client: TCPStore) -> None:
        while not self.stopped.is_set() and not self.is_replaced:
            key = self.key
            if time.monotonic() >= self._next_heartbeat:
                client.add(self._heartbeat_key, 1)
                self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            if key and client.check([key]):
                self.found = key
            self.answered, self.problem = time.monotonic(), None
            self.stopped.wait(POLL_SECONDS)
