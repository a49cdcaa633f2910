"""The whole of Holdfast on this machine: templates, manifest, data, and a run that survives two faults.

make demo        or, with everything installed:   python tools/demo.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "cdk.out"
MANIFEST = ROOT / "runs" / "demo" / "llama3-8b.yaml"
P5_RECIPE = "training/recipes/llama3_8b_p5.toml"
REHEARSAL_RECIPE = "training/recipes/rehearsal_cpu.toml"
SHOWN_RESOURCES = {
    "AWS::EC2::VPC": "VPC",
    "AWS::EKS::Cluster": "EKS cluster",
    "AWS::AutoScaling::AutoScalingGroup": "GPU node group",
    "AWS::FSx::FileSystem": "FSx for Lustre",
    "AWS::ECR::Repository": "ECR repository",
    "AWS::EKS::Addon": "EKS add-on",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a part of the demo has shown."""

    title: str
    lines: list[str]
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Show all of Holdfast on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    outcomes = [part() for part in (synth, render, prepare)]
    start = time.monotonic()
    announce(4, "rehearse: train on 2 simulated nodes x 2 ranks, with an exception and a SIGKILL")
    verdict = rehearse()
    outcomes.append(
        Outcome(title="rehearse", lines=faults_in_words(verdict), seconds=time.monotonic() - start)
    )
    if arguments.json:
        parts = {outcome.title: outcome.lines for outcome in outcomes}
        print(json.dumps({"parts": parts, "verdict": verdict}))  # noqa: T201
    else:
        print(report(outcomes, verdict))  # noqa: T201
    return 0 if verdict["passed"] else 1


def synth() -> Outcome:
    """Synthesise the stacks and count what they hold."""
    announce(1, "cdk synth: the infrastructure, without credentials or look-ups")
    start = time.monotonic()
    run(["cdk", "synth", "--quiet", "--no-lookups", "--no-notices", "--output", str(TEMPLATES)])
    templates = sorted(TEMPLATES.glob("*.template.json"))
    types = Counter(
        resource["Type"]
        for template in templates
        for resource in json.loads(template.read_text())["Resources"].values()
    )
    shown = [f"{count} {SHOWN_RESOURCES[name]}" for name, count in types.items() if name in SHOWN_RESOURCES]
    lines = [
        f"{len(templates)} stacks, {types.total()} resources: {', '.join(shown)}, ...",
        nag_result(),
        *(f"template  {template.relative_to(ROOT)}" for template in templates),
    ]
    return Outcome(title="synth", lines=lines, seconds=time.monotonic() - start)


def nag_result() -> str:
    """Return cdk-nag's result in words."""
    report_file = json.loads((TEMPLATES / "validation-report.json").read_text())
    open_findings = [entry for plugin in report_file["pluginReports"] for entry in plugin["violations"]]
    accepted = [
        entry for plugin in report_file["pluginReports"] for entry in plugin.get("suppressedViolations", [])
    ]
    return f"cdk-nag   {len(open_findings)} open findings, {len(accepted)} accepted with a written reason"


def render() -> Outcome:
    """Render the Job of the p5 recipe and check it against the Kubernetes schemas."""
    announce(2, "k8s render: the Kubernetes Job of an 8B model on two p5.48xlarge nodes")
    start = time.monotonic()
    command = [sys.executable, "-m", "k8s", "render", P5_RECIPE, "--outputs", "k8s/sample_outputs.json"]
    text = run(command)
    MANIFEST.parent.mkdir(parents=True, exist_ok=True)
    MANIFEST.write_text(text)
    lines = [f"{checked_objects(text)}, all valid", f"manifest  {MANIFEST.relative_to(ROOT)}"]
    return Outcome(title="render", lines=lines, seconds=time.monotonic() - start)


def checked_objects(text: str) -> str:
    """Validate every object strictly and return their kinds."""
    import kubernetes_validate
    import yaml

    objects = list(yaml.safe_load_all(text))
    for item in objects:
        kubernetes_validate.validate(item, "1.36", strict=True)
    kinds = Counter(item["kind"] for item in objects)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def prepare() -> Outcome:
    """Turn real text into token shards."""
    announce(3, "prepare: the Python standard library's sources to token shards")
    start = time.monotonic()
    made = json.loads(run([sys.executable, "-m", "training", "prepare", "--json"]))
    splits = [
        f"{name:10} {tokens:,} tokens of {made['documents'][name]:,} documents"
        for name, tokens in made["tokens"].items()
    ]
    lines = [*splits, f"shards     {made['output']}"]
    return Outcome(title="prepare", lines=lines, seconds=time.monotonic() - start)


def rehearse() -> dict[str, Any]:
    """Run the rehearsal; its progress goes to the terminal."""
    text = run([sys.executable, "-m", "training", "rehearse", REHEARSAL_RECIPE, "--json"], accept=(0, 1))
    verdict: dict[str, Any] = json.loads(text)
    return verdict


def faults_in_words(verdict: dict[str, Any]) -> list[str]:
    lines = []
    for fault in verdict["faults"]:
        what = f"{fault['kind']} in rank {fault['rank']} at step {fault['step']}"
        seconds = sum(fault["phases"].values())
        how = f"recovered {fault['layer']} in {seconds:.1f} s" if fault["recovered"] else "NOT recovered"
        lines.append(f"{what}: {how}")
    return [*lines, f"run       {verdict['run_dir']}"]


def report(outcomes: list[Outcome], verdict: dict[str, Any]) -> str:
    """Return the closing report; its last line is the verdict."""
    lines = ["", "Holdfast demo", ""]
    for outcome in outcomes:
        lines.append(f"  {outcome.title:10} {outcome.seconds:6.1f} s   {outcome.lines[0]}")
        lines.extend(f"{'':24}{line}" for line in outcome.lines[1:])
    return "\n".join([*lines, "", verdict["verdict"]])


def announce(number: int, what: str) -> None:
    print(f"[{number}/4] {what}", file=sys.stderr, flush=True)  # noqa: T201


def run(command: list[str], *, accept: tuple[int, ...] = (0,)) -> str:
    """Run a command and return its standard output; its standard error goes to the terminal."""
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode not in accept:
        sys.exit(f"error: {' '.join(command)}: exit code {result.returncode}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
