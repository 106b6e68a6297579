"""Drafts from the constraints of a request: grammars, JSON schemas, `prefix_allowed_tokens_fn`."""

from .drafter import GrammarDrafter as GrammarDrafter
