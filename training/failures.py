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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.commit import write_json
from training.errors import EXIT_SAME_STEP, HoldfastError

MESSAGE_CHARACTERS = 200
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_COMMUNICATION = re.compile(r"gloo|nccl|ProcessGroup|c10d|Connection (closed|reset) by peer", re.IGNORECASE)
_DISTRIBUTED = str(Path(dist.__file__).parent)


class SameStepError(HoldfastError):
    """The same step failed in the same way too often; the Job must not be retried."""

    exit_code = EXIT_SAME_STEP


class Breaker:
    """Counts failures of one rank, across its restarts in the process and in the job."""

    def __init__(self, run_dir: Path, *, rank: int, maximum: int) -> None:
        self._path = run_dir / "failures" / f"rank-{rank}.json"
        self._rank, self._maximum = rank, maximum
        self._seen = self._read()

    def failed(self, error: Exception, *, step: int | None) -> None:
        """Count an exception of the training function.

        Args:
            error: What it raised.
            step: Step that was being done; None before the first.

        Raises:
            SameStepError: It was the last that is allowed.
        """
        if not _counts(error):
            return
        found = {"type": type(error).__name__, "message": _without_numbers(error), "step": step}
        again = {key: self._seen.get(key) for key in found} == found
        self._seen = {**found, "count": (self._seen["count"] if again else 0) + 1}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._seen)
        if self._seen["count"] >= self._maximum:
            raise SameStepError(self._evidence(error, step)) from error

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

    def _evidence(self, error: Exception, step: int | None) -> str:
        where = "set-up or the first step" if step is None else f"step {step}"
        message = (str(error).splitlines() or [""])[0][:MESSAGE_CHARACTERS]
        return (
            f"recovery.maximum_same_step_failures={self._maximum}: rank {self._rank} failed as often in "
            f"{where} with {type(error).__name__}: {message} ({_place(error)}); "
            f"mend the cause and delete {self._path}, or raise the limit"
        )


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


def _without_numbers(error: Exception) -> str:
    """Return what stays the same of a message in which addresses, sizes and losses change."""
    return _NUMBERS.sub("#", str(error))[:MESSAGE_CHARACTERS]
