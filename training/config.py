"""The job recipe: one TOML file that says what to train, on what, and how to survive faults.

Imports no torch, so `k8s/` can read recipes on a laptop. `load_recipe` checks every rule before it
raises, see `training/schema.py`. Fields marked FIXED may not change when a run resumes.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from training import schema
from training.checkpoint_config import CheckpointConfig, SnapshotConfig
from training.errors import ConfigError, Problem
from training.fault_config import RehearsalConfig, plan_problems
from training.kubernetes_config import KubernetesConfig
from training.schema import FIXED, Count, Pattern, Positive, Range, Seconds

Layers = Literal["none", "in_process", "in_job", "both"]
NonFinitePolicy = Literal["stop", "skip", "roll_back"]
Name = Annotated[
    str,
    Pattern(
        regex=r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?",
        description="1 to 40 of a-z, 0-9 and '-', not at an end",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """How many nodes and ranks train."""

    name: Name
    """Name of the run; part of its directory and of its Kubernetes objects."""
    nodes: Positive = 1
    """Nodes that train."""
    ranks_per_node: Annotated[int, Range(minimum=1, maximum=64)] = 1
    """Training processes a node: one for each of its GPUs."""
    spares: Count = 0
    """Hot-spare nodes that wait to replace a lost one."""
    replicas: Positive = 1
    """HSDP replicas of the whole model; ranks / replicas ranks shard one copy."""

    @property
    def world_size(self) -> int:
        """Number of training ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def launchers(self) -> int:
        """Number of nodes, spares included; each has one launcher."""
        return self.nodes + self.spares

    def problems(self) -> Iterator[Problem]:
        if self.spares >= self.nodes and self.spares:
            rule = f"must be below nodes={self.nodes}, or the spares alone could form a second world"
            yield Problem(path="spares", value=self.spares, rule=rule, fix="use fewer spares")
        if self.world_size % self.replicas:
            rule = f"must divide the {self.world_size} ranks"
            yield Problem(path="replicas", value=self.replicas, rule=rule, fix="change it")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Any Hugging Face causal language model."""

    source: Annotated[str, FIXED] = ""
    """Directory or hub name of a model; empty to build one from `config` alone."""
    config: Annotated[dict[str, Any], FIXED] = field(default_factory=dict)
    """Fields of the transformers configuration; on top of those of `source` if that is given."""
    weights: Annotated[Literal["random", "pretrained"], FIXED] = "random"
    """Where a first start takes its weights from."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Trade speed for memory: full costs about 12% of the tokens/s, selective about 6%."""
    compile: Annotated[bool, FIXED] = False
    """Compile each decoder block. Not bitwise equal to eager, so it may not change on resume."""
    loss_chunk_tokens: Positive = 2048
    """Tokens whose logits exist at one time."""

    def problems(self) -> Iterator[Problem]:
        if not self.source and "model_type" not in self.config:
            rule = "needs model.source, or a config table with model_type"
            fix = 'set source = "DIRECTORY", or config.model_type = "llama" and its sizes'
            yield Problem(path="source", value=self.source, rule=rule, fix=fix)
        if self.weights == "pretrained" and not self.source:
            rule = "needs model.source"
            yield Problem(path="weights", value=self.weights, rule=rule, fix="set source")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Token shards made by `training prepare`, and how batches are cut from them."""

    path: str
    """Directory of training shards."""
    validation_path: str = ""
    """Directory of validation shards; empty for the `validation` folder beside the training shards."""
    sequence_length_tokens: Annotated[int, FIXED, Range(minimum=2)]
    """Tokens a sample."""
    global_batch_samples: Positive
    """Samples an optimizer step, over all ranks."""
    prefetch_batches: Positive = 10
    """Training batches a rank reads ahead."""
    validation_prefetch_batches: Positive = 10
    """Validation batches a rank reads ahead."""
    lookback_batches: Count = 2
    """Past batches a rank keeps, so that a step that is done again reads nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """Where the text comes from and how it becomes tokens."""

    source: str = "python-stdlib"
    """`python-stdlib`, a folder of txt, jsonl, parquet or source files, or a hub data set."""
    subset: str = ""
    """Configuration of a hub data set, such as `en`."""
    maximum_samples: Count = 0
    """Documents taken from a hub data set; 0 for all."""
    text_field: str = "text"
    """Field that holds the text in jsonl and parquet."""
    tokenizer: str = "byte"
    """`byte`, `bpe` (trained on the source), or the directory or hub name of a model."""
    vocabulary_tokens: Annotated[int, Range(minimum=257, maximum=1 << 20)] = 8192
    """Size of a trained BPE vocabulary."""
    validation_fraction: Annotated[float, Range(minimum=0.0, maximum=0.5)] = 0.02
    """Share of the documents that goes into the validation shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: Annotated[float, Range(minimum=0.0)] = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Range(minimum=0.0, maximum=0.9999)] = 0.9
    beta2: Annotated[float, Range(minimum=0.0, maximum=0.9999)] = 0.95
    epsilon: Annotated[float, Range(minimum=1e-12)] = 1e-8
    weight_decay: Annotated[float, Range(minimum=0.0)] = 0.1
    warmup_steps: Count = 0
    """Steps from 0 to the peak."""
    final_learning_rate_ratio: Annotated[float, Range(minimum=0.0, maximum=1.0)] = 0.1
    """Learning rate at the last step, as a share of the peak."""
    maximum_gradient_norm: Annotated[float, Range(minimum=0.0)] = 1.0
    """Clip gradients to this norm; 0 for never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The loop."""

    steps: Positive
    """Optimizer steps of the whole run."""
    seed: Annotated[int, FIXED, Range(minimum=0)] = 0
    """Seed of initial weights, data order and dropout."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches an optimizer step."""
    precision: Annotated[Literal["auto", "bf16", "fp32"], FIXED] = "auto"
    """bf16 is bf16 compute over fp32 weights; auto is bf16 on GPUs and fp32 on CPUs."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs: bitwise repeatable, slower."""
    evaluate_every_steps: Count = 0
    """Steps between evaluations; 0 for never."""
    evaluation_batches: Positive = 8
    """Global batches an evaluation."""
    log_every_steps: Positive = 10
    """Steps between lines on the terminal; events carry every step."""
    non_finite_loss: NonFinitePolicy = "stop"
    """When the loss or the gradient norm is NaN or infinite; in no case is that update applied. stop: end
    with 65 and the evidence. skip: go on with the next samples. roll_back: go back to the state before the
    step and do it again, at most recovery.maximum_same_step_failures times, then stop."""
    threads_per_rank: Positive = 1
    """CPU threads of a rank's own arithmetic."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes a GPU where there is one, and says so where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Which restart layers are on, and after how long they act."""

    layers: Layers = "both"
    """in_process: NVRx Wrapper, for exceptions and soft hangs. in_job: ft_launcher respawns ranks."""
    group_timeout_seconds: Seconds = 600.0
    """Process-group timeout. gloo cannot abort a collective: on CPU it must be below
    soft_timeout_seconds. NCCL: above hard_timeout_seconds."""
    soft_timeout_seconds: Annotated[float, Range(minimum=1.0)] = 60.0
    """In-process layer: no progress for this long raises an exception in the rank."""
    hard_timeout_seconds: Annotated[float, Range(minimum=1.0)] = 90.0
    """In-process layer: no progress for this long kills the rank."""
    barrier_timeout_seconds: Annotated[float, Range(minimum=1.0)] = 120.0
    """In-process layer: longest wait for the other ranks to come back."""
    setup_timeout_seconds: Seconds = 600.0
    """In-job layer: longest set-up (imports, model, load, first compile)."""
    step_timeout_seconds: Seconds = 300.0
    """In-job layer: longest step."""
    checkpoint_timeout_seconds: Seconds = 600.0
    """In-job layer: longest time that a checkpoint holds up the training thread; never less than
    checkpoint.deadline_seconds and 30 s, which the last save may take."""
    out_of_section_timeout_seconds: Seconds = 300.0
    """In-job layer: longest time outside set-up, step and checkpoint."""
    maximum_restarts: Positive = 1000
    """In-job layer: restarts of the whole run."""
    maximum_same_step_failures: Positive = 3
    """Times that a rank may raise the same exception in the same step, over all layers' restarts, until
    the run ends with 65 and is not retried."""

    @property
    def in_process(self) -> bool:
        return self.layers in ("in_process", "both")

    @property
    def in_job(self) -> bool:
        return self.layers in ("in_job", "both")

    def problems(self) -> Iterator[Problem]:
        if not self.in_process:
            return
        names = ("soft_timeout_seconds", "hard_timeout_seconds", "barrier_timeout_seconds")
        ordered = list(itertools.pairwise(names))
        if self.layers == "both":  # the in-job layer leaves the in-process layer its turn
            ordered.append(("hard_timeout_seconds", "step_timeout_seconds"))
        for low, high in ordered:
            if getattr(self, low) >= getattr(self, high):
                rule = f"must be below {high}={getattr(self, high):g}"
                yield Problem(path=low, value=getattr(self, low), rule=rule, fix="lower it")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A whole recipe."""

    version: Literal[1]
    """Version of the recipe format."""
    job: JobShape
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def problems(self) -> Iterator[Problem]:
        yield from self._batch_problems()
        yield from self._timeout_problems()
        yield from plan_problems(self)

    def _batch_problems(self) -> Iterator[Problem]:
        micro_batches = self.job.world_size * self.training.gradient_accumulation_steps
        if self.data.global_batch_samples % micro_batches:
            yield Problem(
                path="data.global_batch_samples",
                value=self.data.global_batch_samples,
                rule=f"must be a multiple of ranks x gradient_accumulation_steps = {micro_batches}",
                fix=f"use {-(-self.data.global_batch_samples // micro_batches) * micro_batches}",
            )
        if self.optimizer.warmup_steps >= self.training.steps:
            yield Problem(
                path="optimizer.warmup_steps",
                value=self.optimizer.warmup_steps,
                rule=f"must be below training.steps={self.training.steps}",
                fix="lower it",
            )

    def _timeout_problems(self) -> Iterator[Problem]:
        recovery = self.recovery
        if not recovery.in_process or self.training.device == "auto":
            return  # "auto" is checked when the device is known: `check_timeouts`
        yield from check_timeouts(recovery, cuda=self.training.device == "cuda")


def check_timeouts(recovery: RecoveryConfig, *, cuda: bool) -> Iterator[Problem]:
    """Check the process-group timeout against the in-process layer's, which differs by backend.

    gloo cannot abort a running collective, so only its own timeout frees a rank from it. NCCL's
    watchdog kills the process, so it must come after the layer's own hard timeout.
    """
    group = recovery.group_timeout_seconds
    path = "recovery.group_timeout_seconds"
    if cuda and group <= recovery.hard_timeout_seconds:
        rule = f"must be above hard_timeout_seconds={recovery.hard_timeout_seconds:g} with NCCL"
        yield Problem(path=path, value=group, rule=rule, fix="raise it")
    if not cuda and group >= recovery.soft_timeout_seconds:
        rule = f"must be below soft_timeout_seconds={recovery.soft_timeout_seconds:g} with gloo"
        yield Problem(path=path, value=group, rule=rule, fix="lower it")


def load_recipe(path: Path) -> JobConfig:
    """Read a recipe.

    Raises:
        ConfigError: The file is missing, is not TOML, or breaks a rule.
    """
    try:
        with path.open("rb") as file:
            mapping = tomllib.load(file)
    except OSError as error:
        raise ConfigError.of(
            "RECIPE", str(path), f"cannot be read ({error.strerror})", "give the path of a .toml file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError.of("RECIPE", str(path), f"is not TOML: {error}", "mend the line") from error
    return schema.load(JobConfig, mapping)
