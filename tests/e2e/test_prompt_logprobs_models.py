"""Log probabilities of prompts against `transformers`: dense, sliding, capped and recurrent models, in any chunks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from family_rig import COMPONENTS, FAMILIES, VOCAB, save_random_model
from model_rig import Sequence, run_mixed
from transformers import AutoModelForCausalLM

from baton.common.engine.torch_runner import TorchRunner
from baton.common.kv.layout import Component
from baton.common.prompt_logprobs import join_chunks

LENGTHS = (1, 2, 17, 40, 90)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2", "falcon-h1", "lfm3"])
def test_scores_are_those_of_transformers_whatever_the_chunks(family: str, tmp_path: Path) -> None:
    save_random_model(FAMILIES[family], tmp_path)
    torch.set_num_threads(1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    runner = TorchRunner.load(
        str(tmp_path), dtype="float32", num_pages=_pages(family, 300), page_size=4, sliding_groups=True, threads=1
    )
    runs = []
    for chunks in ((512,), (1, 7, 16)):
        sequences = [Sequence(i, prompt, max_tokens=2, scored_top=3) for i, prompt in enumerate(prompts)]
        run_mixed(runner, sequences, max_rows=4, seed=5, chunks=chunks)
        runs.append([join_chunks(sequence.scores) for sequence in sequences])
    for prompt, found, in_chunks in zip(prompts, *runs, strict=True):
        if len(prompt) == 1:
            assert found is in_chunks is None
            continue
        with torch.inference_mode():
            expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1].float(), -1)
        for scores in (found, in_chunks):
            assert scores is not None
            assert len(scores) == len(prompt) - 1
            for place, (rank, logprob, best) in enumerate(scores.rows()):
                row = expected[place]
                assert logprob == pytest.approx(float(row[prompt[place + 1]]), abs=2e-3)
                assert [value for _, value in best] == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
                assert abs(rank - int((row > row[prompt[place + 1]]).sum()) - 1) <= 1


def _pages(family: str, count: int) -> dict[Component, int] | int:
    components = COMPONENTS[family]
    return dict.fromkeys(components, count) if len(components) > 1 else count
