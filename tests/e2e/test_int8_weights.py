"""What rounding the weights to int8 costs the built-in model: bounds on text that neither was made for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.common.engine.batch import BatchRow, Scoring, pack_batch
from baton.common.engine.panels import WeightFormat
from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ConfigError
from baton.common.model.loading import load_tokenizer

MODEL = "smollm2-135m-instruct"
TOKENS = 384
CORPUS = Path(__file__).parents[1] / "data" / "corpus.txt"


def scored(ids: npt.NDArray[np.int32], weights: WeightFormat) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """How likely each token but the first is [tokens - 1], and which would have been the likeliest."""
    pages = np.arange(1, -(-len(ids) // 16) + 1, dtype=np.int32)
    runner = TorchRunner.load(
        MODEL, dtype="float32", num_pages=len(pages) + 1, page_size=16, threads=1, weights=weights
    )
    row = BatchRow(0, ids, len(ids), pages, None, scoring=Scoring(ids[1:], top=1))
    scores = runner.collect(runner.launch(pack_batch([row], 16))).scores[0]
    return np.frombuffer(scores.logprobs, np.float32), np.frombuffer(scores.top_tokens, np.int32)


def test_the_built_in_model_loses_little() -> None:
    ids = np.array(load_tokenizer(MODEL)(CORPUS.read_text())["input_ids"][:TOKENS], np.int32)
    try:
        rounded, chosen = scored(ids, "int8")
    except ConfigError as error:
        pytest.skip(str(error))
    exact, would_choose = scored(ids, "dtype")
    assert not np.array_equal(rounded, exact), "nothing was rounded"
    assert -rounded.mean() < -exact.mean() + 0.03
    assert np.abs(rounded - exact).mean() < 0.1
    assert (chosen == would_choose).mean() > 0.9  # 0.927 where this was written
