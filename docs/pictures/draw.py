"""Draws the pictures of docs/architecture.md: each `.toml` beside this file becomes an `.svg`.

`python docs/pictures/draw.py` after a change of a `.toml`. Every step is a box in the lane of its process,
with the file that does the work; an arrow leads to the next step, and says what travels if `sends` is given.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

HERE = Path(__file__).parent
MARGIN, TITLE, LANE, GAP = 12, 34, 372, 12
"""Pixels: around all, for the lanes' names, width of a lane, between lanes."""
BOX_WIDTH, BOX_HEIGHT, ROW = 352, 44, 78
LANE_COLOURS = ("#eef4fb", "#eef8ee", "#fdf3e7", "#f6effa")
INK, LINE = "#1f2328", "#57606a"
FILE_FONT = {"font-family": "ui-monospace, monospace", "font-size": "11.5", "font-weight": "600"}
TEXT_FONT = {"font-family": "system-ui, sans-serif", "font-size": "12"}
NAME_FONT = {"font-family": "system-ui, sans-serif", "font-size": "14", "font-weight": "600"}


def drawn(source: Path) -> str:
    """The SVG of one picture."""
    picture = tomllib.loads(source.read_text())
    lanes: list[str] = picture["lanes"]
    steps: list[Mapping[str, Any]] = picture["step"]
    width = 2 * MARGIN + len(lanes) * LANE + (len(lanes) - 1) * GAP
    height = 2 * MARGIN + TITLE + len(steps) * ROW
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", role="img")
    ET.SubElement(svg, "title").text = picture["title"]
    ET.SubElement(svg, "rect", width=str(width), height=str(height), fill="white")
    _draw_lanes(svg, lanes, height)
    for row, step in enumerate(steps):
        _draw_box(svg, _left(lanes, step), _top(row), step)
        if row + 1 < len(steps):
            _draw_arrow(svg, lanes, row, steps)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _left(lanes: Sequence[str], step: Mapping[str, Any]) -> int:
    return MARGIN + lanes.index(step["lane"]) * (LANE + GAP) + (LANE - BOX_WIDTH) // 2


def _top(row: int) -> int:
    return MARGIN + TITLE + row * ROW


def _draw_lanes(svg: ET.Element, lanes: Sequence[str], height: int) -> None:
    for number, lane in enumerate(lanes):
        left = MARGIN + number * (LANE + GAP)
        ET.SubElement(
            svg, "rect", x=str(left), y=str(MARGIN), width=str(LANE), height=str(height - 2 * MARGIN), rx="6",
            fill=LANE_COLOURS[number % len(LANE_COLOURS)],
        )  # fmt: skip
        _write(svg, left + LANE // 2, MARGIN + 21, lane, NAME_FONT)


def _draw_box(svg: ET.Element, left: int, top: int, step: Mapping[str, Any]) -> None:
    ET.SubElement(
        svg, "rect", x=str(left), y=str(top), width=str(BOX_WIDTH), height=str(BOX_HEIGHT), rx="5",
        fill="white", stroke=LINE,
    )  # fmt: skip
    middle = left + BOX_WIDTH // 2
    _write(svg, middle, top + 18, step["file"], FILE_FONT)
    _write(svg, middle, top + 35, step["does"], TEXT_FONT)


def _draw_arrow(svg: ET.Element, lanes: Sequence[str], row: int, steps: Sequence[Mapping[str, Any]]) -> None:
    start = _left(lanes, steps[row]) + BOX_WIDTH // 2
    end = _left(lanes, steps[row + 1]) + BOX_WIDTH // 2
    top, bottom = _top(row) + BOX_HEIGHT, _top(row + 1)
    bend = (top + bottom) // 2 + 3
    ET.SubElement(svg, "path", d=f"M{start},{top} V{bend} H{end} V{bottom - 5}", fill="none", stroke=LINE)
    ET.SubElement(svg, "path", d=f"M{end},{bottom} l-4,-8 h8 z", fill=LINE)
    if sends := steps[row].get("sends"):
        if start == end:
            _write(svg, start + 10, bend + 2, sends, TEXT_FONT | {"font-style": "italic"}, anchor="start")
        else:
            _write(svg, (start + end) // 2, bend - 5, sends, TEXT_FONT | {"font-style": "italic"})


def _write(
    svg: ET.Element, x: int, y: int, text: str, font: Mapping[str, str], *, anchor: str = "middle"
) -> None:
    element = ET.SubElement(
        svg, "text", {"x": str(x), "y": str(y), "text-anchor": anchor, "fill": INK, **font}
    )
    element.text = text


if __name__ == "__main__":
    for each in sorted(HERE.glob("*.toml")):
        each.with_suffix(".svg").write_text(drawn(each))
