"""The owner adopts orphans, so each test runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, signal, subprocess, sys, time
from training import fork_server
from training.fork_server import ForkServer, ForkServerLost
def main(arguments):
    exec(arguments[0])
    return 0
def descend(server, code, **environ):
    return server.spawn([code], {**os.environ, **environ})
"""


def run(script: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PRELUDE + script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wait_status_is_that_of_a_child() -> None:
    script = """
server = ForkServer.fork(main)
codes = [descend(server, "pass").wait(10), descend(server, "sys.exit(7)").wait(10)]
codes.append(descend(server, "raise ValueError('seen on stderr')").wait(10))
codes.append(descend(server, "os.kill(os.getpid(), signal.SIGKILL)").wait(10))
print(codes)
"""
    assert run(script).strip() == "[0, 7, 1, -9]"


def test_process_leads_a_session_of_its_own_before_its_pid_is_known() -> None:
    script = """
server = ForkServer.fork(main)
child = descend(server, "time.sleep(600)")
print(os.getpgid(child.pid) == child.pid, child.poll())
os.killpg(child.pid, signal.SIGTERM)
print(child.wait(10))
"""
    assert run(script).split() == ["True", "None", "-15"]


def test_environment_is_replaced() -> None:
    script = """
os.environ["OLD"] = "1"
server = ForkServer.fork(main)
server.spawn(["print(sorted(k for k in os.environ if k in ('OLD', 'NEW')))"], {"NEW": "1"}).wait(10)
"""
    assert run(script).strip() == "['NEW']"


def test_exit_handlers_run_and_output_is_flushed() -> None:
    script = """
server = ForkServer.fork(main)
code = "import atexit; atexit.register(print, 'handler'); sys.stdout.write('body ')"
descend(server, code).wait(10)
"""
    assert run(script).strip() == "body handler"


def test_wait_is_bounded() -> None:
    script = """
server = ForkServer.fork(main)
child = descend(server, "time.sleep(600)")
try:
    child.wait(0.1)
except subprocess.TimeoutExpired:
    print("expired")
child.kill()
child.wait(10)
"""
    assert run(script).strip() == "expired"


def test_lost_server_is_said() -> None:
    script = """
server = ForkServer.fork(main)
os.kill(server.pid, signal.SIGKILL)
try:
    descend(server, "pass")
except ForkServerLost:
    print("lost")
"""
    assert run(script).strip() == "lost"


def test_server_ends_with_its_owner() -> None:
    script = """
server = ForkServer.fork(main)
print("owner gone", flush=True)
os._exit(0)
"""
    # the server holds the pipe that run() reads to its end, so this returns only once it is gone
    assert run(script).strip() == "owner gone"


SAY_LOSS = """
try:
    descend(server, "pass")
except ForkServerLost as lost:
    print(lost)
"""


@pytest.mark.parametrize("failing", ["server", "middle"])
def test_failed_fork_is_said(failing: str) -> None:
    script = f"""
owner, fork = os.getpid(), os.fork
def fail():
    place = "server" if os.getppid() == owner else "middle"
    if os.getpid() != owner and place == "{failing}":
        raise BlockingIOError(11, "no more processes")
    return fork()
os.fork = fail
server = ForkServer.fork(main)
"""
    assert run(script + SAY_LOSS).strip() == "fork: no more processes"


def test_death_of_the_process_between_is_said() -> None:
    script = """
fork_server._be_middle = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
server = ForkServer.fork(main)
"""
    assert run(script + SAY_LOSS).strip() == "the process between ended with -9"


def test_process_that_dies_before_it_answers_is_waited_for_only_so_long() -> None:
    script = """
fork_server.REPLY_SECONDS = 0.5
fork_server._become = lambda *arguments, parent: os.kill(os.getpid(), signal.SIGKILL)
server = ForkServer.fork(main)
"""
    assert run(script + SAY_LOSS).strip() == "timed out"


def test_server_that_never_gets_ready_is_waited_for_only_so_long() -> None:
    script = (
        """
fork_server.IMPORT_SECONDS = 0.5
command = [sys.executable, "-c", "import time; time.sleep(600)"]
server = ForkServer.start(command, environ=os.environ)
"""
        + f"{SAY_LOSS}\nos.kill(server.pid, signal.SIGKILL)\nserver._process.wait()"
    )
    assert run(script).strip() == "timed out"


def test_torn_answer_is_a_loss() -> None:
    script = """
def tear(connection, *rest):
    connection.sendall((5).to_bytes(4, "big") + b"{torn")
    os._exit(0)
fork_server._fork_off = tear
server = ForkServer.fork(main)
"""
    assert "Expecting property name" in run(script + SAY_LOSS)


def test_dead_server_is_noticed_and_reaped() -> None:
    script = """
server = ForkServer.fork(main)
descend(server, "pass").wait(10)
print(server.has_ended())
os.kill(server.pid, signal.SIGKILL)
os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
print(server.has_ended(), os.path.exists(f"/proc/{server.pid}"))
"""
    assert run(script).split() == ["False", "True", "False"]
