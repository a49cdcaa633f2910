"""The supervisor over real processes that stand in for launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_recipe
from training import environment, nvrx_version
from training.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, EXIT_STOPPED, ConfigError
from training.events import read_events
from training.launch import RestartBudget, launch
from training.processes import descendants

ROOT = Path(__file__).parents[2]

# argv: run directory, options; the launcher's program comes on standard input
SUPERVISOR = """
import json, os, subprocess, sys
from pathlib import Path
from training import launch
from training.processes import adopt_orphans
run_dir, options = Path(sys.argv[1]), json.loads(sys.argv[2])
launch.RESTART_PAUSE_SECONDS = 0.0
launch.LATE_LAUNCHER_SECONDS = options.pop("late_seconds", 30.0)
launch.IDLE_GRACE_SECONDS = options.pop("idle_grace_seconds", 30.0)
launch.RESTART_BUDGET = options.pop("budget", 20.0)
class Launchers:
    pids = []
    def check(self): ...
    def start(self):
        command = [sys.executable, "-c", options["program"], str(run_dir)]
        return subprocess.Popen(command, start_new_session=True)
adopt_orphans()
supervisor = launch.Supervisor(
    launchers=Launchers(),
    run_dir=run_dir,
    exit_file=run_dir / "exit",
    restarts=options.get("restarts", True),
    grace_seconds=options.get("grace_seconds", 10.0),
    control=launch.ControlChild(command=options.get("control"), endpoint=None),
)
sys.exit(supervisor.run())
"""
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
run_dir = Path(sys.argv[1])
starts = run_dir / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
start = len(starts.read_text())
"""


class Supervised:
    """A supervisor whose launchers run `program`, in a directory of its own."""

    def __init__(self, run_dir: Path, program: str, **options: Any) -> None:
        self.run_dir = run_dir
        options["program"] = LAUNCHER + program
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SUPERVISOR, str(run_dir), json.dumps(options)]
        self.process = subprocess.Popen(command, env=environ)

    def exit_code(self) -> int:
        return self.process.wait(60)

    def starts(self) -> int:
        path = self.run_dir / "starts"
        return len(path.read_text()) if path.exists() else 0

    def until(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.run_dir / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)


def test_dead_launcher_is_replaced_until_the_run_is_done(tmp_path: Path) -> None:
    program = """
if start < 3:
    os.kill(os.getpid(), signal.SIGKILL)
(run_dir / "DONE").touch()
"""
    supervised = Supervised(tmp_path, program)
    assert supervised.exit_code() == EXIT_DONE
    assert supervised.starts() == 3
    ends = [event["signal"] for event in read_events(tmp_path) if event["event"] == "launcher_exit"]
    assert ends == [signal.SIGKILL, signal.SIGKILL, None]


def test_launcher_that_exits_0_before_the_run_is_done_is_replaced(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "if start == 2: (run_dir / 'DONE').touch()")
    assert supervised.exit_code() == EXIT_DONE
    assert supervised.starts() == 2


def test_finished_run_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "DONE").touch()
    supervised = Supervised(tmp_path, "")
    assert supervised.exit_code() == EXIT_DONE
    assert supervised.starts() == 0


def test_gives_up_when_the_budget_is_gone(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "sys.exit(1)", budget=2.0)
    assert supervised.exit_code() == EXIT_RETRY
    assert supervised.starts() == 3


def test_launchers_that_saw_the_control_store_return_cost_no_budget(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "sys.exit(75 if start < 5 else 1)", budget=0.0)
    assert supervised.exit_code() == EXIT_RETRY
    assert supervised.starts() == 5


def test_no_replacement_without_the_in_job_layer(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "sys.exit(1)", restarts=False)
    assert supervised.exit_code() == EXIT_RETRY
    assert supervised.starts() == 1


def test_final_code_of_a_rank_ends_the_node_with_it(tmp_path: Path) -> None:
    program = """
(run_dir / "exit").write_text("64")
time.sleep(600)
"""
    supervised = Supervised(tmp_path, program)
    assert supervised.exit_code() == EXIT_CONFIG
    assert supervised.starts() == 1


def test_a_run_that_has_failed_does_not_hold_its_node_for_the_grace_of_a_save(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run_dir / "exit").write_text("64")
time.sleep(600)
"""
    supervised = Supervised(tmp_path, program, grace_seconds=600.0, idle_grace_seconds=0.2)
    assert supervised.exit_code() == EXIT_CONFIG


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_is_143_even_if_the_launcher_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    program = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(run_dir / "up").touch()
time.sleep(600)
"""
    supervised = Supervised(tmp_path, program)
    supervised.until("up")
    supervised.process.send_signal(number)
    assert supervised.exit_code() == EXIT_STOPPED
    assert supervised.starts() == 1


def test_notice_stops_the_node_as_sigterm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.STOP_FILE, str(tmp_path / "notice"))
    program = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(run_dir / "notice").touch()
time.sleep(600)
"""
    supervised = Supervised(tmp_path, program)
    assert supervised.exit_code() == EXIT_STOPPED
    assert supervised.starts() == 1


def test_launcher_that_ignores_the_signal_is_killed_after_the_grace(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run_dir / "up").touch()
time.sleep(600)
"""
    supervised = Supervised(tmp_path, program, grace_seconds=0.2)
    supervised.until("up")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.exit_code() == EXIT_STOPPED


def test_launcher_that_outlives_the_run_is_stopped(tmp_path: Path) -> None:
    program = """
(run_dir / "DONE").touch()
time.sleep(600)
"""
    supervised = Supervised(tmp_path, program, late_seconds=0.1)
    assert supervised.exit_code() == EXIT_DONE


def test_what_a_dead_launcher_leaves_behind_is_swept(tmp_path: Path) -> None:
    program = """
if os.fork() == 0:
    os.setsid()
    (run_dir / "orphan").write_text(str(os.getpid()))
    time.sleep(600)
while not (run_dir / "orphan").exists():
    time.sleep(0.01)
if start == 2:
    (run_dir / "DONE").touch()
os._exit(1)
"""
    before = set(descendants(os.getpid()))
    supervised = Supervised(tmp_path, program)
    assert supervised.exit_code() == EXIT_DONE
    assert set(descendants(os.getpid())) <= before
    assert not Path(f"/proc/{(tmp_path / 'orphan').read_text()}").exists()


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_RETRY])
def test_control_store_that_ends_for_good_ends_the_node_with_its_code(tmp_path: Path, code: int) -> None:
    """GIVEN a control store that ends at once with a final code THEN it is started only once."""
    source = f"open({str(tmp_path / 'controls')!r}, 'a').write('x'); raise SystemExit({code})"
    supervised = Supervised(tmp_path, "time.sleep(600)", control=[sys.executable, "-c", source])
    assert supervised.exit_code() == code
    assert (tmp_path / "controls").read_text() == "x"


def test_control_store_that_dies_is_started_again(tmp_path: Path) -> None:
    source = f"""
import os, time
open({str(tmp_path / "controls")!r}, "a").write("x")
if os.path.getsize({str(tmp_path / "controls")!r}) < 3:
    os.kill(os.getpid(), 9)
open({str(tmp_path / "DONE")!r}, "w")
supervisor = os.getppid()
while os.getppid() == supervisor:  # `launch` ends its store; the bare supervisor of this test does not
    time.sleep(0.05)
"""
    program = """
while not (run_dir / "DONE").exists():
    time.sleep(0.01)
"""
    supervised = Supervised(tmp_path, program, control=[sys.executable, "-c", source])
    assert supervised.exit_code() == EXIT_DONE
    assert (tmp_path / "controls").read_text() == "xxx"


def test_dead_fork_server_is_reaped_and_replaced(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from training.launch import LauncherSource
LauncherSource._start_server = lambda self: ForkServer.fork(lambda arguments: 7)
from training.fork_server import ForkServer
launchers = LauncherSource(Path("unused"), arguments=[], environ=dict(os.environ))
launchers.start().wait(10)
[server] = launchers.pids
launchers.check()
assert launchers.pids == [server]
os.kill(server, signal.SIGKILL)
os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
launchers.check()
print(launchers.pids, os.path.exists(f"/proc/{server}"), launchers.start().wait(10))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["[]", "False", "7"]


def test_unknown_nvrx_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrx_version, "KNOWN_VERSIONS", ("0.0.1",))
    with pytest.raises(ConfigError, match=r"nvidia-resiliency-ext='.*': must be 0\.0\.1"):
        launch(tiny_recipe(tmp_path), recipe=tmp_path / "recipe.toml", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_budget_comes_back_with_time() -> None:
    budget = RestartBudget(capacity=2, refill_seconds=10, now=0.0)
    taken = [budget.take(now) for now in (0.0, 1.0, 2.0, 9.0, 10.5, 11.0, 1000.0, 1000.0, 1000.0)]
    assert taken == [True, True, False, False, True, False, True, True, False]
