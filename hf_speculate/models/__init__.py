"""The models that are sped up: their type and wrappers, and small real ones that are known by a name."""

from .generative import GenerativeModel as GenerativeModel
from .generative import has_own_method as has_own_method
from .generative import held_model as held_model
from .generative import num_embeddings as num_embeddings
from .generative import unwrap as unwrap
from .named import NAMED_TARGETS as NAMED_TARGETS
from .named import QWEN_CODER as QWEN_CODER
from .named import QWEN_CODER_FILE as QWEN_CODER_FILE
from .named import SMOLLM2 as SMOLLM2
from .named import NamedTarget as NamedTarget
from .named import named_file as named_file
