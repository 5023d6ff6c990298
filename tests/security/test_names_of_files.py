"""What clients call their files is text: never a path, a header or a label. (Ids as paths: `test_hostile_http.py`.)"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_loopback import Loopback, Served, saying, serving

NAMES = [
    "../../../../tmp/baton-was-here",
    "/tmp/baton-was-here",
    "..\\..\\baton-was-here",
    "a\x00/../baton-was-here",
    "..%2f..%2fbaton-was-here",
    "....//....//baton-was-here",
    "\u2025/\uff0e\uff0e/baton-was-here",
    'x"; filename="baton-was-here',
    "\u202ebaton-was-here",
    "x" * 5000,
    ".",
    "..",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying("abc"))) as one:
        yield one


def where_it_could_be() -> set[str]:
    folders = (Path.cwd(), Path("/tmp"), Path(os.environ["BATON_STATE_DIR"]))
    return {name for folder in folders for name in os.listdir(folder) if "baton-was-here" in name}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_leads_nowhere(served: Served, name: str) -> None:
    content = '{"custom_id": "1"}\n'
    made = served.http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"})
    assert made.status_code in (200, 201, 400), made.text
    assert where_it_could_be() == set()
    if made.status_code != 400:
        file = made.json()["id"]
        read = served.http.get(f"/v1/files/{file}/content")
        assert read.text == content
        assert not any("baton-was-here" in value for value in read.headers.values())
        assert served.http.delete(f"/v1/files/{file}").status_code == 200
    assert "baton-was-here" not in served.http.get("/metrics").text
