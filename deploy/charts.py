"""Lines over an axis, as SVG, in pages of HTML that load nothing, or as PNG where matplotlib is installed. Pure, but
for what writes a file.

Owns: the drawing of results for people. Never: a number that it was not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from baton.common.errors import ConfigError

WIDTH, HEIGHT = 820, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 32, 56
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#868e96")
KINDS = (".html", ".svg", ".png")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto; padding: 0 1rem; color: #212529; }
h1 { font-size: 1.3rem; } table { border-collapse: collapse; } td, th { padding: .25rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; } tr { border-bottom: 1px solid #dee2e6; }
"""

At = Callable[[float, float], tuple[float, float]]


class Line(NamedTuple):
    """`points`: (x, share), the share from 0 to 1."""

    name: str
    points: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Shares over rates, with the share that is wanted."""

    title: str
    lines: Sequence[Line]
    wanted: float
    x_name: str = "requests per second"
    y_name: str = "share whose promises are kept"


class Cells(NamedTuple):
    """A table for a page."""

    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def check_kind(path: Path) -> None:
    """Raises ConfigError for what cannot be drawn there: before anything is measured for it."""
    if path.suffix not in KINDS:
        raise ConfigError("--out", str(path), "is drawn as .html, .svg or .png", "--out plan.html")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        way_out = "pip install 'baton-pd[plot]', or --out plan.html, which needs nothing"
        raise ConfigError("--out", str(path), "PNG is drawn by matplotlib, which is not installed", way_out)
    if not path.parent.is_dir():
        raise ConfigError("--out", str(path), f"there is no folder {path.parent}", "--out plan.html")


def write(chart: Chart, text: str, table: Cells, path: Path) -> None:
    """`text` and `table` go into a page. Raises ConfigError when the file cannot be made."""
    check_kind(path)
    try:
        if path.suffix == ".png":
            _write_png(chart, path)
        else:
            drawn = svg(chart) if path.suffix == ".svg" else page(chart, text, table)
            path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(path), f"cannot be written: {error.strerror}", "--out plan.html") from error


def page(chart: Chart, text: str, table: Cells) -> str:
    """HTML that loads nothing. The first line of the text is what a reader came for."""
    first, *others = [escape(line) for line in text.splitlines() if line] or [""]
    paragraphs = f"<p><strong>{first}</strong></p>" + "".join(f"<p>{line}</p>" for line in others)
    head = f'<meta charset="utf-8"><title>Baton: {escape(chart.title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(chart.title)}</h1>{paragraphs}{svg(chart)}{_table(table)}"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _table(table: Cells) -> str:
    rows = ["".join(f"<th>{escape(name)}</th>" for name in table.names)]
    rows += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def svg(chart: Chart) -> str:
    top = max((x for line in chart.lines for x, _ in line.points), default=1.0)
    inner = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, share: float) -> tuple[float, float]:
        return LEFT + inner[0] * x / top, TOP + inner[1] * (1 - share)

    parts = [_grid(at, top, chart.x_name), _text(4, TOP - 10, chart.y_name, "start")]
    x1, y = at(0, chart.wanted)
    x2, _ = at(top, chart.wanted)
    parts.append(f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="#c92a2a" stroke-dasharray="5 4"/>')
    parts.append(_text(x2 + 8, y + 4, f"{chart.wanted:.0%} wanted", "start", "#c92a2a"))
    for number, (line, colour) in enumerate(zip(chart.lines, COLOURS, strict=False)):
        points = [at(x, share) for x, share in line.points]
        if points:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        legend_y = HEIGHT - BOTTOM - 24 * (1 + number)
        parts.append(_text(WIDTH - RIGHT + 12, legend_y, line.name, "start", colour))
    namespace = 'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg {namespace} viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">{"".join(parts)}</svg>'


def _grid(at: At, top: float, x_name: str) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x1, y), (x2, _) = at(0, share), at(top, share)
        parts.append(f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="#e9ecef"/>')
        parts.append(_text(x1 - 8, y + 4, f"{share:.0%}", "end"))
    step = _round_step(top / 8)
    for number in range(int(top / step) + 1):
        x, y = at(step * number, 0.0)
        parts.append(_text(x, y + 20, f"{step * number:.3g}", "middle"))
    x, y = at(top / 2, 0.0)
    parts.append(_text(x, y + 42, x_name, "middle"))
    return "".join(parts)


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#495057") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _write_png(chart: Chart, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for line, colour in zip(chart.lines, COLOURS, strict=False):
        axes.plot([x for x, _ in line.points], [share for _, share in line.points], "o-", color=colour, label=line.name)
    axes.axhline(chart.wanted, color="#c92a2a", linestyle="--", linewidth=1)
    axes.set(xlabel=chart.x_name, ylabel=chart.y_name, title=chart.title)
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    figure.savefig(path)
