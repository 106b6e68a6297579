"""A plug-in of pytest (`-p tests.support.sanitized`, `make sanitize`): the kernel with AddressSanitizer and UBSan.

A read or write beyond a buffer, or undefined behaviour, ends the process with a report. The sanitizers' libraries must
be loaded before Python: `LD_PRELOAD`.
"""

from __future__ import annotations


FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-w", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def pytest_configure():
    """After jaxtyping's plug-in, which wants to see the packages imported."""
    from hf_speculate_gguf.native import compiler

    compiler._FLAGS = FLAGS
