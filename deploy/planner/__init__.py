"""How many workers of which role a workload needs: measured costs, traces, and a model of the cluster's queues.

`cost` says what a step and a hand-off take, `calibrate` measures it, `traces` reads who asks for what, `cluster` plays
a trace on a cluster that is not there, `search` finds the split that keeps most promises. See docs/PLANNER.md.
"""
