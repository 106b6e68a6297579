"""Data for training: records read, encoded with a loss mask, packed into rows.

`prepare_data` reads a source in any of the usual forms, marks the tokens that the target is to emit, and accounts for
every record that cannot be used. `RowDataset` packs documents into rows. `Collator` makes a `Batch` of rows, with the
document of every token, its position there, and whether it counts.
"""

from .encoding import Encoder
from .loading import Records, Source, load_records
from .packing import NO_DOCUMENT, Batch, Collator, Row, RowDataset, StreamedRows, best_fit_decreasing, make_row
from .prepared import DataOptions, PreparedData, content_fingerprint, context_length, documents_fingerprint
from .preparing import prepare_data
from .records import Chat, Completion, Example, HeldOut, Message, Plain, RecordError, Tokens, read_record


__all__ = [
    "NO_DOCUMENT",
    "Batch",
    "Chat",
    "Collator",
    "Completion",
    "DataOptions",
    "Encoder",
    "Example",
    "HeldOut",
    "Message",
    "Plain",
    "PreparedData",
    "RecordError",
    "Records",
    "Row",
    "RowDataset",
    "Source",
    "StreamedRows",
    "Tokens",
    "best_fit_decreasing",
    "content_fingerprint",
    "context_length",
    "documents_fingerprint",
    "load_records",
    "make_row",
    "prepare_data",
    "read_record",
]
