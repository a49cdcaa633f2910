"""A rank's side of the tier on its node's disk: makes copies in the background, and loads them."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from training import local_image, slots
from training.drain_worker import DrainWorker, Outcome, read_outcome
from training.errors import CheckpointError, RunError
from training.events import EventLog
from training.files import listing
from training.lineage import Ancestry
from training.local_image import CopyRequest
from training.slots import Mark, Slot
from training.snapshot import Snapshots

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.01


class LocalCopies:
    """The images of one rank's shard. Made once a process, kept over in-process restarts."""

    def __init__(
        self, root: Path, *, keep: int, run_dir: Path, snapshots: Snapshots, events: EventLog, node: str
    ) -> None:
        self._root, self._keep, self._run_dir = root, keep, run_dir
        self._snapshots, self._events, self._node = snapshots, events, node
        self._worker = DrainWorker("local copy")
        self._run = ""
        self._request: CopyRequest | None = None
        self._slot: Path | None = None
        """Slot that is copied to the node's disk and nowhere else."""

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being made."""
        return self._request is not None

    @property
    def directory(self) -> Path:
        return local_image.shard_path(self._root, self._run, self._node, self._snapshots.layout.place)

    def prepare(self, run: str) -> None:
        """Make the directory, and the worker, which a later attempt keeps. The snapshots are prepared.

        Raises:
            RunError: The disk takes no directory, or has no room for the images.
        """
        self._run = run
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise RunError(
                f"checkpoint.local.directory={str(self._root)!r}: cannot be used ({error.strerror}); mount "
                "the node's disk there, or leave the setting empty"
            ) from error
        held = sum(_allocated_bytes(path) for path in listing(self.directory, "*/*"))
        needed = (self._keep + 1) * self._snapshots.layout.size_bytes
        if needed > free + held:
            raise RunError(
                f"checkpoint.local.directory={str(self._root)!r}: {(free + held) / 2**30:.1f} GiB free, a "
                f"rank needs {needed / 2**30:.1f}; use a larger disk, or leave the setting empty"
            )
        self._worker.start()

    def image_path(self, mark: Mark) -> Path:
        return local_image.image_path(self.directory, mark)

    def begin(self, mark: Mark, slot_path: Path, *, deadline: float) -> None:
        """Start a copy of a slot that is held.

        Args:
            mark: What the slot holds, or is going to.
            slot_path: The slot.
            deadline: Seconds since the epoch.
        """
        layout = self._snapshots.layout
        self._request = CopyRequest(
            run_dir=self._run_dir,
            directory=self.directory,
            slot_path=slot_path,
            outcome_path=self._snapshots.directory / "copy.json",
            layout=layout,
            descriptor=slots.describe(self._run, layout),
            mark=mark,
            keep=self._keep,
            deadline=deadline,
            node=self._node,
            rank=dist.get_rank(),
        )
        self._worker.submit(local_image.copy, self._request)

    def save(self, mark: Mark, notes: Tensor, *, deadline: float) -> bool:
        """Start a copy that no durable save goes on from; False if no slot is free.

        Args:
            mark: What the state is now.
            notes: Kept with it, see `Snapshots.take`.
            deadline: Seconds since the epoch.
        """
        self._slot = self._snapshots.hold(mark, notes)
        if self._slot is None:
            self._events.emit("local_copy", step=mark.step, status="skipped", reason="no slot is free")
            return False
        self.begin(mark, self._slot, deadline=deadline)
        return True

    def poll(self) -> None:
        """Notice the end of a copy that `save` has started."""
        if self._slot is None:
            return
        outcome = self.outcome()
        if outcome is None:
            return
        self._snapshots.release(self._slot)
        self._slot = None

    def wait(self) -> None:
        """Wait until a copy that `save` has started is over, at most until its deadline."""
        while self._slot is not None:
            self.poll()
            time.sleep(_POLL_SECONDS)

    def outcome(self) -> Outcome | None:
        """Return, once, how the copy has ended, None while it goes on; it is given up at its deadline."""
        request = self._request
        assert request is not None
        self._snapshots.open_to_readers()
        outcome = self._worker.outcome(request.outcome_path, request.mark.step)
        if outcome is None and time.time() > request.deadline:
            self._worker.abandon()
            outcome = Outcome(step=request.mark.step, failure="no end before its deadline")
        if outcome is not None:
            self._request = None
            self._tell(request, outcome)
        return outcome

    def give_up(self) -> None:
        """Give up the copy that is being made, if there is one."""
        if self._request is None:
            return
        self._worker.abandon()
        self._tell(self._request, Outcome(step=self._request.mark.step, failure="was given up"))
        self._request = None
        if self._slot is not None:
            self._snapshots.release(self._slot)
            self._slot = None

    def _tell(self, request: CopyRequest, outcome: Outcome) -> None:
        if not outcome.failure:
            return
        logger.warning("local copy of step %d: %s; training goes on", outcome.step, outcome.failure)
        if read_outcome(request.outcome_path, outcome.step) is None:  # else its worker has told it
            self._events.emit("local_copy", step=outcome.step, status="failed", reason=outcome.failure)

    def inventory(self) -> list[Mark]:
        """Return the whole images of the rank's shard on this node: of this run and layout."""
        return [manifest.mark for _, manifest in self._images()]

    def load(self, mark: Mark) -> list[float]:
        """Copy an image into the state, and check every tensor where it then is; return its notes.

        Raises:
            CheckpointError: There is no such image, or a tensor is not what was once copied.
        """
        path = next((path for path, manifest in self._images() if manifest.mark == mark), None)
        if path is None:
            raise CheckpointError(f"{self.directory}: the copy of step {mark.step} is gone")
        try:
            slot = Slot(path, self._snapshots.layout)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        try:
            if slot.mark() != mark:
                raise CheckpointError(f"{path}: its marks are not those of its manifest")
            return self._snapshots.read(slot)
        finally:
            slot.close()

    def forget_dead(self, ancestry: Ancestry) -> None:
        """Remove images of states that the run has left, and those of its earlier world sizes."""
        local_image.remove_dead(self.directory, ancestry)
        slots.sweep_other_meshes(self.directory.parent, shards=self._snapshots.layout.place.shards)

    def close(self, *, sweep: bool) -> None:
        """End the worker.

        Args:
            sweep: Remove the images: the run is over.
        """
        self._worker.close()
        if sweep and self._run:
            slots.sweep(self.directory)

    def _images(self) -> list[tuple[Path, local_image.ImageManifest]]:
        """Return what this rank could load; say what is wrong with the rest."""
        wanted = slots.describe(self._run, self._snapshots.layout)
        found = []
        for path, manifest in local_image.whole_images(self.directory):
            if manifest.descriptor != wanted:
                self._refuse(path, "is of another run or model")
            elif not path.is_file() or path.stat().st_size != manifest.image.size_bytes:
                self._refuse(path, "is missing or truncated")
            else:
                found.append((path, manifest))
        return found

    def _refuse(self, path: Path, reason: str) -> None:
        self._events.emit("refused", source=str(path), tier="local", reason=reason)


def _allocated_bytes(path: Path) -> int:
    # after a restart in the process, the worker may still be writing and removing images
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return 0
