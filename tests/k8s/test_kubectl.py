from __future__ import annotations

from pathlib import Path

import pytest

from k8s.kubectl import Kubectl
from training.errors import RunError

KUBECTL = Kubectl(namespace="training")


def program(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("KUBECTL", str(path))


@pytest.mark.timeout(30)
def test_stream_takes_any_amount_of_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN more on standard error than a pipe holds, before the last line of standard output
    text = "echo first; head -c 200000 /dev/zero | tr '\\0' w >&2; echo last"
    program(tmp_path / "kubectl", text, monkeypatch)
    # THEN
    assert list(KUBECTL.stream("logs")) == ["first\n", "last\n"]


def test_an_error_is_told_without_kubectls_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = 'E1129 19:35:43.722281   12003 memcache.go:265] "Unhandled Error" err="connection refused"'
    text = f"echo '{log}' >&2; echo 'The connection to the server a:1 was refused' >&2; exit 1"
    program(tmp_path / "kubectl", text, monkeypatch)
    with pytest.raises(RunError) as refused:
        KUBECTL.run("get", "job")
    assert str(refused.value).startswith(
        "kubectl get: The connection to the server a:1 was refused; run `aws"
    )


def test_stream_tells_why_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "kubectl", "echo line; echo 'error: no such container' >&2; exit 1", monkeypatch)
    lines = KUBECTL.stream("logs")
    assert next(lines) == "line\n"
    with pytest.raises(RunError, match="kubectl logs: no such container"):
        next(lines)


def test_a_stream_that_is_left_ends_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "kubectl", "echo $$; exec sleep 600", monkeypatch)
    lines = KUBECTL.stream("logs")
    pid = int(next(lines))
    assert Path(f"/proc/{pid}").exists()
    lines.close()  # type: ignore[attr-defined]
    assert not Path(f"/proc/{pid}").exists()
