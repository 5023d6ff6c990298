"""The prefill worker: computes prompts and hands their KV to a decode worker."""

assert __name__ == "baton.prefill", "import baton.prefill, not prefill: a bare import makes a second copy"
