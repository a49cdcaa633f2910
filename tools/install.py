"""Install the pinned requirements into this interpreter's environment; standard library only.

    python tools/install.py requirements.txt requirements-dev.txt

Two things that `pip install -r` alone does not do:
  * torch goes first, so that no other package picks another build of it;
  * NVRx wheels from 0.5 on are tagged manylinux_2_39 although they need glibc 2.32 only (NVIDIA-NeMo/RL
    #1565). On older systems pip offers 0.4.1 without a word, so the wheel is downloaded for that
    platform, retagged, and offered to pip as a local file.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

NEEDED_GLIBC = (2, 32)
TAGGED_GLIBC = (2, 39)
NVRX = "nvidia-resiliency-ext"


def main(files: list[str]) -> None:
    pins = read_pins([Path(file) for file in files])
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    find_links: list[str] = []
    if "torch" in pins:
        say("torch")
        run([*pip, f"torch=={pins['torch']}"])
    if NVRX in pins:
        say(f"{NVRX} {pins[NVRX]}")
        find_links = ["--find-links", str(nvrx_wheel(pins[NVRX]))] if must_retag() else []
    say("everything else")
    run([*pip, *find_links, *(word for file in files for word in ("-r", file))])
    say("the project itself")
    run([*pip, "--no-deps", "--editable", str(Path(__file__).parents[1])])


def read_pins(files: list[Path]) -> dict[str, str]:
    """Return {name: version} of requirement files and of those that they include."""
    pins: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith("-r "):
                pins |= read_pins([file.parent / line.removeprefix("-r ").strip()])
            elif match := re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+]+)", line):
                pins[match[1]] = match[2]
    return pins


def must_retag() -> bool:
    """Tell whether this machine's glibc is too old for the wheel's tag; stop if it is too old to run it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        sys.exit(
            f"error: platform={sys.platform}-{platform.machine()}: {NVRX} has wheels for Linux x86-64 only; "
            "use requirements-infra.txt here"
        )
    version = tuple(int(part) for part in platform.libc_ver()[1].split(".")[:2])
    if version < NEEDED_GLIBC:
        sys.exit(f"error: glibc={version}: {NVRX} needs {NEEDED_GLIBC}; use a newer Linux")
    return version < TAGGED_GLIBC


def nvrx_wheel(version: str) -> Path:
    """Download the wheel, retag it for any glibc, and return its folder."""
    folder = Path(sys.prefix) / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "install", "wheel"])
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    tagged = f"manylinux_{TAGGED_GLIBC[0]}_{TAGGED_GLIBC[1]}_x86_64"
    wanted = ["--platform", tagged, "--python-version", python, f"{NVRX}=={version}"]
    run([*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *wanted])
    (wheel,) = folder.glob(f"*{tagged}.whl")
    run(
        [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", "linux_x86_64", str(wheel)],
        stdout=subprocess.DEVNULL,
    )
    return folder


def run(command: list[str], **options: int) -> None:
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    result = subprocess.run(command, env=environment, check=False, **options)  # type: ignore[call-overload]
    if result.returncode:
        sys.exit(f"error: {' '.join(command)}: exit code {result.returncode}")


def say(what: str) -> None:
    print(f"installing {what} ...", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
