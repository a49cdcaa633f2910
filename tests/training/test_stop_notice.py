from __future__ import annotations

from pathlib import Path

import pytest

from training import environment
from training.errors import ConfigError
from training.stop_notice import StopNotice


def test_nobody_is_told_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.STOP_FILE, raising=False)
    monkeypatch.delenv(environment.STOP_AT, raising=False)
    assert not StopNotice.from_environment().is_due(1e12)


def test_file_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.STOP_FILE, str(tmp_path / "notice"))
    notice = StopNotice.from_environment()
    assert not notice.is_due(0.0)
    (tmp_path / "notice").touch()
    assert notice.is_due(0.0)


def test_block_that_ends_is_left_one_grace_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.GRACE_SECONDS, "120")
    monkeypatch.setenv(environment.STOP_AT, "10000")
    notice = StopNotice.from_environment()
    assert not notice.is_due(9879.0)
    assert notice.is_due(9880.0)


def test_wrong_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.STOP_AT, "tomorrow")
    with pytest.raises(ConfigError, match="HOLDFAST_STOP_AT='tomorrow': must be a whole number"):
        StopNotice.from_environment()
