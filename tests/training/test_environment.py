from __future__ import annotations

from pathlib import Path

import pytest

from training import environment
from training.errors import ConfigError


def test_control_endpoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CONTROL, "run-control.ns.svc:29500")
    assert environment.control_endpoint() == ("run-control.ns.svc", 29500)


def test_without_the_variable_there_is_no_control_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.CONTROL, raising=False)
    assert environment.control_endpoint() is None


@pytest.mark.parametrize("value", ["host", "host:", ":29500", "host:port", "host:70000"])
def test_bad_endpoint_names_the_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(environment.CONTROL, value)
    with pytest.raises(ConfigError, match=r"HOLDFAST_CONTROL='.*': must be host:port; set it to"):
        environment.control_endpoint()


def test_bad_number_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NODE_INDEX, "first")
    with pytest.raises(ConfigError, match="HOLDFAST_NODE_INDEX='first': must be a whole number"):
        environment.integer(environment.NODE_INDEX, 0)


@pytest.mark.parametrize(("code", "left"), [(64, "64"), (65, "65"), (1, None), (0, None)])
def test_only_final_codes_reach_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, left: str | None
) -> None:
    path = tmp_path / "exit"
    monkeypatch.setenv(environment.EXIT_FILE, str(path))
    environment.leave_exit_code(code)
    assert (path.read_text() if path.exists() else None) == left


def test_sockets_lie_under_a_short_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert environment.short_temporary_directory() == "/tmp"
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert environment.short_temporary_directory() == "/var/tmp"
