"""`k8s cost`: what a cluster costs an hour, and what a run has cost, from list prices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s import prices
from k8s.command_line import command_parser, positive
from k8s.doctor import load_cluster
from k8s.text_table import duration, table
from stacks.config import ClusterConfig
from training.errors import ConfigError

_INTERFACE_ENDPOINTS = 8
_SYSTEM_ROOT_GIB = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One part of the bill."""

    name: str
    quantity: float
    dollars_per_hour: float
    """For all of it."""


def main(arguments: list[str]) -> int:
    parser = command_parser("cost", __doc__)
    parser.add_argument(
        "--cluster", type=Path, default=Path("cdk.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--goodput", type=Path, metavar="FILE", help="from `training goodput RUN_DIR --json`")
    parser.add_argument("--gpu-hour", type=positive, metavar="DOLLARS", help="what you pay for a GPU node")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    config = load_cluster(options.cluster)
    items = list(hourly_items(config, gpu_hour=options.gpu_hour))
    report = _read_goodput(options.goodput) if options.goodput else None
    text = as_json(items, report) if options.json else as_table(config, items, report)
    print(text)  # noqa: T201
    return 0


def hourly_items(config: ClusterConfig, *, gpu_hour: float | None = None) -> Iterator[Item]:
    """Yield the parts of the bill that run by the hour; traffic, logs and S3 are not in it.

    Args:
        config: The cluster.
        gpu_hour: Price of one GPU node; None for the list price of the capacity mode.

    Raises:
        ConfigError: The list has no price for a part.
    """
    gpu, network = config.gpu, config.network
    nodes = 0 if gpu.parked else gpu.group_size
    node_hour = _gpu_hour(config) if gpu_hour is None else gpu_hour
    yield _item(f"{gpu.instance_type}, {gpu.capacity.mode}", nodes, node_hour)
    yield _item(f"{config.system.instance_type}, system", config.system.nodes, _system_hour(config))
    yield _item(f"EKS control plane, {config.support} support", 1, prices.EKS_HOUR[config.support])
    capacity = config.storage.capacity_gib
    yield _item("FSx SCRATCH_2, GiB", capacity, prices.SCRATCH_2_GIB_MONTH / prices.HOURS_PER_MONTH)
    root_gib = nodes * gpu.root_volume_gib + config.system.nodes * _SYSTEM_ROOT_GIB
    yield _item("root volumes gp3, GiB", root_gib, prices.GP3_GIB_MONTH / prices.HOURS_PER_MONTH)
    if network.existing is None:
        yield _item("NAT gateway and its address", 1, prices.NAT_HOUR + prices.PUBLIC_ADDRESS_HOUR)
    if network.interface_endpoints:
        endpoints = _INTERFACE_ENDPOINTS * len(network.cluster_zones)
        yield _item("interface endpoints", endpoints, prices.INTERFACE_ENDPOINT_HOUR)


def run_dollars(items: list[Item], report: Mapping[str, Any]) -> dict[str, float]:
    """Return what each part of a run's wall time has cost, the residual included."""
    per_second = sum(item.dollars_per_hour for item in items) / 3600
    parts = {**report["parts"], "residual": report["residual_seconds"]}
    return {name: seconds * per_second for name, seconds in parts.items()}


def as_json(items: list[Item], report: Mapping[str, Any] | None) -> str:
    result: dict[str, Any] = {
        "prices_as_of": prices.AS_OF,
        "prices_region": prices.REGION,
        "dollars_per_hour": sum(item.dollars_per_hour for item in items),
        "items": [dataclasses.asdict(item) for item in items],
    }
    if report is not None:
        dollars = run_dollars(items, report)
        result["run"] = {"dollars": sum(dollars.values()), "dollars_by_part": dollars}
    return json.dumps(result, indent=2)


def as_table(config: ClusterConfig, items: list[Item], report: Mapping[str, Any] | None) -> str:
    rows = [(item.name, f"{item.quantity:g}", f"{item.dollars_per_hour:.2f}") for item in items]
    total = sum(item.dollars_per_hour for item in items)
    lines = [
        f"{config.name} in {config.region}; list prices of {prices.REGION} as of {prices.AS_OF}",
        *table(("PART", "QUANTITY", "$/HOUR"), [*rows, ("total", "", f"{total:.2f}")]),
    ]
    if report is not None:
        lines.extend(["", *_run_lines(items, report)])
    return "\n".join(lines)


def _run_lines(items: list[Item], report: Mapping[str, Any]) -> Iterator[str]:
    dollars = run_dollars(items, report)
    lost = sum(dollars.values()) - dollars.get("productive", 0.0)
    wall = duration(report["wall_seconds"])
    yield f"run: ${sum(dollars.values()):,.2f} for {wall}, ${lost:,.2f} of it not for steps that survived"
    costly = sorted(dollars.items(), key=lambda item: -item[1])
    yield from table(("WALL TIME", "$"), [(name, f"{cost:,.2f}") for name, cost in costly if cost])


def _gpu_hour(config: ClusterConfig) -> float:
    kind, mode = config.gpu.instance_type, config.gpu.capacity.mode
    listed = prices.BLOCK_HOUR if mode == "capacity-block" else prices.ON_DEMAND_HOUR
    if kind not in listed:
        rule = f"has no list price for mode={mode} here"
        raise ConfigError.of("gpu.instance_type", kind, rule, "give --gpu-hour DOLLARS")
    return listed[kind]


def _system_hour(config: ClusterConfig) -> float:
    kind = config.system.instance_type
    if kind not in prices.ON_DEMAND_HOUR:
        known = ", ".join(k for k in prices.ON_DEMAND_HOUR if k.startswith("m"))
        raise ConfigError.of("system.instance_type", kind, f"has no price here (known: {known})", "use one")
    return prices.ON_DEMAND_HOUR[kind]


def _item(name: str, quantity: float, each: float) -> Item:
    return Item(name=name, quantity=quantity, dollars_per_hour=quantity * each)


def _read_goodput(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
        return {key: report[key] for key in ("parts", "residual_seconds", "wall_seconds")}
    except (OSError, ValueError) as error:
        rule = f"cannot be read ({error})"
    except (KeyError, TypeError):
        rule = "is no goodput report"
    fix = "write it with `python -m training goodput RUN_DIR --json`"
    raise ConfigError.of("--goodput", str(path), rule, fix)
