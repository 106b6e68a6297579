"""Training of Medusa heads.

`MedusaMethod` trains heads on a frozen target, `Medusa2Method` together with an adapter of it. Fresh heads say what the
target says, published ones can be gone on from.
"""
