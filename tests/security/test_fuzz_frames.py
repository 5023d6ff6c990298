"""Whatever comes over whichever socket: nothing ends, nothing grows, what is refused is counted, and honest clients get
their answers.

`make fuzz-frames` sends a million; FUZZ_SEED draws others, FUZZ_FRAMES so many.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import pytest
from fuzz_siege import Siege
from fuzz_victims import HONEST, MAD

from baton.transfer.transports.ucx import why_unavailable

SEED = int(os.environ.get("FUZZ_SEED", "1"))
FRAMES = int(os.environ.get("FUZZ_FRAMES", "1000000"))
UCX = pytest.param(("ucx",), marks=pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable()))
MOST_GROWTH_BYTES = 48 << 20
"""Of the one process that has everything, after the warm-up."""
MOST_MORE_OBJECTS = 30_000
MOST_MORE_DESCRIPTORS = 120
"""Connections of strangers that have not been shown the door yet."""
MOST_SERIES = 2000
"""A pair of workers and a lane has some 170."""
LABELS = {
    "worker": {*HONEST, *MAD, "controller"},
    "peer": {*HONEST, *MAD},
    "lane": {"", "local", "tcp", "zmq", "ucx"},
    "key": {""},
}


def series(url: str) -> list[str]:
    return [line for line in httpx.get(url + "/metrics").text.splitlines() if not line.startswith("#")]


def besiege(seed: int, frames: int, warm_up: int, folder: Path, lanes: tuple[str, ...]) -> None:
    siege = Siege(seed, folder, lanes)
    try:
        siege.rounds(warm_up)
        before = siege.account()
        siege.rounds(frames)
        page = series(siege.url)
        after = siege.rest()
    except BaseException:
        print(f"\nFUZZ_SEED={seed} FUZZ_FRAMES={frames} broke after {siege.total} frames, over {', '.join(lanes)}")
        raise
    finally:
        siege.close()
    grown = {name: (getattr(before, name), getattr(after, name)) for name in ("rss_bytes", "objects", "descriptors")}
    asker = siege.asker
    print(f"\n{siege.total} frames over {', '.join(lanes)}: {dict(siege.sent)}")
    print(f"{asker.right} right answers, {asker.told_later} told to come later; {grown}, {len(page)} series")
    assert not any(after.open.values()), after.open
    assert after.rss_bytes - before.rss_bytes < MOST_GROWTH_BYTES, grown
    assert after.objects - before.objects < MOST_MORE_OBJECTS, grown
    assert after.descriptors - before.descriptors < MOST_MORE_DESCRIPTORS, grown
    assert len(page) < MOST_SERIES, "what peers say becomes labels"
    for name, value in re.findall(r'(\w+)="([^"]*)"', "\n".join(page)):
        assert value in LABELS.get(name, {value}), f"a peer has written {name}={value!r}"
    assert asker.right > 10
    for worker, counters in after.counters.items():
        heard = sum(counters[f"mesh.{name}"] for name in ("received", "malformed", "foreign_epoch", "foreign_key"))
        assert heard >= siege.sent[f"to {worker}"], f"frames to {worker} have vanished"
        refused = [line for line in page if line.startswith("baton_refused_frames_total") and f'"{worker}"' in line]
        assert refused or worker == "controller", f"{worker} counts nothing"


def test_a_slice_of_the_fuzzing_breaks_nothing(tmp_path: Path) -> None:
    besiege(SEED, 4000, 1000, tmp_path, ("local", "tcp", "zmq"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lanes", [("local", "tcp", "zmq"), ("tcp",), ("zmq",), UCX])
def test_a_million_frames_break_nothing(tmp_path: Path, lanes: tuple[str, ...]) -> None:
    besiege(SEED, FRAMES // 4, FRAMES // 40, tmp_path, lanes)
