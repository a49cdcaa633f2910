from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, subprocess, sys, time
from training.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
orphan = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\ntime.sleep(600)"
subprocess.run([sys.executable, "-c", orphan], check=True)
kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
below = descendants(os.getpid(), keep=[kept.pid])
end_descendants(keep=[kept.pid])
left = descendants(os.getpid(), keep=[kept.pid])
alive = kept.poll() is None
end_descendants()
print(len(below), len(left), alive, len(descendants(os.getpid())))
"""


BEHIND_A_KEPT_ZOMBIE = """
import os, subprocess, sys
from training.processes import descendants, reap_orphans
children = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(3)]
for child in children:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
kept = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
reap_orphans(keep=[kept])
print(descendants(os.getpid()) == [kept])
"""


def run(script: str) -> list[str]:
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_orphans_are_adopted_ended_and_reaped() -> None:
    assert run(SCRIPT) == ["1", "0", "True", "0"]


def test_zombies_behind_one_that_is_kept_are_reaped() -> None:
    assert run(BEHIND_A_KEPT_ZOMBIE) == ["True"]
