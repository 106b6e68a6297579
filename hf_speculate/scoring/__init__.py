"""Scoring by the target: what its class can score, and the forward that does it.

A `Scorer` turns a draft tree into the model's inputs (positions, masks, cache). A `Forward` runs them: plainly,
compiled, bit for bit as single steps, or after the states of recurrent layers. This package also handles what
transformers and PEFT attach to a model: hooks, adapters, device maps. No code here names an architecture.
"""

from .adapters import activated_lora as activated_lora
from .adapters import active_adapters as active_adapters
from .adapters import adapter_fingerprints as adapter_fingerprints
from .adapters import adapter_layers_around as adapter_layers_around
from .adapters import base_module as base_module
from .adapters import effective_module as effective_module
from .adapters import outdated_peft as outdated_peft
from .adapters import pass_on as pass_on
from .adapters import prompt_learning as prompt_learning
from .adapters import sample_bytes as sample_bytes
from .attention import fold as fold
from .attention import grouped_sdpa as grouped_sdpa
from .attention import kernel_fits as kernel_fits
from .attention import placed as placed
from .attention import uninstall_attention as uninstall_attention
from .backends import backends_in_use as backends_in_use
from .backends import tree_backends as tree_backends
from .devices import input_device as input_device
from .devices import last_device as last_device
from .devices import weight_device as weight_device
from .embeddings import embedding_layer as embedding_layer
from .embeddings import embedding_rows as embedding_rows
from .embeddings import is_dense as is_dense
from .embeddings import output_layer as output_layer
from .embeddings import output_rows as output_rows
from .exact import MAX_NATIVE_ROWS as MAX_NATIVE_ROWS
from .exact import exact_scorer as exact_scorer
from .exact import exact_sizes as exact_sizes
from .filler import filler_cache as filler_cache
from .hooks import keep_saveable as keep_saveable
from .hooks import unhooked as unhooked
from .hooks import without_foreign_hooks as without_foreign_hooks
from .masks import LayerType as LayerType
from .masks import layer_windows as layer_windows
from .masks import prompt_starts as prompt_starts
from .masks import visible_prefix as visible_prefix
from .positions import DepthLimit as DepthLimit
from .positions import has_length_dependent_rope as has_length_dependent_rope
from .positions import longrope_switch as longrope_switch
from .positions import num_positions as num_positions
from .positions import takes_position_ids as takes_position_ids
from .recurrent import has_recurrent_layers as has_recurrent_layers
from .recurrent import target_scorer as target_scorer
from .recurrent import target_shape as target_shape
from .scoring import Forward as Forward
from .scoring import Nodes as Nodes
from .scoring import Scorer as Scorer
from .static import NODE_BUCKETS as NODE_BUCKETS
from .static import StaticUse as StaticUse
from .static import compiled as compiled
from .static import problem_with_recording as problem_with_recording
from .static import problem_with_static as problem_with_static
from .static import width_for as width_for
from .static_forward import Along as Along
from .static_forward import text_entries as text_entries
from .static_forward import text_mask as text_mask
from .structure import quantization_label as quantization_label
from .structure import structure_key as structure_key
from .support import Shape as Shape
from .support import has_foreign_attention as has_foreign_attention
from .support import has_native_layers as has_native_layers
from .support import supported_shape as supported_shape
from .tree_kernel import TreePlace as TreePlace
from .tree_kernel import tree_attention as tree_attention
from .walk import Sizes as Sizes
