"""`baton bench`: load on any OpenAI-compatible server, what came of it, and whether splitting prefill from decode is
better for it. `workload` says what is asked, `load` asks it, `report` tells, `command` is the shell."""
