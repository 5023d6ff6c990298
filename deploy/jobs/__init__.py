"""Durable batches behind `/v1/files` and `/v1/batches`: see docs/JOBS.md.

`records`, `lines`: what there is, pure · `schema`, `databases`, `store`: where it is kept · `runner`, `answering`: how
lines become answers · `api`: HTTP · `client`, `command`: the other side.
"""
