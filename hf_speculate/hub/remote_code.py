"""The code that the folder of a head may hold, for `generate(..., custom_generate="owner/head")` of transformers."""

from __future__ import annotations

import os
from pathlib import Path

from ..files import replace_files, text_writer


CUSTOM_GENERATE_FOLDER = "custom_generate"
_CODE_FILE = "generate.py"
# The first version that has `hf_speculate.custom_generate`.
_REQUIREMENT = "hf-speculate>=0.1.0"

# transformers looks at the imports before it runs this: where the package is not installed, its ImportError says
# "Run `pip install hf_speculate`". Whatever else there is to say or do is for the package, which can be mended.
_CODE = f'''"""Speculative decoding with the draft head in this repository. Needs: pip install "{_REQUIREMENT}"

    model.generate(**inputs, custom_generate="this repository, or its folder", trust_remote_code=True)

The text is the target's own. All arguments of `generate` work as they do without `custom_generate`.
"""

from hf_speculate.custom_generate import generate as generate
'''


def write_custom_generate(folder: str | os.PathLike) -> None:
    """Writes the code to `folder`, the one of a head, where transformers looks for it.

    Raises:
        CheckpointError: it could not be written.
    """
    files = {"requirements.txt": text_writer(f"{_REQUIREMENT}\n"), _CODE_FILE: text_writer(_CODE)}
    replace_files(Path(folder) / CUSTOM_GENERATE_FOLDER, files)


def has_custom_generate(folder: str | os.PathLike) -> bool:
    return (Path(folder) / CUSTOM_GENERATE_FOLDER / _CODE_FILE).is_file()
