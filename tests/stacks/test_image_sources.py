from __future__ import annotations

import re
from pathlib import Path

import pytest

from stacks import image_sources

FILES = {
    "training/__init__.py": "",
    "training/trainer.py": "steps = 1",
    "training/Dockerfile": "FROM scratch",
    "k8s/__init__.py": "",
    "requirements-infra.txt": "boto3==1.44.8",
    "requirements-training.txt": "torch==2.13.0",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(image_sources, "ROOT", tmp_path)
    return tmp_path


def test_context_holds_sources_only(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # GIVEN
    for name in ("training/__pycache__/trainer.pyc", "training/.trainer.py.swp", "k8s/notes.log"):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("leftover")
    folder = tmp_path_factory.mktemp("context")

    # WHEN
    image_sources.copy_sources(folder)

    # THEN
    copied = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert copied == set(FILES)


def test_leftovers_do_not_change_the_tag(root: Path) -> None:
    # GIVEN
    before = image_sources.image_tag()

    # WHEN
    (root / "training" / "__pycache__").mkdir()
    (root / "training" / "__pycache__" / "trainer.pyc").write_text("leftover")

    # THEN
    assert image_sources.image_tag() == before


@pytest.mark.parametrize(("name", "text"), [("training/trainer.py", "steps = 2"), ("training/new.py", "")])
def test_another_source_is_another_tag(root: Path, name: str, text: str) -> None:
    # GIVEN
    before = image_sources.image_tag()

    # WHEN
    (root / name).write_text(text)

    # THEN
    assert image_sources.image_tag() != before


def test_content_cannot_move_between_files_unseen(root: Path) -> None:
    # GIVEN
    (root / "k8s" / "a.py").write_text("xy")
    (root / "k8s" / "b.py").write_text("z")
    before = image_sources.image_tag()

    # WHEN
    (root / "k8s" / "a.py").write_text("x")
    (root / "k8s" / "b.py").write_text("yz")

    # THEN
    assert image_sources.image_tag() != before


def test_tag_is_one_that_registries_take() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", image_sources.image_tag())
