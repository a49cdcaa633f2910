"""Kubernetes quantities such as 1800Gi or 191450m."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1.0,
    "m": 1e-3,
    **{suffix: 1000.0**power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": 1024.0**power for power, suffix in enumerate("KMGTPE", start=1)},
}


def parse_quantity(text: str) -> float:
    """Return a quantity in its base unit: bytes, cores, devices."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", text)
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{text!r} is no Kubernetes quantity")
    return float(match[1]) * _FACTORS[match[2]]
