"""GGUF files as targets whose weights stay packed (`native`): `hf_speculate.load_gguf(path)`.

reading    the header of a file, with every length checked against the file's size
metadata   metadata values by type, and the vocabulary that they describe
tokenizer  the tokenizer in the file
model      the model in the file: configuration, names, shapes
shards     files on the disk or the Hub, and models in several files
matrices   rows of tensors for packing
loading    building the model, and a report on its packed weights
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
