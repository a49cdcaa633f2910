from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from training import nvrx_version
from training.errors import ConfigError


def test_version_in_use_is_known() -> None:
    nvrx_version.check_version()


@pytest.mark.parametrize("version", nvrx_version.KNOWN_VERSIONS)
def test_version_that_was_read_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(nvrx_version, "version", lambda name: version)
    nvrx_version.check_version()


def test_pinned_version_is_the_first() -> None:
    pins = (Path(__file__).parents[2] / "requirements-training.txt").read_text().splitlines()
    assert f"nvidia-resiliency-ext=={nvrx_version.KNOWN_VERSIONS[0]}" in pins


def test_unread_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_version, "version", lambda name: "0.8.0")
    with pytest.raises(ConfigError, match=r"nvidia-resiliency-ext='0.8.0': must be 0.6.0 or 0.7.0"):
        nvrx_version.check_version()


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(nvrx_version, "version", missing)
    with pytest.raises(ConfigError, match=r"nvidia-resiliency-ext: is not installed; pip install"):
        nvrx_version.check_version()
