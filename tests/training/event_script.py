"""Writes the events of a job whose true account is known by construction."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from training.goodput import Goodput, ledger

SETUP = ("rendezvous", "build", "load")


class EventScript:
    """A job in one line of time; every second is booked in `truth` as it is spent."""

    def __init__(self, *, ranks: int = 3) -> None:
        self.ranks = ranks
        self.time = 0.0
        self.round = self.iteration = 0
        self.step = 0
        self.events: list[dict[str, Any]] = []
        self.truth: dict[str, float] = defaultdict(float)
        self.emit("launch", role="supervisor", attempt=0)

    def emit(self, event: str, *, role: str = "rank", time: float | None = None, **fields: Any) -> None:
        now = self.time if time is None else time
        common = {"role": role, "node": "n", "pid": 1, "round": self.round, "iteration": self.iteration}
        self.events.append({"time": now, "event": event, **common, **fields})

    def spend(self, part: str, seconds: float) -> None:
        self.truth[part] += seconds
        self.time += seconds

    def pid(self, rank: int) -> int:
        return 1000 * (self.round + 1) + rank

    def all_ranks(self, event: str, **fields: Any) -> None:
        for rank in range(self.ranks):
            self.emit(event, rank=rank, pid=self.pid(rank), **fields)

    def span(self, name: str, seconds: float) -> None:
        start = self.time
        self.spend(name, seconds)
        self.all_ranks("span", name=name, start=start, seconds=seconds)

    def set_up(
        self,
        *,
        imports: float = 2.0,
        setup: float = 0.5,
        early: float = 0.0,
        base: int = 0,
        restored: dict[str, Any] | None = None,
    ) -> None:
        """Start a generation; rank 0 is the last to come, others are `early` and wait for it."""
        born = self.time
        if self.iteration == 0:
            self.spend("imports", imports)
        for rank in range(self.ranks):
            arrived = self.time - (early if rank else 0.0)
            if self.iteration == 0:
                at: dict[str, Any] = {"time": arrived, "rank": rank, "pid": self.pid(rank)}
                self.emit("enter", born=arrived - imports, **at)
                self.emit("span", name="imports", start=arrived - imports, seconds=imports, **at)
            else:
                self.emit("reentry", time=arrived, rank=rank, pid=self.pid(rank))
            end = self.time + setup
            wait: dict[str, Any] = {"start": arrived, "seconds": end - arrived, "time": end}
            self.emit("span", name="rendezvous", rank=rank, pid=self.pid(rank), **wait)
        self.spend("rendezvous", setup)
        for name in SETUP[1:]:
            self.span(name, setup)
        if base:
            self.all_ranks("restored", step=base, **(restored or {}))
        self.step = base
        assert self.time >= born

    def steps(self, count: int, seconds: float, *, part: str = "productive") -> None:
        for _ in range(count):
            start = self.time
            self.step += 1
            self.spend(part, seconds)
            self.all_ranks("step", step=self.step, start=start, seconds=seconds)

    def fault(self, kind: str, *, interrupted: float, rank: int = 1) -> None:
        """Hit a rank in the middle of the next step."""
        self.spend("lost work", interrupted)
        where: dict[str, Any] = {"rank": rank, "pid": self.pid(rank)}
        self.emit("fault", kind=kind, step=self.step + 1, point="backward", index=0, **where)

    def reenter(self, *, detect: float, restart: float) -> None:
        self.spend("detect", detect)
        self.emit("exception", rank=1, pid=self.pid(1), type="InjectedFault", message="")
        self.spend("restart", restart)
        self.iteration += 1

    def respawn(self, *, detect: float, restart: float, stop: float = 0.0) -> None:
        self.spend("detect", detect)
        self.emit("worker_exit", role="launcher", rank=1, worker_pid=self.pid(1), signal=9, stopped=False)
        self.spend("restart", stop)
        self.emit("worker_exit", role="launcher", rank=0, worker_pid=self.pid(0), signal=9, stopped=True)
        self.spend("restart", restart)
        self.round += 1
        self.iteration = 0

    def end(self) -> None:
        self.span("finalize", 0.7)
        self.all_ranks("done", step=self.step)
        self.spend("stop", 0.3)
        self.emit("exit", role="supervisor", exit_code=0)

    def account(self) -> Goodput:
        return ledger(sorted(self.events, key=lambda event: float(event["time"])))
