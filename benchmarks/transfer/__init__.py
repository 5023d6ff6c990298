"""The parts of `benchmarks.bench_transfer` and `benchmarks.late_write`: two processes per leg, driven from one parent.

| file | what it has |
|---|---|
| `pages.py`, `control.py` | what every end shares, in any environment: which pages, which bytes, commands |
| `baton_end.py`, `nixl_end.py`, `mooncake_end.py`, `zmq_end.py` | programs of one end each |
| `children.py`, `legs.py`, `baselines.py` | the parent's side: processes, what is compared, what nothing can beat |
| `rounds.py`, `scaling.py`, `simulated.py`, `late.py`, `profiles.py` | one measurement each |
| `report.py` | the tables |
"""
