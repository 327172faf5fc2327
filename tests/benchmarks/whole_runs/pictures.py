"""Figures of the benchmarks: drawn without a screen, and written whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from storage.disk.atomic_files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, which needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import: only who draws pays
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG file, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
