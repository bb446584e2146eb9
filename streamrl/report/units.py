"""Numbers as a person reads them: SI prefixes, per cent, minutes. The charts' script has the same rules for its axes."""

from __future__ import annotations

from streamrl.report.model import Number

UNIT_NAMES = {  # as the title of a chart has it; what is not listed is its own name
    "none": "",
    "text": "",
    "ratio": "%",
    "bytes_per_s": "bytes/s",
    "per_s": "1/s",
    "tokens_per_s": "tokens/s",
    "trajectories_per_s": "trajectories/s",
    "groups_per_s": "groups/s",
}
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_DASH = "–"


def unit_name(unit: str) -> str:
    """What stands behind a chart's title."""
    return UNIT_NAMES.get(unit, unit)


def shown(value: Number | str, unit: str) -> str:
    """A value with its unit.

    >>> shown(0.0123, "seconds"), shown(1234567, "bytes"), shown(0.25, "ratio"), shown(None, "nats"), shown(1834.2, "tokens_per_s")
    ('12.3 ms', '1.23 MB', '25 %', '–', '1.83k tokens/s')
    """
    if value is None:
        return _DASH
    if isinstance(value, str):
        return value
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    if unit == "seconds":
        return duration(value)
    if unit in ("bytes", "bytes_per_s"):
        number, prefix = _scaled(value)
        return f"{number} {prefix}B{'/s' if unit == 'bytes_per_s' else ''}"
    number, prefix = _scaled(value)
    name = unit_name(unit)
    return f"{number}{prefix}{' ' + name if name and unit != 'none' else ''}"


def number_and_unit(value: Number | str, unit: str) -> tuple[str, str]:
    """``shown`` in two pieces, for those who set the unit smaller.

    >>> number_and_unit(1834.2, "tokens_per_s"), number_and_unit(12, "none")
    (('1.83k', 'tokens/s'), ('12', ''))
    """
    name = "" if isinstance(value, str) or value is None or unit in ("ratio", "seconds", "bytes", "bytes_per_s") else unit_name(unit)
    text = shown(value, unit)
    return (text.removesuffix(f" {name}"), name) if name else (text, "")


def exact(value: Number | str, unit: str) -> str:
    """For tables: whole numbers in full, others with ``shown``'s digits.

    >>> exact(1234567, "tokens"), exact(0.5, "none")
    ('1,234,567', '0.5')
    """
    if isinstance(value, float | int) and unit not in ("ratio", "seconds", "bytes", "bytes_per_s") and value == int(value):
        return f"{int(value):,}"
    return shown(value, "none") if unit not in ("ratio", "seconds", "bytes", "bytes_per_s") else shown(value, unit)


def duration(seconds: float) -> str:
    """
    >>> duration(0.00042), duration(75), duration(3.2), duration(93784), duration(500000)
    ('420 µs', '1 min 15 s', '3.2 s', '26 h 3 min', '5 days 18 h')
    """
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.3g} µs" if size else "0 s"
    if size < 1:
        return f"{seconds * 1e3:.3g} ms"
    if size < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 4 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} days {whole % 86400 // 3600} h"


def _scaled(value: float) -> tuple[str, str]:
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}", prefix
    return (f"{value:.3g}" if abs(value) >= 1e-4 or not value else f"{value:.1e}"), ""
