"""The forwards of a target: a `Scorer` makes the inputs of a draft tree, and a `Forward` runs them.

A `Forward` is what a round needs: a tree, single steps bit for bit (`exact`), or saved states of recurrent layers
(`recurrent`). A `Runner` is how the model then runs: eagerly, or as a captured graph (`graph`).
"""

from .exact import MAX_NATIVE_ROWS as MAX_NATIVE_ROWS
from .exact import exact_scorer as exact_scorer
from .exact import exact_sizes as exact_sizes
from .graph import NODE_BUCKETS as NODE_BUCKETS
from .graph import GraphUse as GraphUse
from .graph import problem_with_capture as problem_with_capture
from .graph import problem_with_graph as problem_with_graph
from .graph import width_for as width_for
from .graph import with_graphs as with_graphs
from .recurrent import has_recurrent_layers as has_recurrent_layers
from .recurrent import target_scorer as target_scorer
from .recurrent import target_shape as target_shape
from .scorer import EagerRunner as EagerRunner
from .scorer import Forward as Forward
from .scorer import Nodes as Nodes
from .scorer import Runner as Runner
from .scorer import Scorer as Scorer
from .tree_forward import AcceptedPath as AcceptedPath
