from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from training import nvrx_version
from training.errors import ConfigError


def test_version_in_use_is_known() -> None:
    nvrx_version.check_version()


def test_unread_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_version, "version", lambda name: "0.8.0")
    with pytest.raises(ConfigError, match=r"nvidia-resiliency-ext='0.8.0': must be 0.6.0"):
        nvrx_version.check_version()


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(nvrx_version, "version", missing)
    with pytest.raises(ConfigError, match=r"nvidia-resiliency-ext: is not installed; pip install"):
        nvrx_version.check_version()
