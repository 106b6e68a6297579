"""Files of heads and of their targets: found, read safely, and written whole.

A folder becomes a config and named tensors. A method that takes tensors keeps an account of every key, so that none is
dropped or left at its initial value in silence. Nothing here knows a method; `llamacpp` knows the names in GGUF files.
"""

from .accounting import KeyAccount as KeyAccount
from .accounting import LoadReport as LoadReport
from .accounting import num_indexed as num_indexed
from .config import GGUF_ARCHITECTURE as GGUF_ARCHITECTURE
from .config import GGUF_FILE as GGUF_FILE
from .config import GGUF_ROPE as GGUF_ROPE
from .config import NEUTRAL as NEUTRAL
from .config import ConfigValues as ConfigValues
from .config import mask_token_of as mask_token_of
from .decoder_config import HeadFacts as HeadFacts
from .decoder_config import HeadSpec as HeadSpec
from .decoder_config import Shapes as Shapes
from .decoder_config import check_stated_size as check_stated_size
from .decoder_config import check_stated_target as check_stated_target
from .decoder_config import facts_of_target as facts_of_target
from .decoder_config import speculators_section as speculators_section
from .decoder_config import stated_name as stated_name
from .decoder_config import stated_sizes as stated_sizes
from .files import Checkpoint as Checkpoint
from .files import check_finite as check_finite
from .files import checkpoint_files as checkpoint_files
from .files import read_checkpoint as read_checkpoint
from .files import read_config as read_config
from .files import read_named as read_named
from .files import shapes_in as shapes_in
from .files import tensor_shapes as tensor_shapes
from .files import write_checkpoint as write_checkpoint
from .layer_config import rope_of as rope_of
from .layer_config import speculators_version as speculators_version
from .layer_config import windows_of as windows_of
from .sharing import OpenedHead as OpenedHead
from .sharing import TargetNeededError as TargetNeededError
from .sharing import draft_vocabulary as draft_vocabulary
from .sharing import is_copy as is_copy
from .sharing import shared_embeddings as shared_embeddings
from .sharing import shared_output as shared_output
from .sharing import target_needed as target_needed
from .sharing import vocabulary_output as vocabulary_output
from .sharing import vocabulary_tensors as vocabulary_tensors
from .sharing import were_trained as were_trained
from .target_files import LoadedTarget as LoadedTarget
from .target_files import TargetFiles as TargetFiles
from .weight_maps import read_weight_map as read_weight_map
from .weight_maps import variant_name as variant_name
from .weight_maps import weight_variants as weight_variants
