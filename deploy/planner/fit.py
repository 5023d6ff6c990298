"""How far a fitted formula is from what was measured. Pure."""

from __future__ import annotations

import numpy as np

from baton.common.least_squares import F64
from baton.deploy.planner.cost import FitError


def fit_error(predicted: F64, seconds: F64) -> FitError:
    """Both [n]."""
    shares = np.abs(predicted - seconds) / seconds
    return FitError(points=len(seconds), mean=float(shares.mean()), worst=float(shares.max()))
