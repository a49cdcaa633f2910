from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from stacks.manifests import ClusterValues, manifest_groups
from stacks.render import main, read_config
from tests.stacks.conftest import ROOT

OUTPUTS = ROOT / "k8s" / "sample_outputs.json"


@pytest.fixture
def written(tmp_path: Path) -> list[Path]:
    assert main([str(OUTPUTS), "--into", str(tmp_path)]) == 0
    return sorted(tmp_path.iterdir())


def test_files_hold_what_a_deploy_would_apply(written: list[Path]) -> None:
    # GIVEN
    values = ClusterValues(
        region="us-west-2",
        url_suffix="amazonaws.com",
        file_system_id="fs-0123456789abcdef0",
        file_system_dns_name="fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
        file_system_mount_name="abcd1234",
    )
    expected = manifest_groups(read_config(ROOT / "cdk.json"), values)

    # WHEN
    read = [list(yaml.safe_load_all(path.read_text())) for path in written]

    # THEN
    assert read == list(expected.values())


def test_files_are_valid_and_free_of_placeholders(written: list[Path]) -> None:
    for path in written:
        assert "${" not in path.read_text()
        for manifest in yaml.safe_load_all(path.read_text()):
            kubernetes_validate.validate(manifest, "1.36", strict=True)


def test_missing_outputs_are_an_error_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # WHEN
    code = main([str(tmp_path / "none.json"), "--into", str(tmp_path)])

    # THEN
    assert code == 64
    assert "cannot be read" in capsys.readouterr().err


def test_wrong_settings_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # GIVEN
    (tmp_path / "cdk.json").write_text("{")

    # WHEN
    code = main([str(OUTPUTS), "--cdk-json", str(tmp_path / "cdk.json"), "--into", str(tmp_path)])

    # THEN
    assert code == 64
    assert "has no readable context" in capsys.readouterr().err
