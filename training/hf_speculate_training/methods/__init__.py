"""Training methods: what one is, how an installed one is found, and what several of them are made from.

A `TrainingMethod` is a module around a decode head that turns a batch and the target's states into a loss; it is found
by name through the entry-point group `hf_speculate.training_methods`, the built-in ones (`eagle`, `medusa`) like any
other. Entries (which predictions count), losses (plain and lean in memory), the teacher and the draft vocabulary are
the parts that they share, and that a method of your own can take.
"""
