"""Requests that schemathesis draws from the API's own document: whatever they hold, none is answered by a 5xx."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from http_loopback import Loopback, serving

SCHEMATHESIS = Path(__file__).parents[2] / ".venv-fuzz" / "bin" / "schemathesis"
EXAMPLES = 200
"""Of each operation; most are refused, for one of their many fields."""
LEAST_ANSWERED = 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="make fuzz installs it")
def test_no_drawn_request_is_answered_by_a_5xx(tmp_path: Path) -> None:
    with serving(Loopback()) as served:
        command = [str(SCHEMATHESIS), "run", f"{served.url}/openapi.json"]
        command += ["--checks", "not_a_server_error", "--max-examples", str(EXAMPLES), "--continue-on-failure"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-5000:]
        answered = len(served.worker.submits)
        assert served.http.get("/health").status_code == 200
    assert answered > LEAST_ANSWERED, "hardly anything came as far as a worker"
