"""Draft trees, their plans, and the round that scores one.

Shape letters, used in the whole package: B batch, T committed length, N nodes, D depth, K children per node, V target
vocabulary, Vd draft vocabulary, H hidden size, L layers, M cache capacity.

Node 0 of every tree is the root: the last committed token, whose entry is not yet in the KV cache. A tree with one
branch is a chain. A tree with N = 1 has no draft. The *structure* (parents) is compiled once to a `TreePlan`: depths
and ancestor mask. Trees of equal structure share a plan.
"""

from .draft_tree import DraftTree as DraftTree
from .draft_tree import HostFacts as HostFacts
from .host_tree import HostTree as HostTree
from .host_tree import TreeRow as TreeRow
from .plan import PADDING_PARENT as PADDING_PARENT
from .plan import ROOT_PARENT as ROOT_PARENT
from .plan import TreePlan as TreePlan
from .plan import additive as additive
from .plan import node_depths as node_depths
from .round import Round as Round
from .round import RoundSeconds as RoundSeconds
