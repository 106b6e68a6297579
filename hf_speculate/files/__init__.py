"""Files of unknown origin, read within bounds, and files that others read, written whole or not at all.

Any problem of a file or a disk is a `CheckpointError`, so callers catch nothing else.
"""

from .reading import check_kinds as check_kinds
from .reading import check_regular as check_regular
from .reading import cut as cut
from .reading import file_names as file_names
from .reading import folder_state as folder_state
from .reading import listed as listed
from .reading import open_regular as open_regular
from .reading import own_file as own_file
from .reading import read_bytes as read_bytes
from .reading import read_json as read_json
from .reading import section as section
from .reading import user_path as user_path
from .writing import NewFiles as NewFiles
from .writing import Writer as Writer
from .writing import json_writer as json_writer
from .writing import replace_files as replace_files
from .writing import replacing as replacing
from .writing import text_writer as text_writer
