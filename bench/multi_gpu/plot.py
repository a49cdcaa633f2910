"""The plot of section 2 as SVG, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.multi_gpu.results import Row, newest

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 40, 56
_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7")
_STYLE = """
text { font: 13px sans-serif; fill: #374151 }
.axis { stroke: #6b7280 }
.grid { stroke: #6b7280; opacity: .25 }
@media (prefers-color-scheme: dark) { text { fill: #d1d5db } }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Where values lie on the page."""

    widest: float
    highest: float

    def x(self, value: float) -> float:
        return _LEFT + value / self.widest * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.highest * (_HEIGHT - _TOP - _BOTTOM)


def contention(rows: Iterable[Row]) -> str:
    """Return the cost of a snapshot per step over the length of forward and backward."""
    found = [row for row in newest(rows) if row["section"] == "contention"]
    if not found:
        raise SystemExit("error: --output holds no rows of the section contention")
    lines: dict[int, list[tuple[float, float]]] = {}
    for row in found:
        cost = row["step_with_snapshot_ms"] - row["step_ms"]
        lines.setdefault(row["ranks"], []).append((row["forward_backward_ms"] / row["copy_ms"], cost))
    copy_ms = max(row["copy_ms"] for row in found)
    points = [point for line in lines.values() for point in line]
    scale = _Scale(widest=max(x for x, _ in points) * 1.05, highest=copy_ms * 1.05)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
            f"<title>Cost of a snapshot at every step</title><style>{_STYLE}</style>",
            *_axes(scale),
            *_prediction(scale, copy_ms),
            *_measured(scale, lines),
            "</svg>",
            "",
        ]
    )


def _axes(scale: _Scale) -> Iterator[str]:
    bottom, right = scale.y(0), _WIDTH - _RIGHT
    for tick in range(0, int(scale.highest) + 1, 20):
        y = scale.y(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
    for tenths in range(0, int(scale.widest * 10) + 1, 5):
        x = scale.x(tenths / 10)
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tenths / 10:g}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text x="{_LEFT}" y="22">ms that a snapshot adds to a step</text>'
    middle = (_LEFT + right) / 2
    label = "(forward + backward) / copy"
    yield f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">{label}</text>'


def _prediction(scale: _Scale, copy_ms: float) -> Iterator[str]:
    corners = ((0.0, copy_ms), (1.0, 0.0), (scale.widest, 0.0))
    yield f'<polyline class="axis" fill="none" stroke-dasharray="5 4" points="{_path(scale, corners)}"/>'
    x, y = scale.x(0.12), scale.y(copy_ms * 0.94)
    yield f'<text x="{x:.1f}" y="{y:.1f}">copy − (forward + backward)</text>'


def _measured(scale: _Scale, lines: dict[int, list[tuple[float, float]]]) -> Iterator[str]:
    for number, (ranks, points) in enumerate(sorted(lines.items())):
        color = _COLORS[number % len(_COLORS)]
        yield f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{_path(scale, points)}"/>'
        for x, y in points:
            yield f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3.5" fill="{color}"/>'
        left, top = _WIDTH - 190, _TOP + 24 + 20 * number
        name = f"{ranks} GPU{'s at once' if ranks > 1 else ' alone'}"
        yield f'<circle cx="{left}" cy="{top - 4}" r="4" fill="{color}"/>'
        yield f'<text x="{left + 12}" y="{top}">{name}</text>'


def _path(scale: _Scale, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
