"""The HTML page: well formed, self-contained, and with every fault on it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.tiny import replaced, tiny_recipe
from tests.training.event_script import EventScript
from training.config import JobConfig
from training.fault_config import Fault, RehearsalConfig
from training.goodput import PARTS, PHASES
from training.rehearsal.chart import WIDTH
from training.rehearsal.page import COLOURS, render
from training.rehearsal.report import report_lines
from training.rehearsal.verdict import Verdict, judge_faults

SVG = "{http://www.w3.org/2000/svg}"
FAULTS = (Fault(kind="sigkill", rank=1, step=5), Fault(kind="hang", rank=0, step=9, point="forward"))


def scripted() -> EventScript:
    script = EventScript(ranks=2)
    script.spend("start", 1.0)
    script.set_up(early=0.4)
    script.steps(4, 1.0)
    script.fault("sigkill", interrupted=0.4)
    script.respawn(detect=0.2, stop=0.3, restart=1.0)
    script.set_up(base=4, restored={"source": "memory", "phases": {"load": 0.1}})
    script.steps(6, 0.5)
    script.end()
    return script


def recipe(tmp_path: Path, *faults: Fault) -> JobConfig:
    both = replaced(tiny_recipe(tmp_path, ranks=2), "recovery", layers="both")
    return dataclasses.replace(both, rehearsal=RehearsalConfig(faults=faults))


def judged(script: EventScript, *faults: Fault) -> Verdict:
    account = script.account()
    return Verdict(
        faults=judge_faults(faults, sorted_events(script), account.restarts),
        finished=True,
        steps=10,
        identical_loss=True,
        identical_params=True,
        goodput_percent=100 * account.goodput,
    )


def sorted_events(script: EventScript) -> list[dict[str, Any]]:
    return sorted(script.events, key=lambda event: float(event["time"]))


def page(tmp_path: Path) -> str:
    script = scripted()
    return render(recipe(tmp_path, *FAULTS), judged(script, *FAULTS), sorted_events(script))


def test_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    text = page(tmp_path)
    ElementTree.fromstring(text)
    assert re.findall(r"(?:src|href|url\(|@import|<script)", text) == []


def test_every_lane_phase_and_fault_is_drawn(tmp_path: Path) -> None:
    drawing = ElementTree.fromstring(page(tmp_path)).find(f".//{SVG}svg")
    assert drawing is not None
    labels = [text.text for text in drawing.iter(f"{SVG}text") if text.get("class") == "label"]
    assert labels == ["recovery", "n rank 0", "n rank 1"]
    (mark,) = [group for group in drawing.iter(f"{SVG}g") if group.get("class") == "fault"]
    assert mark.findtext(f"{SVG}title") == "1. sigkill in rank 1, step 5, backward"
    drawn = {box.get("class") for box in drawing.iter(f"{SVG}rect")}
    phases = ("detect", "stop", "restart", "imports", "rendezvous", "build", "load", "first-step")
    assert {f"p-{name}" for name in (*phases, "productive")} <= drawn


def test_boxes_stay_inside_the_drawing(tmp_path: Path) -> None:
    drawing = ElementTree.fromstring(page(tmp_path)).find(f".//{SVG}svg")
    assert drawing is not None
    for box in drawing.iter(f"{SVG}rect"):
        left, width = float(box.get("x", "-1")), float(box.get("width", "-1"))
        assert 0 <= left < left + width <= WIDTH


def test_fault_that_was_not_delivered_is_said(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert "FAILED" in text
    assert "not delivered" in text
    assert "hang in rank 0, step 9, forward" in text


def test_every_phase_and_part_has_a_colour() -> None:
    # before the first and after the last process of a rank there is nothing to draw
    assert {*PARTS, *PHASES} - set(COLOURS) == {"start"}


def test_report_tells_phases_source_and_page() -> None:
    lines = list(report_lines(judged(scripted(), *FAULTS), Path("run"), Path("run/timeline.html")))
    text = "\n".join(lines)
    assert "recovered  in-job, state from memory, 0 steps done again" in text
    assert "NOT DELIVERED" in text
    head = next(line for line in lines if "detect" in line)
    row = next(line for line in lines if line.startswith("   1. sigkill"))
    assert head.split()[-2:] == ["step", "total"]
    assert row.split()[2:5] == ["0.20", "0.30", "1.00"]
    assert "run/timeline.html" in text
    assert lines[-1].startswith("VERDICT recovered=1/2")
