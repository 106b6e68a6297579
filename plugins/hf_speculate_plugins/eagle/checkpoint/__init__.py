"""Checkpoints of EAGLE heads: layouts, loading, saving, conversion."""
