"""Small plots as SVG: lines over numbers, and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 340
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 40, 190, 50
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#9c6b4e")

Points = Sequence[tuple[float, float]]


def lines(title: str, x: str, y: str, series: Mapping[str, Points]) -> str:
    """Lines over a logarithmic x axis that is marked at the points' x; y starts at 0."""
    xs = sorted({point[0] for points in series.values() for point in points})
    top = _nice(max(point[1] for points in series.values() for point in points))
    span = math.log(xs[-1] / xs[0]) or 1.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = math.log(point[0] / xs[0]) / span
        return _LEFT + across * _plot_width(), _height_of(point[1], top)

    parts = _frame(title, y, top)
    for value in xs:
        at = place((value, 0.0))[0]
        parts.append(_text(at, HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
    parts.append(_text(_LEFT + _plot_width() / 2, HEIGHT - 12, x, "middle"))
    for number, (name, points) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        places = [place(point) for point in points]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{color}"/>'
            for across, down in places
        ]
        parts += _legend(number, name, color)
    return _document(parts)


def stacked(title: str, y: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each name, stacked of causes; causes that are nothing everywhere are left out."""
    causes = [
        cause
        for cause in dict.fromkeys(cause for bar in bars.values() for cause in bar)
        if any(bar.get(cause, 0.0) > 0 for bar in bars.values())
    ]
    top = _nice(max(sum(bar.values()) for bar in bars.values()))
    parts = _frame(title, y, top)
    step = _plot_width() / len(bars)
    for number, (name, bar) in enumerate(bars.items()):
        left, total = _LEFT + (number + 0.15) * step, 0.0
        for index, cause in enumerate(causes):
            value = bar.get(cause, 0.0)
            upper, lower = _height_of(total + value, top), _height_of(total, top)
            parts.append(
                f'<rect x="{left:.1f}" y="{upper:.1f}" width="{0.7 * step:.1f}" '
                f'height="{lower - upper:.1f}" fill="{COLORS[index % len(COLORS)]}"/>'
            )
            total += value
        for line, words in enumerate(name.split("\n")):
            down = HEIGHT - _BOTTOM + 16 + 14 * line
            parts.append(_text(left + 0.35 * step, down, words, "middle"))
    for index, cause in enumerate(causes):
        parts += _legend(index, cause, COLORS[index % len(COLORS)])
    return _document(parts)


def panels(plots: Sequence[str]) -> str:
    """Plots one below the other, as one document."""
    height = HEIGHT * len(plots)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">'
    )
    moved = [
        plot.strip().replace("<svg ", f'<svg y="{HEIGHT * number}" ', 1)
        for number, plot in enumerate(plots)
    ]
    return "\n".join([head, *moved, "</svg>", ""])


def _plot_width() -> int:
    return WIDTH - _LEFT - _RIGHT


def _height_of(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)


def _nice(highest: float) -> float:
    """The least 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten that is not below ``highest``."""
    power = 10.0 ** math.floor(math.log10(highest))
    return next(n * power for n in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if n * power >= highest)


def _frame(title: str, y: str, top: float) -> list[str]:
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, title, "start", bold=True),
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y)}</text>",
    ]
    for mark in range(6):
        value = top * mark / 5
        at = _height_of(value, top)
        parts.append(
            f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}" '
            f'stroke="{"#333" if mark == 0 else "#ddd"}"/>'
        )
        parts.append(_text(_LEFT - 6, at + 4, f"{value:g}", "end"))
    return parts


def _legend(number: int, name: str, color: str) -> list[str]:
    left, down = WIDTH - _RIGHT + 12, _TOP + 10 + 18 * number
    return [
        f'<rect x="{left}" y="{down - 9}" width="10" height="10" fill="{color}"/>',
        _text(left + 15, down, name, "start"),
    ]


def _text(x: float, y: float, words: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def _document(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, *parts, "</svg>", ""])
