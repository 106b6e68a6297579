"""GGUF files as targets whose weights stay packed (`native`): `hf_speculate.load_gguf(path)`.

reading        the header of a file, with every length checked against the file's size
metadata       metadata values by type, and the vocabulary that they describe
tokenizer      the tokenizer in the file
architectures  the architectures that are loaded, and how they differ; delta_net: recurrent layers
rope           its RoPE: scaling, factors of frequencies
model          the model in the file: configuration, names, shapes
shards         files on the disk or the Hub, and models in several files
matrices       rows of tensors for packing, and values of tensors of any type
loading        building the model
report         how its weights lie in memory
stock_methods  methods of transformers' models that count or change weights
vocabulary     a tokenizer of transformers as metadata
writing        files of metadata and tensors
"""

from . import named as named  # which the command line imports before the package
from .architectures import find_architecture as find_architecture
from .loading import load_gguf as load_gguf
from .loading import load_model as load_model
from .matrices import Matrix as Matrix
from .matrices import TensorRows as TensorRows
from .matrices import half_split_order as half_split_order
from .matrices import interleaved as interleaved
from .matrices import read_values as read_values
from .metadata import Metadata as Metadata
from .metadata import check_vocabulary as check_vocabulary
from .model import LLAMA_LAYER as LLAMA_LAYER
from .model import count_layers as count_layers
from .model import plan_model as plan_model
from .native import fuse as fuse
from .reading import GgufFile as GgufFile
from .reading import read_header as read_header
from .report import packing_report as packing_report
from .rope import ROPE_FACTORS as ROPE_FACTORS
from .rope import describe_rope as describe_rope
from .rope import read_rope as read_rope
from .shards import find_file as find_file
from .shards import read_model_file as read_model_file
from .tokenizer import read_tokenizer as read_tokenizer
from .vocabulary import describe_vocabulary as describe_vocabulary
from .vocabulary import vocabulary_of as vocabulary_of
from .writing import OUT_TYPES as OUT_TYPES
from .writing import write_gguf as write_gguf
