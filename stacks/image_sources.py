"""What goes into the container images, and the tag that names it."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "training",
    "k8s",
    "constructs/eks_training/__init__.py",
    "constructs/eks_training/instance_types.py",
    "requirements-infra.txt",
    "requirements-training.txt",
    "pyproject.toml",
)
"""Files and folders of the repository that the images are built from."""

_TAG_LENGTH = 16
# what runs: neither rendered examples nor leftovers of editors and interpreters
_SUFFIXES = frozenset({".py", ".toml", ".txt", ".json", ""})


def source_files() -> Iterator[Path]:
    """Yield the source files, relative to the root, in a fixed order."""
    for name in SOURCES:
        path = ROOT / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            relative = file.relative_to(ROOT)
            if file.is_file() and file.suffix in _SUFFIXES and not _is_hidden(relative):
                yield relative


def image_tag() -> str:
    """Return the tag of both images: a digest of names and contents, the same on every machine."""
    digest = hashlib.sha256()
    for file in source_files():
        for part in (file.as_posix().encode(), (ROOT / file).read_bytes()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()[:_TAG_LENGTH]


def copy_sources(folder: Path) -> None:
    """Copy the source files into `folder`: the build context."""
    for file in source_files():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)


def _is_hidden(file: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in file.parts)


if __name__ == "__main__":
    sys.stdout.write(f"{image_tag()}\n")
