"""Durable batches behind `/v1/files` and `/v1/batches`: see docs/JOBS.md.

What there is, pure: `records`, `lines`, `shapes`, `schema`. Where it is kept: `databases`, `tables`, `outcomes`,
`store`, `store_thread`. How lines become answers: `runner`, `answering`. A gateway's part: `api`, `service`. The other
side: `given`, `terminal`, `command`, and `deploy/client/jobs.py`.
"""
