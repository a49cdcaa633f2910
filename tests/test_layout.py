"""The folder `constructs/` and the PyPI package `constructs` must not get into each other's way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import constructs
import pytest

ROOT = Path(__file__).parents[1]


def imported(folder: str) -> Iterator[tuple[Path, str]]:
    """Yield every file of a folder with each top-level package that it imports."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path, node.module.partition(".")[0]


def test_constructs_is_the_published_package() -> None:
    assert "site-packages" in Path(str(constructs.__file__)).parts
    assert constructs.Construct.__module__ == "constructs"


def test_our_folder_is_not_a_package() -> None:
    assert not (ROOT / "constructs" / "__init__.py").exists()
    folders = [path.name for path in (ROOT / "constructs").iterdir() if path.is_dir()]
    # an editable install leaves its metadata beside the package
    assert [name for name in folders if not name.endswith(".egg-info")] == ["eks_training"]


def test_package_marker_is_empty() -> None:
    # instance_types is imported where aws_cdk is not installed
    assert (ROOT / "constructs" / "eks_training" / "__init__.py").read_text() == ""


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("constructs/eks_training", {"stacks", "k8s", "training"}),
        ("training", {"aws_cdk", "stacks", "k8s", "kubernetes"}),
        ("k8s", {"aws_cdk", "torch"}),
    ],
)
def test_layers_import_downwards_only(folder: str, forbidden: set[str]) -> None:
    assert [(path.name, name) for path, name in imported(folder) if name in forbidden] == []
