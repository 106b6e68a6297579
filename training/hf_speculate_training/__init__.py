"""Training of speculative heads for hf_speculate (see training/README.md for what exists)."""
