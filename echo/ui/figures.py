"""Figures as files: made without a display, written whole or with a reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echo.core.errors import StorageError
from echo.core.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAINT = "#bbbbbb"


def new_figure(size: tuple[float, float], *, dpi: int, extra: str, wanted_by: str) -> Figure:
    """Return an empty figure.

    Args:
        size: width and height, inches.
        dpi: dots per inch.
        extra: of this distribution, which installs matplotlib.
        wanted_by: what is to be drawn, for the message.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    import_extra("matplotlib", extra=extra, wanted_by=wanted_by)
    # Without pyplot: no global state and no display, whatever the user's backend is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> None:
    """Leave out what says nothing, and put a faint grid behind the rest."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=FAINT, alpha=0.4, linewidth=0.6)
    axes.set_axisbelow(True)


def save_figure(figure: Figure, out_png: Path) -> Path:
    """Write a figure; return the file.

    Args:
        figure: what to write.
        out_png: file to write; its directory is made if missing.

    Raises:
        StorageError: if it cannot be written.
    """
    try:
        out_png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_png)
    except OSError as error:
        raise StorageError(f"{out_png}: cannot be written: {error.strerror}") from error
    return out_png
