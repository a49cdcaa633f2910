"""Tokens per second, model FLOPs utilisation and time to go."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

# Dense bf16 peaks in FLOP/s, from the vendor's data sheets, by a part of the device's name.
_PEAK_FLOPS = {
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s, None where it is not known."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_of(name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s of a device by its name, None where it is not known."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def flops_per_token(model_config: Any, counted_parameters: int, sequence_length_tokens: int) -> float:
    """Return training FLOPs a token, attention not discounted for causality (torchtitan's formula).

    Args:
        model_config: transformers configuration.
        counted_parameters: Parameters without an untied input embedding.
        sequence_length_tokens: Length of a sample.
    """
    layers, width = model_config.num_hidden_layers, model_config.hidden_size
    return float(6 * counted_parameters + 12 * layers * width * sequence_length_tokens)


@dataclass(kw_only=True, slots=True)
class Throughput:
    """Speed since the last report."""

    tokens_per_step: int
    total_steps: int
    flops_per_token: float
    peak_flops: float | None
    """Peak of all devices together."""
    _since: float = 0.0
    _since_step: int = -1

    def report(self, step: int) -> str:
        """Describe the speed since the last call, and start again."""
        now = time.monotonic()
        first, steps = self._since_step < 0, step - self._since_step
        seconds = (now - self._since) / max(steps, 1)
        self._since, self._since_step = now, step
        if first:
            return ""
        tokens_per_second = self.tokens_per_step / seconds
        parts = [f"{tokens_per_second:,.0f} tokens/s"]
        if self.peak_flops:
            parts.append(f"MFU {tokens_per_second * self.flops_per_token / self.peak_flops:.1%}")
        parts.append(f"ETA {duration((self.total_steps - step) * seconds)}")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds for people: 4s, 3m20s, 5h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
