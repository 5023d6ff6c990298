"""The Triton kernel in Triton's interpreter, on arrays."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from baton.transfer.copying import Copy
from baton.transfer.device_copier import RowCopy
from baton.transfer.transports.base import Bytes, UnitIds

HAS_TRITON = importlib.util.find_spec("triton") is not None
WITHOUT = "Triton is not installed (pip install baton-pd[gpu])"


def interpreted_kernel() -> RowCopy:
    """Skips the test that asks, where Triton is not installed."""
    if not HAS_TRITON:
        pytest.skip(WITHOUT)
    with interpreting():
        rows = importlib.import_module("baton.transfer.triton_rows")

    def kernel(*sides: torch.Tensor | None) -> None:
        with interpreting():
            rows.copy_rows_on_device(*sides)

    return kernel


@contextmanager
def interpreting() -> Iterator[None]:
    """Triton looks when a kernel is defined, and when it loads parts of itself."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        yield


def interpreted_copy() -> Copy:
    """Skips likewise."""
    kernel = interpreted_kernel()

    def copy(target: Bytes, target_ids: UnitIds | None, source: Bytes, source_ids: UnitIds | None) -> None:
        kernel(torch.from_numpy(target), _ids(target_ids), torch.from_numpy(source), _ids(source_ids))

    return copy


if (
    HAS_TRITON
):  # while tests are collected: torch imports it sooner or later, and what it has of itself stays as it was then
    with interpreting():
        importlib.import_module("triton.language")


def _ids(ids: np.ndarray | None) -> torch.Tensor | None:
    return None if ids is None else torch.from_numpy(ids)
