"""The learning rate, a function of the step."""

from __future__ import annotations

import math

from training.config import OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of a step (the first is 1): linear warm-up, then cosine decay."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    floor = config.final_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * cosine)
