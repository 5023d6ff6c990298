"""The commands of `baton`, by what a person wants; `deploy/cli.py` puts them together."""
