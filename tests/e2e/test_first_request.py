"""Whatever a process would load, compile or import for its first request is there before it serves one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIRST_REQUEST = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import encodings.idna, http.client  # the client's
from urllib.parse import urlsplit

from http_loopback import serving

def ask(url, path, body):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    body = json.dumps({"model": "fake", "max_tokens": 4} | body)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.read()
    connection.close()

chat = {"messages": [{"role": "user", "content": "hello"}]}
asked = {
    "stream": ("/v1/chat/completions", chat | {"stream": True}),
    "answer": ("/v1/chat/completions", chat),
    "completion": ("/v1/completions", {"prompt": "hello", "stream": True}),
}
with serving() as served:
    before = set(sys.modules)
    ask(served.url, *asked[sys.argv[2]])
    print(json.dumps(sorted(set(sys.modules) - before)))
"""

FIRST_CONVERSATION = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from dataclasses import replace

from baton.common.config import ClusterConfig, ModelConfig
from baton.deploy.tokenizer import load_served_model

model = load_served_model(replace(ClusterConfig(), model=ModelConfig(max_model_len=256)))
before = set(sys.modules)
assert model.tokenizer.decode(model.encode_chat([{"role": "user", "content": "hello"}]))
print(json.dumps(sorted(set(sys.modules) - before)))
"""


WHOLE_CLUSTER = """
import json, multiprocessing, os, sys, tempfile
sys.path[:0] = json.loads(sys.argv[1])
import encodings.idna, http.client  # the client's
from urllib.parse import urlsplit

from fuzz_victims import Arena, Up, Victims, free_ports

ours, theirs = multiprocessing.Pipe()
with tempfile.TemporaryDirectory() as folder:
    Victims(theirs, Arena(("local", "zmq"), *free_ports()), folder).start()
    while not isinstance(up := ours.recv(), Up):
        pass
    before = set(sys.modules)
    connection = http.client.HTTPConnection(urlsplit(up.url).netloc, timeout=60)
    body = json.dumps({"model": "fake", "prompt": list(range(100)), "max_tokens": 4})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.read()
    print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
os._exit(0)
"""


def imported_by(program: str, *arguments: str) -> list[str]:
    """What `program` says, in a process that has done nothing else yet."""
    here = Path(__file__).parent
    paths = json.dumps([str(here), str(here.parent / "security"), *sys.path])
    command = [sys.executable, "-c", program, paths, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(said, list)
    return said


@pytest.mark.parametrize("asked", ["stream", "answer", "completion"])
def test_a_gateways_first_request_imports_nothing(asked: str) -> None:
    assert imported_by(FIRST_REQUEST, asked) == []


def test_a_models_first_conversation_imports_nothing() -> None:
    """Its chat template has been compiled."""
    assert imported_by(FIRST_CONVERSATION) == []


def test_a_clusters_first_request_imports_nothing() -> None:
    """Neither its workers: a prompt is handed over from one to the other."""
    assert imported_by(WHOLE_CLUSTER) == []
