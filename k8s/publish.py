"""`k8s publish`: keep the run's status in an annotation of its Job.

Runs beside the control store, where the events lie on the mounted file system. So whoever may read the
Job sees the status, also after the last pod has ended: no access to pods, no mount, no open port.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from k8s import jobs
from k8s.command_line import command_parser, positive
from k8s.goodput import Goodput
from k8s.kubectl import Kubectl
from k8s.network import control_name
from k8s.progress import EventTail, Progress
from training.config import JobConfig, load_recipe
from training.errors import EXIT_DONE, RunError

STATUS_ANNOTATION = "holdfast/status"
PERIOD_SECONDS = 10.0
STORE_END_SECONDS = 60.0
"""Time that the store gets to end by itself, after late spares have seen the end of the run."""


def main(arguments: list[str]) -> int:
    parser = command_parser("publish", __doc__)
    jobs.add_cluster_arguments(parser)
    parser.add_argument("--recipe", type=Path, required=True, help="recipe of the run")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run")
    parser.add_argument(
        "--stop-at", type=_time, metavar="TIME", help="end the pods then, so that they can save"
    )
    parser.add_argument(
        "--period-seconds", type=positive, default=PERIOD_SECONDS, help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    publisher = Publisher(
        jobs.kubectl_of(options),
        options.name,
        recipe=load_recipe(options.recipe),
        run_dir=options.run_dir,
        stop_at=options.stop_at,
    )
    while not stop.wait(options.period_seconds):
        if _tolerant(publisher.publish) is False:
            return EXIT_DONE
    _tolerant(publisher.publish)
    return EXIT_DONE


def _time(text: str) -> datetime:
    """Read a time with its zone."""
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} needs a time zone, such as +00:00")
    return time


class Publisher:
    """Follows one Job's events and writes their sum into the Job."""

    def __init__(
        self,
        kubectl: Kubectl,
        job_name: str,
        *,
        recipe: JobConfig,
        run_dir: Path,
        stop_at: datetime | None = None,
    ) -> None:
        self._kubectl, self._name, self._stop_at = kubectl, job_name, stop_at
        self._tail = EventTail(run_dir)
        self._progress = Progress(steps=recipe.training.steps, pods=recipe.job.launchers)
        self._goodput = Goodput(run_dir)
        self._published = ""
        self._complete_since: float | None = None

    def publish(self) -> bool:
        """Write the status if it has changed; return whether the run still needs its control pod."""
        for event in self._tail.read():
            self._progress.add(event)
        status = self._progress.status(goodput_percent=self._goodput.percent())
        text = json.dumps(dataclasses.asdict(status))
        if text != self._published:
            annotations = {STATUS_ANNOTATION: text}
            self._kubectl.patch("job", self._name, {"metadata": {"annotations": annotations}})
            self._published = text
        self._stop_if_due()
        return self._is_needed(self._kubectl.get("job", self._name))

    def _stop_if_due(self) -> None:
        """Stop the pods of a Job whose capacity ends, each with its whole grace period."""
        if self._stop_at is not None and datetime.now(UTC) >= self._stop_at:
            self._kubectl.patch("job", self._name, jobs.STOP)
            self._stop_at = None

    def _is_needed(self, job: dict[str, Any] | None) -> bool:
        """Remove the control Job when the training Job is gone or has ended.

        A run that is done ends the store, and with it this sidecar; that gets time to happen first.
        """
        if job is not None and not self._is_over(job):
            return True
        control = control_name(self._name)
        self._kubectl.run("delete", "job", control, "--ignore-not-found", "--wait=false")
        return False

    def _is_over(self, job: dict[str, Any]) -> bool:
        state = jobs.state_of(job)
        if state != "complete":
            return state == "failed"
        self._complete_since = self._complete_since or time.monotonic()
        return time.monotonic() - self._complete_since > STORE_END_SECONDS


def _tolerant(publish: Callable[[], bool]) -> bool | None:
    """Publish; an API server that is away for a while must not end the sidecar."""
    try:
        return publish()
    except RunError as error:
        print(f"{time.strftime('%H:%M:%S')} not published: {error}", flush=True)  # noqa: T201
        return None
