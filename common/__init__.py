"""Vocabulary and mechanisms that both roles use. Imports nothing else of ours."""

assert __name__ == "baton.common", "import baton.common, not common: a bare import makes a second copy of every class"
