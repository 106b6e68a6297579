"""The GPU report: everything that this project must know about a GPU, measured in seven minutes.

    python -m tests.gpu.report [--phases env,tests,text,attention,rounds,speed,training] [--minutes 7] [--out FILE]
                               [--ways eager,recorded,compiled] [--device cuda|cpu] [--tiny]

It writes one line of JSON for each finding, at once, then Markdown tables, then one line of JSON with everything
important. It needs this checkout, and no network. `make gpu` runs it. With `--tiny --device cpu` it only shows that
everything works.

Phases, with their seconds of seven minutes (`--minutes` scales them; what a phase leaves over, later ones may use):

- env (10): card, versions, memory bandwidth. In the background, inductor begins to compile what `speed` needs.
- tests (60): the tests marked `gpu`.
- text (60): texts against plain `generate`.
- attention (40): each backend of SDPA and our kernel, by heads, context and nodes; calls with growing lengths.
- rounds (40): pycoder and its head, eager and recorded, with a profile of each.
- speed (180): stock and us on random weights of 0.5B and 8B and on pycoder; with the targets.
- training (30): a step of the trainer's modules.

A phase that fails or hangs costs the others nothing: a process of its own runs them (`worker`), which is replaced. The
whole run ends 30 seconds after its minutes at the latest.

On a lent machine
-----------------
A lent machine has torch 2.11 but an older transformers, and no network. At most
64 MiB travel, and the files of this repository are more than that. So link the largest weights, which the report does
not read: a link travels without its file. In the root of the checkout:

    mkdir -p .gpu && echo /.gpu/ >> "$(git rev-parse --git-path info/exclude)"
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .gpu \\
        transformers==5.24.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pydantic==2.14.4 pydantic_core==2.50.5 \\
        annotated-types typing-inspection typing_extensions beartype==0.23.1 gguf==0.19.0
    for name in qwen2.5-coder-0.5b-eagle3 smollm2-eagle3; do
        mv examples/$name/model.safetensors /tmp/$name && ln -s /tmp/$name examples/$name/model.safetensors; done

Then one `run` of the device tool with carry [".gpu"], timeout_s 420 and this command:

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
        --target /tmp/site .gpu/*.whl && export PYTHONPATH=/tmp/site || exit
    python3 -m tests.gpu.report --minutes 6 --out $OUT/report.jsonl

Give the machine back, and put the weights back: `mv -f /tmp/$name examples/$name/model.safetensors` for both names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .supervisor import SECONDS, WAYS, Report
from .tables import markdown, summary


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.report", description="Measure this version on a GPU.")
    parser.add_argument(
        "--phases", default=",".join(SECONDS), help="Phases to run, joined by commas (default: all). env always runs."
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="Time for all phases (default 7).")
    parser.add_argument(
        "--out", type=Path, help="File that gets everything that is printed; FILE.log gets the log of the processes."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Device to measure (default cuda).")
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes: only show that everything works.")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"Ways to run rounds (default {','.join(WAYS)}).")
    found = parser.parse_args(arguments)
    found.ways = found.ways.split(",")
    unknown = {*found.phases.split(","), *found.ways} - {*SECONDS, *WAYS}
    found.phases = [name for name in SECONDS if name in ["env", *found.phases.split(",")]]
    if unknown or found.minutes <= 0:
        phases, ways = ", ".join(SECONDS), ", ".join(WAYS)
        parser.error(f"--phases takes some of {phases}, --ways some of {ways}, and --minutes a number above 0.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the report. Returns 0 if no finding is an error, else 1."""
    given = _parsed(arguments)
    out = given.out.open("w", encoding="utf-8") if given.out else None
    report = Report(given.phases, given.minutes, given.device, given.tiny, out, given.ways)
    try:
        report.run()
    finally:  # also after an interruption
        report.print("\n" + markdown(report.findings) + "\n")
        found = summary(report.findings)
        report.print(json.dumps(found, separators=(",", ":")))
        if out is not None:
            out.close()
    return 1 if found["num_errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
