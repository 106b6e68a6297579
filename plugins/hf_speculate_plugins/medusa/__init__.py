"""Medusa: decoding heads on the target's last hidden state, drafted as a static tree (arXiv:2401.10774)."""

from .choices import computed_choices, measured_accuracies
from .drafter import MedusaDrafter, MedusaOptions
from .head import MedusaHeads


__all__ = ["MedusaDrafter", "MedusaHeads", "MedusaOptions", "computed_choices", "measured_accuracies"]
