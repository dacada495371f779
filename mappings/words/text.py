"""Text for people: bytes, tables, names that differ only in numbers."""

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<=_)\d+(?=[.\-]|$)")

Kind = TypeVar("Kind", bound=Hashable)


def bytes_text(nbytes: float) -> str:
    """Bytes for people.

    >>> bytes_text(1023), bytes_text(3 << 20), bytes_text(int(2.5 * 2**40))
    ('1023 B', '3.00 MiB', '2.50 TiB')
    """
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{int(nbytes)} B" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"


def list_text(lengths: Sequence[int]) -> str:
    """``[3, 5]``."""
    return "[" + ", ".join(map(str, lengths)) + "]"


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with their cells in columns; the first row is the header.

    >>> list(table_lines([("a", "bcd"), ("ef", "g")]))
    ['a   bcd', 'ef  g']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def group_names(named: Iterable[tuple[str, Kind]]) -> list[tuple[str, Kind, int]]:
    """Names that differ only in numbers, and are of one kind, as one pattern with their count.

    >>> group_names([("layers.0.w", 1), ("layers.1.w", 1), ("layers.2.w", 2)])
    [('layers.{0..1}.w', 1, 2), ('layers.2.w', 2, 1)]
    """
    groups: dict[tuple[str, Kind], list[str]] = {}
    for name, kind in named:
        groups.setdefault((_NUMBER.sub("#", name), kind), []).append(name)
    return [(_pattern(names), kind, len(names)) for (_, kind), names in groups.items()]


def _pattern(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
    ranges = iter([(min(column), max(column)) for column in columns])

    def spell(_: re.Match[str]) -> str:
        low, high = next(ranges)
        return str(low) if low == high else f"{{{low}..{high}}}"

    return _NUMBER.sub(spell, names[0])
