"""Simulated nodes have nothing in common but the network and the run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import is_alive
from tests.rehearsal.test_rehearse import start, write_recipe
from training.errors import ConfigError
from training.processes import descendants
from training.rehearsal.isolation import Isolation, isolation

pytestmark = pytest.mark.timeout(300)

WAIT_SECONDS = 120


@pytest.fixture
def isolated() -> Iterator[Isolation]:
    with isolation() as found:
        if not found.is_real:
            pytest.fail(
                "this machine permits no mount and pid namespaces: run the tests as root, or allow them"
            )
        yield found


def run_in(isolated: Isolation, node: str, script: str) -> str:
    environ = {**os.environ, **isolated.environ(node)}
    command = isolated.command(node, ["sh", "-c", script])
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_node_sees_nothing_of_this_machine(isolated: Isolation, shared_memory: Path) -> None:
    (shared_memory / "slot").write_text("another node's")
    assert run_in(isolated, "node-7", "ls -A /dev/shm").split() == ["hosts", "tmp"]
    assert run_in(isolated, "node-7", "ls -d /proc/[0-9]*").split()[0] == "/proc/1"
    assert run_in(isolated, "node-7", f"test ! -e /proc/{os.getpid()} && echo $$").strip() == "1"
    assert run_in(isolated, "node-7", "cat /proc/sys/kernel/hostname; echo $TMPDIR").split() == [
        "node-7",
        "/dev/shm/tmp",
    ]
    (shared_memory / "slot").unlink()


def test_path_in_private_memory_is_refused(isolated: Isolation, shared_memory: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run-dir='/dev/shm/.*of which every simulated node has its own"):
        isolated.check_visible(shared_memory / "run", setting="--run-dir")


def test_nodes_without_namespaces_have_a_directory_each(tmp_path: Path) -> None:
    weak = Isolation(shared=tmp_path)
    assert weak.command("node-0", ["true"]) == ["true"]
    places = [weak.environ(node) for node in ("node-0", "node-1")]
    assert [place["HOLDFAST_SHARED_MEMORY"] for place in places] == [
        str(tmp_path / "node-0"),
        str(tmp_path / "node-1"),
    ]
    weak.free_memory("node-0")
    assert [path.name for path in tmp_path.iterdir()] == ["node-1"]


def test_missing_namespaces_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with isolation() as found:
        assert not found.is_real
        assert found.shared.is_dir()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not proven that none reads another's memory" in caplog.text
    assert not found.shared.exists()


def slots_seen(process: int) -> dict[str, set[str]]:
    """Return for each mount namespace below a process the slot files that its processes can open."""
    seen: dict[str, set[str]] = defaultdict(set)
    for pid in descendants(process):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            slots = Path(f"/proc/{pid}/root/dev/shm").rglob("*.slot")
            seen[namespace] |= {str(path.relative_to(f"/proc/{pid}/root/dev/shm")) for path in slots}
        except OSError:
            continue  # it has just ended
    return seen


def nodes_with_slots(process: int) -> list[set[str]]:
    """Return the names of the nodes whose slots each namespace can open."""
    return [{slot.split("/")[2] for slot in slots} for slots in slots_seen(process).values() if slots]


def test_no_rank_opens_another_nodes_slots_and_sigkill_leaves_nothing(
    isolated: Isolation, tmp_path: Path, data: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    process = start(write_recipe(tmp_path, data), tmp_path / "run")
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found := nodes_with_slots(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    below = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert sorted(found, key=str) == [{"node-0"}, {"node-1"}]

    while any(is_alive(pid) for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in below if is_alive(pid)] == []
    assert {path for path in Path("/dev/shm").iterdir() if path.name.startswith("hf-")} <= before
