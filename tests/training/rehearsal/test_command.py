"""Options of `training rehearse` that are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from training import rehearse
from training.errors import ConfigError, RunError

RECIPE = Path(__file__).parents[3] / "training" / "recipes" / "rehearsal_cpu.toml"


@pytest.mark.parametrize("option", ["--run-dir", "--undisturbed"])
@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_is_no_directory(tmp_path: Path, option: str, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"{option}='.*': .*file is no directory that can be written"):
        rehearse.main([str(RECIPE), "--run-dir", str(tmp_path / "run"), option, str(file / below)])
    assert not (tmp_path / "run").exists()


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not empty; give an empty --run-dir"):
        rehearse.main([str(RECIPE), "--run-dir", str(tmp_path)])


def test_the_undisturbed_run_of_another_recipe_is_refused_before_the_disturbed_one(tmp_path: Path) -> None:
    (tmp_path / "reference.json").write_text('{"shape": "another"}')
    with pytest.raises(RunError, match="is the run of another recipe"):
        rehearse.main([str(RECIPE), "--run-dir", str(tmp_path / "run"), "--undisturbed", str(tmp_path)])
    assert not (tmp_path / "run").exists()
