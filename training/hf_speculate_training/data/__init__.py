"""Data for training: records read, encoded with a loss mask, packed into rows.

`prepare_data` reads a source in any of the usual forms, marks the tokens that the target is to emit, and accounts for
every record that cannot be used. `RowDataset` packs documents into rows. `Collator` makes a `Batch` of rows, with the
document of every token, its position there, and whether it counts.
"""

from ..names import check_source as check_source
from .encoding import Encoder as Encoder
from .loading import Source as Source
from .loading import load_records as load_records
from .packing import NO_DOCUMENT as NO_DOCUMENT
from .packing import Batch as Batch
from .packing import Collator as Collator
from .packing import Row as Row
from .packing import RowDataset as RowDataset
from .packing import make_row as make_row
from .prepared import DataOptions as DataOptions
from .prepared import PreparedData as PreparedData
from .prepared import content_fingerprint as content_fingerprint
from .prepared import context_length as context_length
from .prepared import documents_fingerprint as documents_fingerprint
from .preparing import prepare_data as prepare_data
from .records import Chat as Chat
from .records import Completion as Completion
from .records import Example as Example
from .records import HeldOut as HeldOut
from .records import Message as Message
from .records import Plain as Plain
from .records import RecordError as RecordError
from .records import Tokens as Tokens
from .records import read_record as read_record
