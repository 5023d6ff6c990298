"""Non-negative least squares for a handful of coefficients. Pure.

Errors are relative: a step of 10 ms that is wrong by 1 ms counts as much as one of 1 s that is wrong by 100 ms. With at
most four coefficients every choice of those that are zero is tried, so the answer is the best one, and no solver is
needed.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
MOST_COEFFICIENTS = 4


def non_negative_fit(features: F64, seconds: F64) -> F64:
    """Coefficients c >= 0 for which `features @ c` is nearest to `seconds`, by relative error. [n, k], [n] -> [k]"""
    count = features.shape[1]
    assert count <= MOST_COEFFICIENTS, "every subset is tried"
    assert (seconds > 0).all(), "what took no time was not measured"
    scaled = features / seconds[:, None]
    wanted = np.ones(len(seconds))
    best, best_error = np.zeros(count), float(len(seconds))
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = list(chosen)
            found = np.linalg.lstsq(scaled[:, columns], wanted, rcond=None)[0]
            error = float(((scaled[:, columns] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(count), error
                best[columns] = found
    return best
