"""Measurements; run with `python -m` from the repository root. Nothing of the product imports them."""
