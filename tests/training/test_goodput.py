"""The ledger over event logs whose true account is known by construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.event_script import EventScript
from training.errors import ConfigError
from training.events import EventLog
from training.goodput import PARTS, PHASES, Goodput, as_table, ledger, main


def check(script: EventScript, *, unexplained: float = 0.0) -> Goodput:
    result = script.account()
    assert list(result.parts) == list(PARTS)
    assert dict(result.parts) == pytest.approx({name: script.truth[name] for name in PARTS}, abs=1e-6)
    assert result.residual_seconds == pytest.approx(unexplained, abs=1e-6)
    assert result.wall_seconds == pytest.approx(script.time, abs=1e-6)
    return result


def started(**changes: Any) -> EventScript:
    script = EventScript(**changes)
    script.spend("start", 1.0)
    script.set_up(early=0.4)
    return script


def test_undisturbed() -> None:
    script = started()
    script.steps(10, 0.5)
    script.span("save", 0.1)
    script.span("evaluate", 0.2)
    script.steps(10, 0.5)
    script.end()
    result = check(script)
    assert (result.steps, result.steps_lost, result.restarts, result.finished) == (20, 0, (), True)
    assert result.goodput == pytest.approx(10.0 / script.time)


def test_in_process_restart_loses_the_steps_after_the_checkpoint() -> None:
    script = started()
    script.steps(4, 1.0)
    script.steps(2, 1.0, part="lost work")
    script.fault("exception", interrupted=0.4)
    script.reenter(detect=0.1, restart=1.5)
    script.set_up(base=4, early=0.2)
    script.steps(6, 1.0)
    script.end()
    result = check(script)
    (restart,) = result.restarts
    assert (restart.layer, restart.fault) == ("in-process", "exception")
    assert (restart.step, restart.restored_step, restart.steps_lost) == (6, 4, 2)
    assert (result.steps, result.steps_lost) == (10, 2)
    spent = {"detect": 0.1, "restart": 1.5, "rendezvous": 0.5, "build": 0.5, "load": 0.5, "first step": 1.0}
    assert restart.phases == pytest.approx({**dict.fromkeys(PHASES, 0.0), **spent})
    assert restart.lost_work_seconds == pytest.approx(0.4)
    assert restart.seconds == pytest.approx(restart.resumed - restart.began) == pytest.approx(4.1)


def test_phases_of_a_respawn_tell_the_end_of_the_old_ranks_and_the_check_of_the_state() -> None:
    script = started()
    script.steps(6, 1.0)
    script.fault("sigkill", interrupted=0.4)
    script.respawn(detect=0.2, stop=0.3, restart=1.0)
    script.set_up(base=6, restored={"source": "durable", "phases": {"load": 0.3, "verify": 0.2}})
    script.steps(4, 1.0)
    script.end()
    (restart,) = check(script).restarts
    spent = {name: restart.phases[name] for name in ("detect", "stop", "restart", "load", "verify")}
    assert spent == pytest.approx({"detect": 0.2, "stop": 0.3, "restart": 1.0, "load": 0.3, "verify": 0.2})
    assert restart.source == "durable"


def test_in_job_restart_without_loss() -> None:
    """GIVEN state of the last step in memory THEN only the interrupted step is lost."""
    script = started()
    script.steps(6, 1.0)
    script.fault("sigkill", interrupted=0.4)
    script.respawn(detect=0.2, restart=1.0)
    script.set_up(base=6)
    script.steps(4, 1.0)
    script.end()
    result = check(script)
    assert [(r.layer, r.fault, r.steps_lost) for r in result.restarts] == [("in-job", "sigkill", 0)]
    assert (result.steps, result.steps_lost) == (10, 0)


def test_steps_before_which_training_goes_back_are_lost_work() -> None:
    script = started()
    script.steps(4, 1.0)
    script.steps(2, 1.0, part="lost work")
    script.span("load", 0.3)
    script.all_ranks("restored", step=4)
    script.step = 4
    script.steps(6, 1.0)
    script.end()
    result = check(script)
    assert (result.steps, result.restarts, result.finished) == (10, (), True)


def test_step_whose_line_was_lost_is_counted() -> None:
    """GIVEN a kill took the line of a finished step away THEN the fault tells that it was finished."""
    script = started()
    script.steps(4, 1.0)
    script.steps(2, 1.0, part="lost work")
    script.fault("sigkill", interrupted=0.4)
    script.events = [event for event in script.events if event.get("step") != 6 or event["event"] != "step"]
    script.respawn(detect=0.2, restart=1.0)
    script.set_up(base=4)
    script.steps(6, 1.0)
    script.end()
    assert check(script).steps_lost == 2


class SamePids(EventScript):
    """A node that was made again, whose processes count from 1 again."""

    def pid(self, rank: int) -> int:
        return 10 + rank


def test_pids_of_a_node_that_was_made_again_are_new_processes() -> None:
    script = SamePids()
    script.spend("start", 1.0)
    script.set_up()
    script.steps(4, 1.0)
    script.fault("node_loss", interrupted=0.1)
    script.respawn(detect=0.1, restart=0.1)
    script.set_up(base=4)
    script.steps(2, 1.0)
    script.end()
    assert [(r.layer, r.steps_lost) for r in check(script).restarts] == [("in-job", 0)]


def test_later_restart_takes_back_what_an_earlier_one_kept() -> None:
    """GIVEN the second restore goes further back than the first THEN work of both generations is lost."""
    script = started()
    script.steps(2, 1.0)
    script.steps(4, 1.0, part="lost work")
    script.fault("exception", interrupted=0.1)
    script.reenter(detect=0.1, restart=0.1)
    script.set_up(base=4)
    script.steps(3, 1.0, part="lost work")
    script.fault("sigkill", interrupted=0.1)
    script.respawn(detect=0.1, restart=0.1)
    script.set_up(base=2)
    script.steps(8, 1.0)
    script.end()
    result = check(script)
    assert (result.steps, result.steps_lost) == (10, 7)
    assert result.restarts_by_layer() == {"in-process": 1, "in-job": 1}


def test_unplanned_death_is_detected_from_the_last_step() -> None:
    script = started()
    script.steps(3, 1.0)
    script.respawn(detect=4.0, restart=1.0)
    script.set_up(base=3)
    script.steps(3, 1.0)
    script.end()
    assert check(script).restarts[0].fault == ""


def test_start_that_never_met_counts_as_restart() -> None:
    """GIVEN new processes die before their rendezvous THEN their time belongs to the restart."""
    script = started()
    script.steps(3, 1.0)
    script.fault("sigkill", interrupted=0.5)
    script.respawn(detect=0.2, restart=1.0)
    script.emit("enter", born=script.time - 0.5, rank=0, pid=77)
    script.emit("span", name="imports", start=script.time - 0.5, seconds=0.5, rank=0, pid=77)
    script.spend("restart", 3.0)
    script.emit("span", name="rendezvous", start=script.time - 3, seconds=3.0, failed=True, rank=0, pid=77)
    script.round += 1
    script.set_up(base=3)
    script.steps(3, 1.0)
    script.end()
    assert len(check(script).restarts) == 1


def test_pod_that_was_made_again() -> None:
    """GIVEN a node had no launcher for a while THEN that is idle time, and the layer is the launcher."""
    script = started()
    script.steps(3, 1.0)
    script.spend("detect", 0.5)
    script.emit("worker_exit", role="launcher", rank=1, signal=15, stopped=True)
    script.spend("restart", 0.4)
    script.emit("exit", role="supervisor", exit_code=143)
    script.spend("idle", 20.0)
    script.emit("launch", role="supervisor", attempt=0)
    script.spend("restart", 2.0)
    script.round = 1
    script.set_up(base=3)
    script.steps(3, 1.0)
    script.end()
    assert check(script).restarts[0].layer == "launcher"


def test_rounds_that_start_at_zero_again() -> None:
    """GIVEN a lost control store, so that rounds repeat THEN the generations are still told apart."""
    script = started()
    script.steps(3, 1.0)
    script.fault("sigkill", interrupted=0.5)
    script.respawn(detect=0.2, restart=1.0)
    script.set_up(base=3)
    for event in script.events:
        event["round"] = 0
    script.steps(2, 1.0)
    for event in script.events:
        event["round"] = 0
    script.end()
    for event in script.events:
        event["round"] = 0
    assert len(check(script).restarts) == 1


def test_run_that_is_still_going() -> None:
    script = started()
    script.steps(3, 1.0)
    result = check(script)
    assert not result.finished
    assert result.goodput == pytest.approx(3 / script.time)


def test_run_that_broke_off() -> None:
    script = started()
    script.steps(3, 1.0)
    script.fault("sigkill", interrupted=0.5)
    script.respawn(detect=0.2, restart=5.0)
    script.emit("enter", born=script.time - 1, rank=0, pid=77)
    script.emit("exit", role="supervisor", exit_code=1)
    result = check(script)
    assert not result.finished
    assert result.steps == 3


def test_done_run_that_was_started_again() -> None:
    script = started()
    script.steps(3, 1.0)
    script.end()
    end = script.time
    script.emit("launch", role="supervisor", time=end + 3600, attempt=0)
    script.emit("exit", role="supervisor", time=end + 3601, exit_code=0)
    assert script.account().wall_seconds == pytest.approx(end)


def test_time_without_events_stays_in_the_residual() -> None:
    """GIVEN a hole between two steps THEN no part takes it."""
    script = started()
    script.steps(3, 1.0)
    script.time += 0.25
    script.steps(3, 1.0)
    script.end()
    assert check(script, unexplained=0.25).residual == pytest.approx(0.25 / script.time)


def test_span_of_an_unknown_kind_is_a_part_of_its_own() -> None:
    script = started()
    script.steps(1, 1.0)
    script.span("profile", 2.0)
    script.end()
    assert script.account().parts["profile"] == pytest.approx(2.0)


def test_metrics_read_a_step_late_count_no_time_twice() -> None:
    """GIVEN step lines whose seconds reach into the next step THEN each second is booked once."""
    script = started()
    script.steps(5, 1.0)
    for event in script.events:
        if event["event"] == "step" and event["step"] < 5:
            event["seconds"] = 1.9
    script.end()
    check(script)


seconds = st.floats(0.01, 5.0)
interruptions = st.fixed_dictionaries(
    {
        "layer": st.sampled_from(["in-process", "in-job"]),
        "kept": st.integers(0, 4),
        "lost": st.integers(0, 3),
        "step": seconds,
        "interrupted": seconds,
        "detect": seconds,
        "restart": seconds,
        "imports": seconds,
        "setup": seconds,
        "early": st.floats(0.0, 3.0),
        "hole": st.sampled_from([0.0, 0.3]),
    }
)


@settings(max_examples=60)
@given(ranks=st.integers(2, 4), story=st.lists(interruptions, max_size=5))
def test_any_story_adds_up(ranks: int, story: list[dict[str, Any]]) -> None:
    """GIVEN any chain of faults THEN every part is what was put in, and only holes are unexplained."""
    script = started(ranks=ranks)
    holes = 0.0
    for chapter in story:
        script.steps(chapter["kept"], chapter["step"])
        base = script.step
        script.time += chapter["hole"] if chapter["kept"] else 0.0
        holes += chapter["hole"] if chapter["kept"] else 0.0
        script.steps(chapter["lost"], chapter["step"], part="lost work")
        script.fault("exception", interrupted=chapter["interrupted"])
        go_on = script.reenter if chapter["layer"] == "in-process" else script.respawn
        go_on(detect=chapter["detect"], restart=chapter["restart"])
        script.set_up(
            imports=chapter["imports"],
            setup=chapter["setup"],
            early=min(chapter["early"], chapter["restart"]),
            base=base,
        )
    script.steps(2, 1.0)
    script.end()
    # a hole at the end of a generation can't be told from its interrupted step
    result = script.account()
    assert sum(result.parts.values()) + result.residual_seconds == pytest.approx(result.wall_seconds)
    assert [r.layer for r in result.restarts] == [chapter["layer"] for chapter in story]
    assert result.steps_lost == sum(chapter["lost"] for chapter in story)
    last_in_generation = sum(c["hole"] for c in story if c["kept"] and not c["lost"])
    assert result.residual_seconds == pytest.approx(holes - last_in_generation, abs=1e-6)
    expected = {name: script.truth[name] for name in PARTS}
    expected["lost work"] += last_in_generation
    assert dict(result.parts) == pytest.approx(expected, abs=1e-6)


def test_no_events_make_an_empty_ledger() -> None:
    assert ledger([]).goodput == 0.0


def write(run_dir: Path, script: EventScript) -> None:
    with EventLog(run_dir, role="test", node="n") as log:
        for event in script.events:
            log.emit(**event)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = started()
    script.steps(4, 1.0)
    script.steps(2, 1.0, part="lost work")
    script.fault("sigkill", interrupted=0.4)
    script.respawn(detect=0.2, restart=1.0)
    script.set_up(base=4)
    script.steps(6, 1.0)
    script.end()
    write(tmp_path, script)
    assert main([str(tmp_path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["goodput"] == pytest.approx(script.account().goodput)
    assert values["restarts"][0]["steps_lost"] == 2
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == as_table(script.account()) + "\n"


def test_table() -> None:
    script = started()
    script.steps(7, 1.0)
    script.end()
    lines = as_table(script.account()).splitlines()
    assert lines[0] == "wall time 12.5 s, finished, goodput 56.0%"
    assert lines[2] == "productive       7.0 s  56.0%  " + "█" * 22 + " " * 18 + "  7 steps"
    assert lines[-1].startswith("residual         0.0 s   0.0%")


def test_directory_without_events(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RUN_DIR='.*': holds no events; give the directory of a run"):
        main([str(tmp_path)])
