"""Charts: every line and cell is drawn, what comes from outside is escaped, what cannot be drawn is refused early."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from baton.common.errors import ConfigError
from baton.deploy.charts import Cells, Chart, Line, check_kind, svg, write

CHART = Chart("a <b> & c", [Line("one", [(1.0, 1.0), (4.0, 0.5)]), Line("two & more", [(2.0, 0.9)])], 0.9)
CELLS = Cells(("what", "much"), [("<script>", "7")])
SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_goes_through_all_its_points_and_is_named() -> None:
    drawn = ElementTree.fromstring(svg(CHART))
    dots = drawn.findall(f"{SVG}circle")
    assert len(dots) == 3
    xs, ys = ([float(dot.attrib[axis]) for dot in dots] for axis in ("cx", "cy"))
    assert xs[0] < xs[2] < xs[1]
    assert ys[0] < ys[2] < ys[1]  # a larger share is higher up
    texts = [text.text for text in drawn.findall(f"{SVG}text")]
    assert {"one", "two & more", "90% wanted", "share whose promises are kept"} <= set(texts)
    assert {"0", "1", "2", "3", "4"} <= set(texts), "round numbers of requests per second"


def test_a_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    write(CHART, "first\n\nsecond <i>", CELLS, tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "<p><strong>first</strong></p><p>second &lt;i&gt;</p>" in page
    assert "<script>" not in page
    assert "a &lt;b&gt; &amp; c" in page
    write(CHART, "", CELLS, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text() == svg(CHART)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.html, \.svg or \.png"):
        check_kind(tmp_path / "x.pdf")
    with pytest.raises(ConfigError, match="there is no folder"):
        write(CHART, "", CELLS, tmp_path / "nowhere" / "x.html")
    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib, which is not installed"):
            check_kind(tmp_path / "x.png")
    else:
        write(CHART, "", CELLS, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
