"""Example manifests under k8s/generated/: `python -m k8s.examples` writes them, a test keeps them current."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k8s.manifests import render
from k8s.outputs import load_outputs
from k8s.run import load_run

K8S_DIRECTORY = Path(__file__).parent
GENERATED_DIRECTORY = K8S_DIRECTORY / "generated"
SAMPLE_OUTPUTS = K8S_DIRECTORY / "sample_outputs.json"
P5_RECIPE = K8S_DIRECTORY.parent / "training" / "recipes" / "llama3_8b_p5.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A recipe, and the cluster that it is rendered for."""

    recipe: Path
    instance_type: str
    nodes: int
    spares: int = 0


EXAMPLES = {
    "p5-2": Example(recipe=P5_RECIPE, instance_type="p5.48xlarge", nodes=2),
    "p5-16-spares-2": Example(
        recipe=K8S_DIRECTORY / "examples" / "p5_16_spares_2.toml",
        instance_type="p5.48xlarge",
        nodes=16,
        spares=2,
    ),
    "p4de-2": Example(
        recipe=K8S_DIRECTORY / "examples" / "p4de_2.toml", instance_type="p4de.24xlarge", nodes=2
    ),
    "g6e-2": Example(recipe=K8S_DIRECTORY / "examples" / "g6e_2.toml", instance_type="g6e.8xlarge", nodes=2),
}


def rendered_examples() -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of every example manifest."""
    sample = load_outputs(SAMPLE_OUTPUTS)
    for name, example in EXAMPLES.items():
        outputs = dataclasses.replace(
            sample, instance_type=example.instance_type, nodes=example.nodes, spares=example.spares
        )
        run = load_run(example.recipe, outputs)
        yield GENERATED_DIRECTORY / f"{name}.yaml", render(run)
        if name == "p5-2":
            yield GENERATED_DIRECTORY / "prepare.yaml", render(run, "prepare")
            yield GENERATED_DIRECTORY / "export.yaml", render(run, "export")


if __name__ == "__main__":
    GENERATED_DIRECTORY.mkdir(exist_ok=True)
    for path, text in rendered_examples():
        path.write_text(text)
