"""The breaker: a step that fails in the same way again and again ends the run, with the evidence.

What has failed is kept in `RUN_DIR/failures/rank-N.json`, so that it survives the process. One file a
rank, written by that rank alone: when all ranks raise at once, no count is lost and none counts twice.

Not counted, because a restart may well help or another rank is the cause: a process that dies, an error
with an exit code of its own (HoldfastError), an error of the device, and whatever comes out of
torch.distributed (a peer that went away looks like that, and so, alas, does a wrong collective).
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.errors import EXIT_SAME_STEP, HoldfastError
from training.files import write_json

MESSAGE_CHARACTERS = 200
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_COMMUNICATION = re.compile(r"gloo|nccl|ProcessGroup|c10d|Connection (closed|reset) by peer", re.IGNORECASE)
_DISTRIBUTED = str(Path(dist.__file__).parent)


class SameStepError(HoldfastError):
    """The same step failed in the same way too often; the Job must not be retried."""

    exit_code = EXIT_SAME_STEP


class Breaker:
    """Counts failures of one rank, across its restarts in the process and in the job."""

    def __init__(self, run_dir: Path, *, rank: int, maximum: int, log: Path | str) -> None:
        """Read what earlier processes of this rank have counted.

        Args:
            run_dir: Directory of the run; it outlives the pod.
            rank: This rank.
            maximum: Failures of one kind in one step that end the run.
            log: Where this process writes its events, or what it has written to.
        """
        self._path = run_dir / "failures" / f"rank-{rank}.json"
        self._rank, self._maximum, self._log = rank, maximum, log
        self._seen = self._read()

    def failed(self, error: Exception, *, step: int | None) -> None:
        """Count an exception of the training function.

        Args:
            error: What it raised.
            step: Step that was being done; None before the first.

        Raises:
            SameStepError: It was the last that is allowed.
        """
        if _counts(error):
            message = (str(error).splitlines() or [""])[0][:MESSAGE_CHARACTERS]
            details = (_place(error), *getattr(error, "__notes__", ()))
            self.count(type(error).__name__, message, step, details=details)

    def count(self, kind: str, message: str, step: int | None, *, details: Sequence[str] = ()) -> None:
        """Count a failure.

        Args:
            kind: What it is called.
            message: What is wrong; numbers in it do not tell two failures apart.
            step: Step that was being done; None before the first.
            details: Evidence that is kept and shown, such as the samples.

        Raises:
            SameStepError: It was the last that is allowed.
        """
        found = {"type": kind, "message": _without_numbers(message), "step": step}
        again = {key: self._seen.get(key) for key in found} == found
        evidence = {"rank": self._rank, "said": message, "details": list(details), "log": str(self._log)}
        self._seen = {**found, "count": (self._seen["count"] if again else 0) + 1, **evidence}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._seen)
        if self._seen["count"] >= self._maximum:
            raise SameStepError(self._evidence())

    def succeeded(self, step: int | None) -> None:
        """Forget the failures of a step once a later one is done."""
        failed = self._seen.get("step")
        if self._seen and (failed is None or (step is not None and step > failed)):
            self._seen = {}
            self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            seen: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return seen

    def _evidence(self) -> str:
        seen = self._seen
        where = "set-up or the first step" if seen["step"] is None else f"step {seen['step']}"
        details = f" ({'; '.join(seen['details'])})" if seen["details"] else ""
        return (
            f"recovery.maximum_same_step_failures={self._maximum}: rank {self._rank} failed as often in "
            f"{where} with {seen['type']}: {seen['said']}{details}; log: {self._log}; "
            f"mend the cause and delete {self._path}, or raise the limit"
        )


@contextmanager
def counted_before_first_attempt(run_dir: Path, *, rank: int, maximum: int) -> Iterator[None]:
    """Count an exception of a block that runs before the rank has an event log; arguments as for Breaker.

    Raises:
        SameStepError: It was the last that is allowed.
    """
    try:
        yield
    except Exception as error:
        Breaker(run_dir, rank=rank, maximum=maximum, log="its output").failed(error, step=None)
        raise


def _counts(error: Exception) -> bool:
    """Say whether this rank is the cause, and would be again."""
    if isinstance(error, (HoldfastError, dist.DistError, torch.AcceleratorError, ConnectionError)):
        return False
    if _frames(error)[-1].filename.startswith(_DISTRIBUTED):
        return False
    # gloo has no class of its own
    return type(error) is not RuntimeError or _COMMUNICATION.search(str(error)) is None


def _frames(error: Exception) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _place(error: Exception) -> str:
    frame = _frames(error)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _without_numbers(message: str) -> str:
    """Return what stays the same of a message in which addresses, sizes and losses change."""
    return _NUMBERS.sub("#", message)[:MESSAGE_CHARACTERS]
