"""Traces as files. Owns: what is said of a file that cannot be read. Never: a format (`traces`)."""

from __future__ import annotations

from pathlib import Path

from baton.common.errors import ConfigError
from baton.deploy.planner.traces import KNOWN_FORMATS, Trace, read_trace


def read_trace_file(path: Path, most: int) -> Trace:
    """Its first `most` requests. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines, path.name, most)
    except OSError as error:
        raise ConfigError("--trace", str(path), f"cannot be read: {error.strerror}", KNOWN_FORMATS) from error
    except UnicodeDecodeError as error:
        raise ConfigError("--trace", str(path), "is no file of text", KNOWN_FORMATS) from error
