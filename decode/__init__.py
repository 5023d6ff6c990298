"""The decode worker: asks for a prompt's KV, owns it once it has landed, and produces the tokens."""

assert __name__ == "baton.decode", "import baton.decode, not decode: a bare import makes a second copy"
