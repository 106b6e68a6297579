"""Training of EAGLE heads: drafting is unrolled over a whole text at once.

`Eagle3Method` trains a head against the target's distribution, `Eagle1Method` against its next feature as well. Fresh
heads are shaped after the target, published ones can be gone on from.
"""
