"""What can be known of the images without building them: their versions are our pins."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "training" / "Dockerfile").read_text()
# renames one file, and is not used afterwards
UNPINNED = {"wheel"}


def pins(file: str) -> dict[str, str]:
    """Return the version that a requirement file pins each package to."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower(): version for name, version in (line.split("==") for line in lines)}


def pip_installs() -> Iterator[tuple[list[str], set[str]]]:
    """Yield the constraint files of every `pip install`, and the packages that it names."""
    for command in re.findall(r"pip install ([^;\n]*)", DOCKERFILE.replace("\\\n", " ")):
        words = re.sub(r'"[^"]*\$\([^)]*\)[^"]*"|"[^"]*"|/\S+', " ", command).split()
        files = [word for option, word in itertools.pairwise(words) if option == "--constraint"]
        packages = {word for word in words if not word.startswith("-")} - set(files) - UNPINNED
        if packages:
            yield files, packages


def test_every_grepped_pin_is_there_once() -> None:
    greps = re.findall(r"grep -E '([^']+)' (\S+)", DOCKERFILE)
    assert len(greps) == 2
    for pattern, file in greps:
        assert len(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)) == 1, pattern


@pytest.mark.parametrize("name", re.findall(r'pins\["([^"]+)"\]', DOCKERFILE))
def test_check_of_the_trainer_image_finds_its_pins(name: str) -> None:
    assert name in pins("requirements-training.txt")


def test_every_package_is_pinned_by_a_constraint_file() -> None:
    installs = list(pip_installs())
    assert len(installs) == 2
    for files, packages in installs:
        assert packages <= set().union(*map(pins, files))


def test_constraint_files_are_in_the_image_and_are_no_more_than_pins() -> None:
    copied = set(re.findall(r"requirements-\S+", " ".join(re.findall(r"^COPY (.+) \.$", DOCKERFILE, re.M))))
    used = {file for files, _ in pip_installs() for file in files}
    assert used <= copied
    # pip takes neither options nor files of files as constraints
    assert all(pins(file) for file in used)
