"""The parts of `benchmarks.bench_pd`: who is compared (`systems.py`), and what they are asked (`load.py`)."""
