"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` is everything that a run depends on; `prepare` loads what it names, and `train_head` trains with
`HeadTrainer` (transformers' loop), measures acceptance through the decoding loop, and writes head, card, provenance and
curves. No training method is named here: each is found by the name in the recipe and reached through `TrainingMethod`.
"""
