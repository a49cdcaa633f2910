"""`training checkpoint` on a run's directory: what it shows, what it removes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.kill_points import in_child
from tests.training.test_commit import commit_step, flip_bit, visible_steps, write_partial
from training import checkpoint_command, lineage
from training.errors import EXIT_DONE, EXIT_RETRY, ConfigError, RunError
from training.lineage import Ancestry, Lineage
from training.run_directory import RunDirectory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 to 40 and one that was left half-written."""
    (tmp_path / "run.json").write_text(json.dumps({"run": "0123456789abcdef"}))
    lineage.write_ancestry(tmp_path, Ancestry(lineages=(Lineage(id=10),)))
    for step in (10, 20, 30, 40):
        commit_step(tmp_path / "checkpoints", step, lineage="000000000000000a", keep=9)
    write_partial(tmp_path / "checkpoints", 50, "000000000000000a")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = checkpoint_command.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_prune_keeps_the_newest_and_removes_what_is_half_written(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = run(capsys, "prune", str(run_dir), "--keep", "2")
    assert code == EXIT_DONE
    removed = {Path(row["removed"]).name for row in rows}
    assert removed == {"step-00000010", "step-00000020", ".step-00000050.000000000000000a"}
    assert visible_steps(run_dir / "checkpoints") == [40, 30]


def test_prune_counts_only_what_is_whole(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = run_dir / "checkpoints" / "step-00000040"
    flip_bit(damaged / "__0_0.distcp")
    code, rows = run(capsys, "prune", str(run_dir), "--keep", "2")
    assert code == EXIT_DONE
    assert [row["damaged"] for row in rows if "damaged" in row] == [str(damaged)]
    assert visible_steps(run_dir / "checkpoints") == [40, 30, 20]


def test_prune_keeps_what_a_restart_would_use(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN a run that went back to step 20 THEN the newer checkpoints go, not the live ones."""
    lineage.write_ancestry(run_dir, Ancestry(lineages=(Lineage(id=10), Lineage(id=11, parent=10, step=20))))
    run(capsys, "prune", str(run_dir), "--keep", "2")
    assert visible_steps(run_dir / "checkpoints") == [20, 10]


def test_prune_removes_nothing_where_nothing_is_whole(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lineage.write_ancestry(run_dir, Ancestry(lineages=(Lineage(id=10), Lineage(id=11, parent=10, step=20))))
    for step in (10, 20):
        flip_bit(run_dir / "checkpoints" / f"step-{step:08d}" / "__0_0.distcp")
    code, _ = run(capsys, "prune", str(run_dir), "--keep", "2")
    assert code == EXIT_RETRY
    assert visible_steps(run_dir / "checkpoints") == [40, 30, 20, 10]


def hold(run_dir: Path) -> int:
    """Prune while another process, which the parent is here, trains."""
    with pytest.raises(RunError, match="is in use by pid"):
        checkpoint_command.main(["prune", str(run_dir)])
    return 0


def test_prune_is_refused_while_the_run_goes_on(run_dir: Path) -> None:
    RunDirectory(path=run_dir).lock()
    assert in_child(lambda: hold(run_dir)) == 0
    assert visible_steps(run_dir / "checkpoints") == [40, 30, 20, 10]


def test_one_checkpoint_alone_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--keep=1: must be at least 2"):
        checkpoint_command.main(["prune", str(run_dir), "--keep", "1"])


def test_verify_names_the_damaged_one_and_ends_non_zero(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "verify", str(run_dir))[0] == EXIT_DONE
    flip_bit(run_dir / "checkpoints" / "step-00000030" / "__0_0.distcp")
    code, rows = run(capsys, "verify", str(run_dir))
    assert code == EXIT_RETRY
    assert {row["step"]: row["verdict"] for row in rows} == {
        40: "whole",
        30: "DAMAGED",
        20: "whole",
        10: "whole",
    }


def test_explain_says_which_one_a_restart_takes_and_why_no_newer(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a run that has left its lineage before step 40
    ancestry = Ancestry(lineages=(Lineage(id=10), Lineage(id=11, parent=10, step=30)))
    lineage.write_ancestry(run_dir, ancestry)
    _, rows = run(capsys, "explain", str(run_dir))
    verdicts = {row["step"]: row["verdict"] for row in rows}
    assert verdicts[30] == "RESTORED by a restart, if its files verify"
    assert verdicts[40] == "refused"


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run; give the directory of a run"):
        checkpoint_command.main(["ls", str(tmp_path)])


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
@pytest.mark.parametrize("action", ["ls", "explain"])
def test_a_damaged_record_of_the_run_is_named(run_dir: Path, action: str, text: str) -> None:
    (run_dir / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json': is damaged"):
        checkpoint_command.main([action, str(run_dir)])
