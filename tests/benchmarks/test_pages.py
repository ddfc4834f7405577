"""Pages are filled between their markers, and plots are drawings of the numbers."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET

import pytest

from autopar.api import plots
from benchmarks.papers import pages
from benchmarks.papers.__main__ import PAGES

SVG = "{http://www.w3.org/2000/svg}"


def test_only_what_is_between_markers_changes() -> None:
    text = "a\n<!-- begin one -->\nold\n<!-- end one -->\nb\n<!-- begin two -->\n<!-- end two -->\n"
    filled = pages.filled(text, {"one": "1", "two": "2"})
    assert filled == (
        "a\n<!-- begin one -->\n1\n<!-- end one -->\nb\n<!-- begin two -->\n2\n<!-- end two -->\n"
    )
    assert pages.filled(filled, {"one": "1", "two": "2"}) == filled


@pytest.mark.parametrize("parts", [{}, {"one": "1", "two": "2"}, {"two": "2"}])
def test_a_page_and_its_command_have_the_same_parts(parts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="one"):
        pages.filled("<!-- begin one -->\n<!-- end one -->\n", parts)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_written(name: str) -> None:
    text = (pages.DOCS / f"{name}.md").read_text()
    assert f"python -m benchmarks.papers {name}" in text
    found = pages.markers(text)
    assert len(set(found)) == len(found) > 0
    for part in found:
        inside = text.partition(f"<!-- begin {part} -->")[2].partition(f"<!-- end {part} -->")[0]
        assert inside.strip(), part
    assert callable(importlib.import_module(f"benchmarks.papers.{name}").main)


def test_bars_are_as_high_as_their_values() -> None:
    svg = plots.stacked("t", "y", {"a": {"x": 1.0, "y": 3.0, "none": 0.0}, "b": {"x": 2.0}})
    bars = [
        float(found.attrib["height"])
        for found in ET.fromstring(svg).iter(f"{SVG}rect")
        if float(found.attrib["width"]) not in (plots.WIDTH, 10.0)
    ]
    assert bars[:2] == [pytest.approx(bars[0]), pytest.approx(3 * bars[0], rel=0.01)]
    assert bars[2] == pytest.approx(2 * bars[0], rel=0.01)
    assert "none" not in svg


def test_lines_go_through_their_points() -> None:
    svg = plots.lines("t", "x", "y", {"a": [(1, 0.0), (10, 5.0), (100, 10.0)]})
    (line,) = ET.fromstring(svg).iter(f"{SVG}polyline")
    places = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (left, low), (middle, half), (right, high) = places
    assert middle - left == pytest.approx(right - middle, abs=0.2)  # the x axis is logarithmic
    assert low - half == pytest.approx(half - high, abs=0.2)
    assert low > high
