"""`python -m hf_speculate` is the command `hf-speculate`."""

from hf_speculate_tools.cli import app


app(prog_name="hf-speculate")
