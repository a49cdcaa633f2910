"""What becomes of a command whose pipe breaks: the reader of its output is gone, or a socket of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from training.command_line import run_command
sys.path.insert(0, sys.argv[1])
sys.exit(run_command("try", {"it": ("command", "")}, ["it"]))
"""
WRITES_FOR_EVER = """
def main(arguments):
    while True:
        print("line", flush=True)
"""
LOSES_A_SOCKET = """
import socket

def main(arguments):
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.send(b"beat")
    return 0
"""


def start(command: str, directory: Path) -> subprocess.Popen[str]:
    (directory / "command.py").write_text(command)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_reader_that_has_seen_enough_ends_a_command_as_it_ends_others(tmp_path: Path) -> None:
    with start(WRITES_FOR_EVER, tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_lost_socket_is_no_success(tmp_path: Path) -> None:
    with start(LOSES_A_SOCKET, tmp_path) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "BrokenPipeError" in errors
