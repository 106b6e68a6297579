"""A lint rule of our own: how the packages make tensors, and how they give their addresses away.

torch's default dtype and device belong to the whole process, and `from_pretrained(dtype=...)` in another thread changes
the dtype for a while. A tensor that is made without either may then have half the bytes that native code fills.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors


ROOT = Path(__file__).parents[2]
PACKAGES = ("hf_speculate", "plugins", "training")
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}
NATIVE = ROOT / "plugins" / "hf_speculate_gguf" / "native"


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def name_of(function: ast.expr) -> str:
    return ast.unparse(function)


def parameters_of_modules(tree: ast.Module) -> set[ast.Call]:
    """Calls whose result becomes a parameter in a class: who builds the module places and casts it."""
    return {
        argument
        for module in ast.walk(tree)
        if isinstance(module, ast.ClassDef)
        for call in ast.walk(module)
        if isinstance(call, ast.Call) and name_of(call.func) == "nn.Parameter"
        for argument in call.args
        if isinstance(argument, ast.Call)
    }


def careless(source: str) -> list[str]:
    """The calls that make a tensor without naming dtype and device."""
    tree = ast.parse(source)
    exempt = parameters_of_modules(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in exempt]
    makers = [call for call in calls if name_of(call.func).removeprefix("torch.") in CONSTRUCTORS]
    return [
        f"line {call.lineno}: {name_of(call)}"
        for call in makers
        if name_of(call.func).startswith("torch.")
        and not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]


def test_tensors_are_made_with_dtype_and_device():
    found = [f"{path.relative_to(ROOT)}, {call}" for path in sources() for call in careless(path.read_text())]
    assert not found, "name dtype= and device=: torch's defaults are those of the whole process"


@pytest.mark.parametrize(
    ("line", "is_careless"),
    [
        ("x = torch.empty(3, device='cpu')", True),
        ("x = torch.arange(3, dtype=torch.long)", True),
        ("x = torch.tensor([1])", True),
        ("x = torch.zeros(3, dtype=torch.float32, device='cpu')", False),
        ("x = y.new_zeros(3)", False),
        ("class A:\n  def __init__(self):\n    self.w = nn.Parameter(torch.empty(3))", False),
        ("def f():\n  return nn.Parameter(torch.empty(3))", True),
    ],
)
def test_the_rule_finds_what_takes_torchs_defaults(line, is_careless):
    assert bool(careless(line)) is is_careless


def test_addresses_reach_the_kernel_checked():
    """Only `memory` reads the address of a tensor."""
    found = [
        f"{path.name}, line {node.lineno}"
        for path in sorted(NATIVE.glob("*.py"))
        if path.name != "memory.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "data_ptr"
    ]
    assert not found, "memory.address_of checks what the kernel trusts"
