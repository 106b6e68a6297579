"""Sub-commands of `hf-speculate` for heads, found by entry point: thin, the work is done by library functions."""
