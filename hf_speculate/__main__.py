"""`python -m hf_speculate` is the command `hf-speculate`."""

from .cli import app


app(prog_name="hf-speculate")
