"""A run's directory: who it belongs to, that one process group uses it, and that it is finished.

run.json   id of the run, settings that may not change on resume, and the identity of the data
lock       held by rank 0 for as long as it lives
DONE       the run's last step is durable; nothing is started again
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import schema
from training.config import JobConfig
from training.errors import ConfigError, Problem, RunError
from training.files import write_json

_LOCK_WAIT_SECONDS = 30.0


@dataclass(kw_only=True, slots=True)
class RunDirectory:
    """Paths and identity of one run."""

    path: Path
    _lock: int | None = None

    @property
    def done_file(self) -> Path:
        return self.path / "DONE"

    def is_done(self) -> bool:
        return self.done_file.exists()

    def claim(self, config: JobConfig, *, data_identity: Mapping[str, str], owner: bool) -> None:
        """Check that this run may use the directory; the owner (rank 0) also takes the lock.

        Raises:
            ConfigError: A setting that may not change on resume has changed.
            RunError: Another run holds the directory.
        """
        identity = _identity(config, data_identity)
        record = self.path / "run.json"
        if owner:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
        recorded = _read_record(self.path) if record.exists() else None
        if recorded is not None:
            problems = list(_changed(recorded, identity, self.path))
            if problems:
                raise ConfigError(problems)
        if owner:
            recorded = recorded or {**identity, "run": uuid.uuid4().hex[:16]}
            write_json(record, {**recorded, "local_directory": config.checkpoint.local.directory})

    def mark_done(self, step: int) -> None:
        write_json(self.done_file, {"step": step})

    def lock(self, *, wait_seconds: float = _LOCK_WAIT_SECONDS) -> None:
        """Lock by POSIX record lock: the kernel frees it when the process dies, forks don't inherit it.

        Raises:
            RunError: Another process still has it after `wait_seconds`.
        """
        if self._lock is not None:
            return
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                    os.close(descriptor)
                    raise RunError(
                        f"run_dir={str(self.path)!r}: is in use by {holder}; "
                        "wait for that run, or give this one its own --run-dir"
                    ) from error
                time.sleep(0.2)
        self._lock = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)


def read_run_id(path: Path) -> str:
    """Return the id that a run was given when its directory was claimed first.

    A directory that was removed and made again belongs to another run, whatever its name: what the old one
    has left in memory is not taken for its state.
    """
    return str(_read_record(path)["run"])


def read_local_directory(path: Path) -> Path | None:
    """Return where the run's nodes keep copies of their shards, None if they keep none."""
    directory = _read_record(path).get("local_directory")
    return Path(directory) if directory else None


def _read_record(path: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        ConfigError: It is damaged.
    """
    record = path / "run.json"
    try:
        read = json.loads(record.read_text())
    except ValueError:
        read = None
    if not isinstance(read, dict) or "run" not in read:
        rule = "is damaged: it must hold the run's id"
        raise ConfigError.of("RUN_DIR", str(record), rule, "restore it, or use another run directory")
    return read


def make_run_directory(path: Path) -> None:
    """Make it, unless it is there.

    Raises:
        ConfigError: It is a file, or below one.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError.of("--run-dir", str(path), "is no directory", "give another directory") from error


def default_run_directory(config: JobConfig) -> Path:
    """Return where a run goes unless it is told otherwise."""
    return Path("runs") / config.job.name


def _identity(config: JobConfig, data_identity: Mapping[str, str]) -> dict[str, Any]:
    fixed = schema.fixed_values(config) | {"data.path": dict(data_identity)}
    parsed: dict[str, Any] = json.loads(json.dumps(fixed))
    return {"version": 1, "name": config.job.name, "data_path": config.data.path, "fixed": parsed}


def _changed(recorded: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    if recorded["name"] != identity["name"]:
        rule = f"the directory {path} belongs to the run {recorded['name']!r}"
        yield Problem(path="job.name", value=identity["name"], rule=rule, fix="use another --run-dir")
    before, now = recorded["fixed"], identity["fixed"]
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            rule = f"may not change when a run resumes; {path} was started with {before.get(key)!r}"
            fix = "restore the old value, or start a new run with another --run-dir"
            yield Problem(path=key, value=now.get(key), rule=rule, fix=fix)
