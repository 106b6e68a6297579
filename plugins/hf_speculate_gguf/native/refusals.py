"""Refusals: forwards and drafts that the kernel does not compute, with the reason.

Functions of this package raise `Refused` as soon as they know, before anything is changed. The forwards of models and
heads catch it and let the modules compute. A forward that the kernel computes builds no text.
"""

from __future__ import annotations


class Refused(Exception):
    """The kernel does not compute this, and nothing was changed. The message is the reason, a noun phrase."""


ACTIVE_ADAPTER = "an active adapter"
AUTOCAST = "autocast"
GRADIENTS = "gradients, which the kernel does not compute"
DISPATCH_MODE = "a torch dispatch mode, which must see every operation"
MIXED_WEIGHTS = "weights that were moved, converted or exchanged for others that the kernel cannot read"
NO_KERNEL = "no kernel on this machine, as there is no C++ compiler that works (`pip install ziglang` brings one)"
UNREADABLE_MASK = "an attention mask that is not an additive or boolean one for these queries"
