"""Renders chats with a chat template that came with somebody's head: a script, run in a process of its own.

Reads `template`, `conversations` and `tokens` as JSON from stdin; writes `texts`, or `error`.
"""

import json
import sys
from contextlib import suppress


sys.path.pop(0)  # the folder of this script, whose modules are not to be found by others' imports

_MEMORY = 1 << 30


def limit_memory() -> None:
    """Leaves the template one gigabyte more than the process has now."""
    import resource  # not on Windows

    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = json.load(sys.stdin)
    with suppress(ImportError, OSError, ValueError):  # a system without /proc, or with a lower limit already
        limit_memory()
    try:
        texts, _ = render_jinja_template(
            conversations=asked["conversations"],
            chat_template=asked["template"],
            add_generation_prompt=True,
            **asked["tokens"],
        )
        answer = json.dumps({"texts": texts})
    except Exception as error:  # a template is a program
        answer = json.dumps({"error": str(error)[:500] or type(error).__name__})
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
