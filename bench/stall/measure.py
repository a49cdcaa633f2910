"""What is measured, each in a process of its own; what is known so far is reported after every part."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.stall.loop import Loop
from bench.stall.methods import METHODS, SLOTS, Holdfast, Method, Tier
from training.integrity import fingerprinter
from training.snapshot import Snapshots

Report = Callable[[dict[str, Any]], None]

_WARM_UP_STEPS = 5


def saves(name: str, loop: Loop, root: Path, report: Report, *, steps: int, count: int) -> None:
    """Measure one writer: the first save, which pays for set-up, apart from the others.

    Cost of a save = (time of a window of `steps` steps with one save - steps x undisturbed step), so a
    writer that steals GPU, PCIe or interpreter time is charged for it too.
    """
    row, undisturbed = _begin(name, loop, steps)
    start = time.perf_counter()
    method = METHODS[name](loop, root)
    row["setup_seconds"] = time.perf_counter() - start
    row["first_call_ms"], row["first_durable_seconds"] = _first_save(method, loop, root / "first")
    report(row)
    calls, windows, durable = [], [], []
    for number in range(count):
        directory = root / f"save-{number}"
        call, window, ended = _window(method, loop, directory, steps)
        shutil.rmtree(directory, ignore_errors=True)
        calls.append(call)
        windows.append(window)
        durable.append(ended)
        extra = statistics.median(windows) - steps * undisturbed
        report(
            row
            | {
                "saves": len(calls),
                "call_ms": statistics.median(calls) * 1e3,
                "cost_per_save_ms": extra * 1e3,
                "cost_in_steps": extra / undisturbed,
                "durable_seconds": statistics.median(durable),
            }
        )
    method.close()


def snapshots(loop: Loop, root: Path, report: Report, *, steps: int) -> None:
    """Measure a snapshot at every step, fingerprints included, alone and while a save is drained."""
    row, _ = _begin("snapshot_every_step", loop, steps)
    method = Holdfast(loop, root)
    row |= _parts(method.tier, loop)
    report(row)
    plain, taken = [], []
    # interleaved: a GPU's clock drifts with its temperature
    for _ in range(3):
        plain.append(_steps(method, loop, steps, every=0))
        taken.append(_steps(method, loop, steps, every=1))
    undisturbed = statistics.median(plain)
    row |= {
        "step_ms": undisturbed / steps * 1e3,
        "snapshot_percent": 100 * (statistics.median(taken) / undisturbed - 1),
        "skipped": method.tier.snapshots.skipped,
    }
    report(row)
    method.save(root / "unused")
    drained = _steps(method, loop, steps, every=1)
    row["snapshot_and_drain_percent"] = 100 * (drained / undisturbed - 1)
    row["skipped"] = method.tier.snapshots.skipped
    report(row)
    method.close()


def restore(loop: Loop, root: Path, report: Report, *, steps: int) -> None:
    """Measure set-up beside training, the way back from a rank's own memory, and what memory it takes."""
    row, undisturbed = _begin("restore", loop, steps)
    used_bytes = _device_bytes(loop)
    tier = Tier(loop, root)
    row["setup_new"] = _set_up_beside_training(tier.snapshots, loop, undisturbed)
    for _ in range(SLOTS):
        loop.step(tier.snapshots.before_optimizer_step)
        tier.snapshots.take(tier.mark(), tier.notes)
    mark = tier.mark()
    _synchronize(loop)
    tier.snapshots.close(sweep=False)
    row["device_mb"] = (_device_bytes(loop) - used_bytes) / 1e6
    row["host_bytes_per_slot_and_shard"] = _host_bytes(tier) / (SLOTS * loop.state_bytes)
    report(row)

    tier.snapshots = tier.make()
    seconds = [_seconds(lambda: tier.snapshots.load(mark)) for _ in range(4)]
    best = min(seconds[1:])
    row |= {
        "load_ms": best * 1e3,
        "load_gb_per_second": loop.state_bytes / 1e9 / best,
        "first_load_ms": seconds[0] * 1e3,
        "lock_one_slot_ms": max(0.0, seconds[0] - best) * 1e3,
    }
    report(row)
    row["setup_again"] = _set_up_beside_training(tier.snapshots, loop, undisturbed)
    report(row)
    tier.close()


def _begin(name: str, loop: Loop, steps: int) -> tuple[dict[str, Any], float]:
    for _ in range(_WARM_UP_STEPS):
        loop.step()
    undisturbed = loop.undisturbed_seconds(steps)
    row = {"row": name, "state_gb": loop.state_bytes / 1e9, "step_ms": undisturbed * 1e3}
    return row, undisturbed


def _first_save(method: Method, loop: Loop, directory: Path) -> tuple[float, float]:
    start = time.perf_counter()
    method.save(directory)
    call = time.perf_counter() - start
    loop.step(method.before_optimizer_step)
    method.wait()
    loop.wait()
    shutil.rmtree(directory, ignore_errors=True)
    return call * 1e3, time.perf_counter() - start


def _window(method: Method, loop: Loop, directory: Path, steps: int) -> tuple[float, float, float]:
    """Return the seconds of the call, of all steps, and from the call to the durable save."""
    loop.wait()
    start = time.perf_counter()
    call = saved_at = 0.0
    for number in range(steps):
        loop.step(method.before_optimizer_step)
        if number == 0:
            saved_at = time.perf_counter()
            method.save(directory)
            call = time.perf_counter() - saved_at
        elif isinstance(method, Holdfast):
            method.poll()
        loop.wait()
    window = time.perf_counter() - start
    method.wait()
    return call, window, time.perf_counter() - saved_at


def _steps(method: Holdfast, loop: Loop, steps: int, *, every: int) -> float:
    loop.wait()
    start = time.perf_counter()
    for _ in range(steps):
        loop.step(method.before_optimizer_step)
        if every:
            method.tier.snapshots.take(method.tier.mark(), method.tier.notes)
        method.poll()
        loop.wait()
    seconds = time.perf_counter() - start
    _synchronize(loop)
    return seconds


def _parts(tier: Tier, loop: Loop) -> dict[str, float]:
    """Return the times that decide whether a snapshot at every step is free."""

    def copy() -> None:
        tier.snapshots.take(tier.mark(), tier.notes)
        _synchronize(loop)

    def forward_backward() -> None:
        loop.forward_backward()
        _synchronize(loop)
        loop.state.optimizer.zero_grad()

    take_fingerprints = fingerprinter(list(loop.local().values())[:-2], loop.device)

    def fingerprint() -> None:
        take_fingerprints()
        _synchronize(loop)

    parts = {"copy_ms": copy, "forward_backward_ms": forward_backward, "fingerprint_ms": fingerprint}
    return {name: min(_seconds(part) for _ in range(4)) * 1e3 for name, part in parts.items()}


def _set_up_beside_training(snapshots: Snapshots, loop: Loop, undisturbed: float) -> dict[str, float]:
    """Set up while training goes on; return how long it took and what it cost the steps."""
    times: list[float] = []
    start = time.perf_counter()
    while not snapshots.ready():
        began = time.perf_counter()
        loop.step(snapshots.before_optimizer_step)
        snapshots.set_up()
        loop.wait()
        times.append(time.perf_counter() - began)
    return {
        "seconds": time.perf_counter() - start,
        "steps": len(times),
        "slowest_step_ms": max(times) * 1e3,
        "cost_ms": (sum(times) - len(times) * undisturbed) * 1e3,
    }


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _synchronize(loop: Loop) -> None:
    if loop.device.type == "cuda":
        torch.cuda.synchronize()


def _device_bytes(loop: Loop) -> int:
    """Return the memory in use on the device, by all of this process."""
    if loop.device.type != "cuda":
        return 0
    _synchronize(loop)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _host_bytes(tier: Tier) -> int:
    return sum(path.stat().st_blocks * 512 for path in tier.snapshots.directory.glob("*.slot"))
