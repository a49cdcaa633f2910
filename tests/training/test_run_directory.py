from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks import RankFailed, Ranks, run_ranks
from tests.tiny import replaced, tiny_recipe
from training.config import JobConfig
from training.errors import ConfigError
from training.run_directory import RunDirectory, make_run_directory

IDENTITY = {"tokens": "100"}


def claim(path: Path, config: JobConfig) -> None:
    directory = RunDirectory(path=path)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.lock(wait_seconds=0.5)
    directory.claim(config, data_identity=IDENTITY, owner=True)


def claim_and_stay(path: Path, config: JobConfig) -> None:
    claim(path, config)
    (path / "claimed").write_text(str(os.getpid()))
    while True:
        pass


def test_settings_that_may_not_change_are_named_together(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)
    claim(tmp_path / "run", config)
    changed = replaced(replaced(config, "training", seed=7), "data", sequence_length_tokens=16)
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path / "run", changed)
    assert "training.seed=7: may not change when a run resumes" in str(caught.value)
    assert "data.sequence_length_tokens=16" in str(caught.value)


def test_other_data_are_refused(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)
    claim(tmp_path / "run", config)
    with pytest.raises(ConfigError, match=r"data\.path"):
        RunDirectory(path=tmp_path / "run").claim(config, data_identity={"tokens": "99"}, owner=True)


def test_what_may_change_may_change(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)
    claim(tmp_path / "run", config)
    claim(tmp_path / "run", replaced(config, "job", nodes=2))


def test_two_runs_cannot_share_a_directory_and_death_frees_it(tmp_path: Path) -> None:
    # GIVEN a live run
    config, path = tiny_recipe(tmp_path), tmp_path / "run"
    holder = Ranks(1, claim_and_stay, path, config)
    while not (path / "claimed").exists():
        pass
    # WHEN another one claims its directory THEN it is refused, with the holder's name
    with pytest.raises(RankFailed, match=f"is in use by pid {(path / 'claimed').read_text()}"):
        run_ranks(1, claim, path, config)
    # and after a SIGKILL of the first it is free
    holder.kill()
    run_ranks(1, claim, path, config)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_run_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir='.*': is no directory; give another directory"):
        make_run_directory(tmp_path / name)
