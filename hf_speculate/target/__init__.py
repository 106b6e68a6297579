"""The target: the model that is sped up, what it can score, and what others have attached to it.

`models` finds it inside wrappers. The other modules read its layer types, positions, devices, embeddings and structure,
and handle what transformers and PEFT attach: hooks, adapters, device maps. No code here names an architecture.
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
from .devices import input_device as input_device
from .devices import last_device as last_device
from .devices import weight_device as weight_device
from .embeddings import embedding_layer as embedding_layer
from .embeddings import embedding_rows as embedding_rows
from .embeddings import is_dense as is_dense
from .embeddings import output_layer as output_layer
from .embeddings import output_rows as output_rows
from .filler import filler_cache as filler_cache
from .hooks import foreign_hooks as foreign_hooks
from .hooks import has_foreign_hooks as has_foreign_hooks
from .hooks import keep_saveable as keep_saveable
from .hooks import may_hold_rows as may_hold_rows
from .hooks import unhooked as unhooked
from .hooks import without_foreign_hooks as without_foreign_hooks
from .layers import LayerType as LayerType
from .layers import layer_types as layer_types
from .layers import layer_types_of as layer_types_of
from .layers import layer_windows as layer_windows
from .models import GenerativeModel as GenerativeModel
from .models import decoder_of as decoder_of
from .models import has_own_method as has_own_method
from .models import held_model as held_model
from .models import num_embeddings as num_embeddings
from .models import unwrap as unwrap
from .native import NativeRunner as NativeRunner
from .native import has_native_layers as has_native_layers
from .native import native_decoder_runner as native_decoder_runner
from .native import native_runner as native_runner
from .native import problem_without_kernel as problem_without_kernel
from .native import takes_tree_masks as takes_tree_masks
from .positions import DepthLimit as DepthLimit
from .positions import has_length_dependent_rope as has_length_dependent_rope
from .positions import longrope_switch as longrope_switch
from .positions import num_positions as num_positions
from .positions import takes_position_ids as takes_position_ids
from .structure import quantization_label as quantization_label
from .structure import structure_key as structure_key
from .structure import unvouched_modules as unvouched_modules
from .support import Shape as Shape
from .support import counts_along_cache as counts_along_cache
from .support import has_foreign_attention as has_foreign_attention
from .support import ignores_masks as ignores_masks
from .support import supported_shape as supported_shape
