#!/usr/bin/env python
"""Write prompts for a head of a code model: tasks made of the functions of the Python standard library.

    python examples/coder_prompts.py prompts.jsonl
    hf-speculate regenerate --target qwen2.5-coder-0.5b --data prompts.jsonl --output answers.jsonl

Every function of 4 to 40 lines gives one prompt: complete it from its header, write it from its docstring, explain it,
test it, fix it, rename a variable, add types or comments, translate it. The library's own tests are left out. The texts
are those of the library that runs this script (PSF licence).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


EXCLUDED_FOLDERS = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
MIN_LINES, MAX_LINES, MAX_CHARACTERS = 4, 40, 1600

FENCED = "```python\n{code}\n```"
COMPLETE = [
    "{header}",
    f"Complete the following function:\n\n{FENCED.replace('code', 'header')}",
    "Complete this Python code:\n\n{header}",
    f"Implement this function.\n\n{FENCED.replace('code', 'header')}",
]
WRITE = [
    "Write a Python function `{name}` that does the following: {summary}",
    "Write a function in Python: {summary}",
    "Implement `{name}` in Python. {summary}",
    "How would I write a Python function for this? {summary}",
]
EDIT = {
    "explain": [
        f"Explain what this Python function does:\n\n{FENCED}",
        "What does this code do?\n\n{code}",
        f"Explain the following code step by step.\n\n{FENCED}",
    ],
    "test": [f"Write unit tests for this function:\n\n{FENCED}", f"Add pytest tests for this function.\n\n{FENCED}"],
    "fix": [
        f"There may be a bug in this function. Find and fix it.\n\n{FENCED}",
        "This code does not work as expected, please fix it:\n\n{code}",
        f"Review this code and give me an improved version.\n\n{FENCED}",
    ],
    "rename": [
        f"Rename the variable `{{argument}}` to `{{new_name}}` in this code and return the full code:\n\n{FENCED}",
        f"Rewrite this function with more descriptive variable names. Return the full code.\n\n{FENCED}",
    ],
    "extend": [
        f"Add type hints to this function:\n\n{FENCED}",
        f"Add a docstring to this function and return all of it.\n\n{FENCED}",
        f"Add comments to this code.\n\n{FENCED}",
        f"Translate this Python function to JavaScript.\n\n{FENCED}",
        f"Refactor this function so that it is easier to read:\n\n{FENCED}",
        f"Add logging to this function and return the full code:\n\n{FENCED}",
    ],
}
NEW_NAMES = ["value", "data", "source", "items", "target_name", "input_text", "current"]
KINDS = ["complete", "complete", "write", *EDIT]


@dataclass(frozen=True)
class Function:
    """A function of the library.

    Attributes:
        code: its source, without indentation.
        header: its first lines, up to the end of the docstring; None if it has no docstring or no body.
        summary: first paragraph of the docstring, on one line.
        arguments: names of its arguments.
    """

    name: str
    code: str
    header: str | None
    summary: str
    arguments: list[str]


def functions(source: str) -> Iterator[Function]:
    """The functions of a module; none if it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if MIN_LINES <= code.count("\n") + 1 <= MAX_LINES and len(code) <= MAX_CHARACTERS:
            doc = ast.get_docstring(node)
            body = node.body[1:] if doc else []
            header = "\n".join(code.splitlines()[: body[0].lineno - node.lineno]) if body else None
            summary = " ".join((doc or "").split("\n\n")[0].split())
            arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
            yield Function(node.name, code, header, summary, arguments)


def library() -> list[Function]:
    """The functions of the standard library, in the order of its files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts)]
    return [each for path in paths for each in functions(path.read_text(encoding="utf-8", errors="replace"))]


def task(function: Function, kind: str, rng: random.Random) -> str | None:
    """A prompt of this kind; None if the function lacks what it needs."""
    is_lacking = {"complete": function.header is None, "write": len(function.summary) < 40}
    if is_lacking.get(kind):
        return None
    templates = {"complete": COMPLETE, "write": WRITE, **EDIT}[kind]
    if kind == "rename" and not function.arguments:
        templates = templates[1:]
    return rng.choice(templates).format(
        name=function.name,
        code=function.code,
        header=function.header,
        summary=function.summary,
        argument=rng.choice(function.arguments) if function.arguments else "",
        new_name=rng.choice(NEW_NAMES),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="JSON-lines file to write")
    parser.add_argument("--limit", type=int, default=4000, help="number of prompts (default 4000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of order and wording (default 0)")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    found = library()
    rng.shuffle(found)
    prompts: dict[str, str] = {}
    for number, function in enumerate(found):
        kind = KINDS[number % len(KINDS)]
        if (prompt := task(function, kind, rng)) and len(prompts) < arguments.limit:
            prompts.setdefault(prompt, kind)
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": text}], "category": kind}) for text, kind in prompts.items()
    ]
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
