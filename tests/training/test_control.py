from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.training.stores import listens, until
from training import control
from training.control_watch import read_store_id
from training.environment import free_port
from training.errors import EXIT_CONFIG, EXIT_RETRY, EXIT_STOPPED, ConfigError
from training.processes import descendants

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "training" / "recipes" / "rehearsal_cpu.toml"
# argv: failures in a row that end it, seconds of silence that a store is killed after, arguments
CONTROL = """
import sys
from training import control
control.QUICK_FAILURES, control.SILENCE_SECONDS = int(sys.argv[1]), float(sys.argv[2])
sys.exit(control.main(sys.argv[3:]))
"""


def start(*arguments: object, failures: int = 5, silence_seconds: float = 10.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONTROL, str(failures), str(silence_seconds), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def answers(port: int, host: str = "127.0.0.1") -> bool:
    return listens((host, port)) and bool(store_id(port, host))


def store_id(port: int, host: str = "127.0.0.1") -> str:
    try:
        return read_store_id(TCPStore(host, port, is_master=False, wait_for_workers=False))
    except RuntimeError:
        return ""


def test_error_that_comes_back_at_once_ends_the_control() -> None:
    """GIVEN a port that is in use WHEN it fails twice of two allowed times THEN it gives up."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        control = start(RECIPE, "--host", "127.0.0.1", "--port", port, failures=2)
        _, errors = control.communicate(timeout=110)
    assert control.returncode == EXIT_RETRY
    assert errors.count("beginning again") == 1
    assert "failed 2 times in a row, giving up" in errors


def test_recipe_that_is_wrong_ends_the_control(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("version = 1\n")
    command = [sys.executable, "-m", "training", "control", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=110, check=False)
    assert done.returncode == EXIT_CONFIG


def test_store_that_is_stopped_is_replaced_and_its_clients_set_free() -> None:
    """GIVEN a stopped store, in which a client waits for ever THEN another one is in its place soon."""
    port = free_port()
    control = start(RECIPE, "--host", "127.0.0.1", "--port", port, silence_seconds=3.0)
    try:
        assert until(lambda: answers(port), seconds=60)
        before = store_id(port)
        [child] = descendants(control.pid)
        os.kill(child, signal.SIGSTOP)
        assert until(lambda: answers(port) and store_id(port) != before, seconds=90)
        control.terminate()
        _, errors = control.communicate(timeout=60)
    finally:
        control.kill()
    assert control.returncode == EXIT_STOPPED
    assert "control store did not answer for 3 s: killing it" in errors
    assert not listens(("127.0.0.1", port))


def test_store_listens_where_it_is_told_to_only() -> None:
    """GIVEN an address of the loopback network THEN none of the machine's others reaches the store."""
    port = free_port()
    control = start(RECIPE, "--host", "127.0.0.2", "--port", port)
    try:
        assert until(lambda: answers(port, host="127.0.0.2"), seconds=60)
        assert not listens(("127.0.0.1", port))
    finally:
        control.kill()
        control.communicate(timeout=60)


def test_store_dies_with_the_control() -> None:
    port = free_port()
    control = start(RECIPE, "--host", "127.0.0.1", "--port", port)
    try:
        assert until(lambda: listens(("127.0.0.1", port)), seconds=60)
    finally:
        control.kill()
        control.communicate(timeout=60)
    assert until(lambda: not listens(("127.0.0.1", port)))


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=f"--port={port}: must be from 1 to 65535"):
        control.main([str(RECIPE), "--port", port])


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host={host!r}: is no address of this machine"):
        control.main([str(RECIPE), "--host", host])
