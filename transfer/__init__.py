"""Moves committed KV between workers, and carries their control frames. Knows nothing of scheduling."""

assert __name__ == "baton.transfer", "import baton.transfer, not transfer: a bare import makes a second copy"
