"""Makes smollm2-135m-instruct.json: what `transformers` `generate` answers, greedy, in float32, for 200 prompts.

Run by `make references` (about 20 minutes on one core). A prompt is a list of slices of `corpus_tokens`, the tokens of
../corpus.txt followed by a few chat prompts, so that the file needs no tokenizer to be read. With every output token
goes the distance of its logit to the second best: a mismatch where it is below 1e-4 is a tie, any other is a bug.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

from baton.common.model.loading import load_model, load_tokenizer

MODEL = "smollm2-135m-instruct"
NEW_TOKENS = 32
PROMPTS = 200
HERE = Path(__file__).parent
QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about rain.",
    "Give me a list of three fruits that are red.",
    "Explain in one sentence what a relay race is.",
    "How do I reverse a list in Python?",
    "Translate to German: good morning.",
    "hi",
    "Why does bread go stale?",
)
EDGES = (16, 32, 48, 64, 128, 256, 512, 768, 1024, 1536, 2048)  # of pages and of chunks
Slices = list[tuple[int, int]]


def plan_prompts(corpus_len: int, chats: Slices) -> list[Slices]:
    """200 prompts of 1 to 3,000 tokens: chats, every short length, both sides of every edge, families that share
    a prefix up to and around an edge, and random lengths in between. The same in every run."""
    rng = random.Random(20240607)

    def piece(length: int) -> tuple[int, int]:
        start = rng.randrange(corpus_len - length + 1)
        return start, start + length

    prompts: list[Slices] = [[chat] for chat in chats]
    lengths = [*range(1, 19), *(edge + d for edge in EDGES for d in (-1, 0, 1)), 2999, 3000]
    prompts += [[piece(length)] for length in lengths]
    for shared in (15, 16, 17, 33, 64, 100, 257, 511, 512, 1000):
        prefix = piece(shared)
        prompts += [[prefix, piece(tail)] for tail in (1, 15, 16, 17, 90)]
        prompts.append([prefix])
        prompts.append([prefix, piece(shared // 2 + 1), piece(7)])
    while len(prompts) < PROMPTS:
        prompts.append([piece(int(2 ** rng.uniform(4, 10.5)))])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE / f"{MODEL}.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(MODEL)
    model = load_model(MODEL, "float32")
    tokens: list[int] = tokenizer((HERE.parent / "corpus.txt").read_text())["input_ids"]
    corpus_len = len(tokens)
    chats: Slices = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        chats.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    entries = []
    started = time.monotonic()
    for slices in plan_prompts(corpus_len, chats):
        prompt = [token for start, stop in slices for token in tokens[start:stop]]
        outputs, margins = answer(model, prompt)
        entries.append({"slices": slices, "length": len(prompt), "outputs": outputs, "margins": margins})
        print(f"{len(entries)}/{PROMPTS} {len(prompt)} tokens, {time.monotonic() - started:.0f} s", flush=True)
    header = {"model": MODEL, "dtype": "float32", "max_tokens": NEW_TOKENS, "stop_token_ids": [2]}
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    header_text = json.dumps({**header, "corpus_tokens": tokens}, separators=(",", ":"))
    options.output.write_text(f'{header_text[:-1]},\n"prompts":[\n{lines}\n]}}\n')


def answer(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy output tokens (a stop token is the last one) and, per token, its lead over the second best."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [torch.topk(step[0].float(), 2).values for step in result.logits]
    margins = [float(f"{float(pair[0] - pair[1]):.3g}") for pair in best]
    return result.sequences[0, len(prompt) :].tolist(), margins


if __name__ == "__main__":
    main()
