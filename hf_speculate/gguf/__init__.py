"""GGUF files as targets whose weights stay packed (`native`): `hf_speculate.load_gguf(path)`.

reading    the header, every length checked against the size of the file
metadata   its values by type, and what they say of the vocabulary
tokenizer  the tokenizer in the file
model      which model the file holds: configuration, names, shapes
shards     which file on the disk or the Hub, and models in several
loading    builds the model, and reports on its packed weights
"""

from ..native import fuse as fuse
from .loading import PackingReport as PackingReport
from .loading import load_gguf as load_gguf
from .loading import load_model as load_model
from .loading import packing_report as packing_report
from .loading import read_tokenizer as read_tokenizer
from .model import plan_model as plan_model
from .shards import find_file as find_file
from .shards import read_model_file as read_model_file
