"""Moves KV between workers that keep it differently: which byte of which source rank goes where. Pure.

`sides` says how one side keeps a model's KV, `planner` computes what moves, `execute` carries it out on numpy memory,
`models` describes the sides that our own buffers make. Not connected to the lanes: see docs/TRANSFER-PROTOCOL.md.
"""
