"""Data for training: reading, encoding with a loss mask, packing."""

from .encoding import Encoded, Encoder
from .loading import Source, load_records
from .options import DataOptions
from .packing import Collator, RowDataset, StreamedRows, best_fit_decreasing
from .preparing import DataReport, PreparedData, prepare_data
from .records import read_record


__all__ = [
    "Collator",
    "DataOptions",
    "DataReport",
    "Encoded",
    "Encoder",
    "PreparedData",
    "RowDataset",
    "Source",
    "StreamedRows",
    "best_fit_decreasing",
    "load_records",
    "prepare_data",
    "read_record",
]
