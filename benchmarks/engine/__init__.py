"""The parts of `benchmarks.bench_engine`: one process per engine, all driven from one parent.

| file | what it has |
|---|---|
| `cases.py`, `child.py` | what every engine's process shares, in any environment: what is measured, and how |
| `baton_end.py`, `transformers_end.py`, `vllm_end.py`, `llamacpp_end.py`, `machine_end.py` | one engine each |
| `contenders.py`, `rounds.py` | the parent's side: who is measured, in which turns |
| `roofline.py`, `report.py` | the least time of a case; the tables |
"""
