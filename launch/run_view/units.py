"""Numbers as a human reads them."""

from datetime import datetime
from math import isfinite

UNKNOWN = "-"
"""Text where nothing was measured."""


def count(value: float | None) -> str:
    """Format a count with at most four digits: 950, 12.3k, 4.56M."""
    if value is None or not isfinite(value):
        return UNKNOWN
    for limit, scale, suffix in ((9_999.5, 1, ""), (999_950, 1e3, "k"), (999_950_000, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / scale:.0f}" if not suffix else f"{value / scale:.3g}{suffix}"
    return f"{value / 1e9:.3g}G"


def per_time(value: float | None) -> str:
    """Format a rate, of which a small one keeps a decimal: 3.2, 12.3k."""
    return f"{value:.1f}" if value is not None and value < 10 else count(value)


def fraction(value: float | None) -> str:
    """Format a rate between 0 and 1, such as an accuracy or a mean reward."""
    return UNKNOWN if value is None or not isfinite(value) else f"{value:.3f}"


def share(value: float | None) -> str:
    """Format a fraction as a percentage: 0.25%, 12.5%."""
    return UNKNOWN if value is None or not isfinite(value) else f"{100 * value:.3g}%"


def size(value_bytes: float) -> str:
    """Format a size in binary units: 512 B, 1.4 GiB."""
    for suffix in ("B", "KiB", "MiB"):
        if value_bytes < 1000:
            return f"{value_bytes:.3g} {suffix}"
        value_bytes /= 1024
    return f"{value_bytes:.3g} GiB"


def duration(value_s: float | None) -> str:
    """Format a time: 0.42 s, 8 min 05 s, 3 h 20 min."""
    if value_s is None or not isfinite(value_s):
        return UNKNOWN
    if value_s < 59.95:
        return f"{value_s:.2f} s" if value_s < 9.995 else f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def since(time_s: float, now_s: float) -> str:
    """Format when something was last so: 21:03:11 (47.0 s). Both are seconds since the epoch."""
    return (
        f"{datetime.fromtimestamp(time_s).astimezone():%H:%M:%S} ({duration(max(0, round(now_s - time_s)))})"
    )
