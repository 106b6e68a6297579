"""Drafting methods for hf_speculate, each found through its entry point."""
