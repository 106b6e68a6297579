"""Checkpoints of Medusa heads: layouts, conversion, and the backbone of Medusa-2."""
