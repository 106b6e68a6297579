"""What only a GPU would show: tensors of two devices in one operation, and how often the host waits for the device.

Every built-in drafter runs on a device that is not there (`support.pretended_device`), and takes the paths of an
accelerator: batched verification, trees that stay on the device, noise drawn there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_speculate
from hf_speculate import DraftTree, Speculator, transfers
from hf_speculate.errors import DrafterError
from hf_speculate.testing import EmptyDrafter

from ..support.device_cases import CASES, DEPTH, GREEDY, PLAIN, SAMPLED, plain_text
from ..support.heads import VOCAB, target
from ..support.inputs import padded_batch
from ..support.pretended_device import TYPE, CaptureError, PretendedDevice, PretendedTensor
from ..support.tiers import quick


@pytest.fixture
def device(monkeypatch):
    """It copies aside what is copied to it, as CUDA does."""
    monkeypatch.setattr(transfers, "STAGED", transfers.STAGED | {TYPE})
    with PretendedDevice() as device:
        yield device


def on(device, *values) -> torch.Tensor:
    """A tensor there, not counted."""
    tensor = torch.tensor(values).to(device.name)
    device.forget()
    return tensor


MIXED = {
    "sum": lambda d, here, there: there + here,
    "in place, of a scalar": lambda d, here, there: here[0].add_(there[0]),
    "where": lambda d, here, there: torch.where(here > 0, there, there),
    "gather": lambda d, here, there: there.gather(0, here.long()),
    "index on another device": lambda d, here, there: here[there.long()],
    "values of another device": lambda d, here, there: there.__setitem__(torch.tensor([0, 1]), here[:2]),
    "generator": lambda d, here, there: there.exponential_(generator=torch.Generator()),
    "generator of the device": lambda d, here, there: here.exponential_(generator=torch.Generator(d.name)),
}
WAITS = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0]),
    "tolist": lambda t: t.tolist(),
    "to and dtype": lambda t: t.to("cpu", torch.float64),
    "copy_": lambda t: torch.empty(3, dtype=t.dtype).copy_(t),
    "mask": lambda t: t[t > 1],
    "written through a mask": lambda t: t.__setitem__(t > 1, t[1:] + 1),
    "repeat_interleave": lambda t: t.repeat_interleave(t),
    "index of a scalar": lambda t: t[t[0]],
    "numpy by force": lambda t: t.numpy(force=True),
}
UNRECORDABLE = {
    "copies from the host": {
        "to, without blocking": lambda d, t, here: here.to(d.name, non_blocking=True),
        "copy_ of a scalar": lambda d, t, here: t.copy_(here[0]),
        "new_tensor": lambda d, t, here: t.new_tensor([1, 2]),
        "index": lambda d, t, here: t[here],
    },
    "would be frozen": {
        "operand": lambda d, t, here: t + here[0],
        "item of the host": lambda d, t, here: t + int(here[0]),
    },
    "random|pinned": {
        "random numbers": lambda d, t, here: torch.rand(3, device=d.name),
        "random numbers of the CPU": lambda d, t, here: torch.rand(3),
        "seed": lambda d, t, here: torch.manual_seed(3),
        "random state of a generator": lambda d, t, here: torch.Generator(d.name).get_state(),
        "the random state": lambda d, t, here: torch.get_device_module(d.name).get_rng_state(),
        "pinned memory": lambda d, t, here: torch.empty(3, pin_memory=True),
    },
    "wait for values": {name: lambda d, t, here, wait=wait: wait(t) for name, wait in WAITS.items()},
}
LAUNCHES = {
    "views": (lambda d, t, here: t.view(1, 3).transpose(0, 1)[:2].unbind(), 0),
    "allocation": (lambda d, t, here: (torch.empty(3, device=d.name), t.new_empty(2)), 0),
    "on the host": (lambda d, t, here: here + here, 0),
    "of two results": (lambda d, t, here: t.max(dim=0), 1),
    "upload": (lambda d, t, here: here.to(d.name, non_blocking=True), 1),
    "item": (lambda d, t, here: t[0].item(), 1),
    "a copy and a kernel": (lambda d, t, here: t[here], 2),
}


class TestPretendedDevice:
    def test_pretended_tensors_compute_as_cpu_tensors(self, device):
        here = torch.arange(6.0).view(2, 3)
        there = here.to(device.name)
        assert isinstance(there, PretendedTensor)
        assert (there.device.type, there.is_cpu, there.shape) == ("privateuseone", False, (2, 3))
        there[:, 1:] *= 2
        here[:, 1:] *= 2
        result = nn.functional.softmax(there @ there.T, dim=-1)
        assert result.device == there.device
        assert torch.equal(result.cpu(), nn.functional.softmax(here @ here.T, dim=-1))

    @pytest.mark.parametrize("name", MIXED)
    def test_pretended_device_refuses_operations_of_two_devices(self, device, name):
        with pytest.raises(RuntimeError, match=r"same device|generator"):
            MIXED[name](device, torch.arange(3.0), torch.arange(3.0).to(device.name))

    @pytest.mark.parametrize("name", WAITS)
    def test_pretended_device_counts_host_waits_with_their_lines(self, device, name):
        WAITS[name](on(device, 1, 2, 3))
        (transfer,) = device.downloads
        assert transfer.where.startswith("tests/forward/test_pretended_device.py:")

    def test_pretended_device_counts_no_wait_for_non_blocking_uploads(self, device):
        torch.arange(3).to(device.name, non_blocking=True)
        torch.empty(3, device=device.name).copy_(torch.zeros(3), non_blocking=True)
        assert (len(device.uploads), device.waits) == (2, [])

    @pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.inference_mode])
    @pytest.mark.parametrize("name", LAUNCHES)
    def test_pretended_device_counts_launches(self, device, name, grad_mode):
        function, number = LAUNCHES[name]
        with grad_mode():
            function(device, on(device, 0, 1, 2), torch.tensor([0, 1, 2]))
        assert device.launches == number

    @pytest.mark.parametrize(
        ("reason", "name"), [(reason, name) for reason, functions in UNRECORDABLE.items() for name in functions]
    )
    def test_pretended_capture_refuses_forbidden_operations_with_their_lines(self, device, reason, name):
        there, here = on(device, 0, 2, 2), torch.tensor([0, 1, 2])
        function = UNRECORDABLE[reason][name]
        function(device, there, here)  # works without a recording
        for mode in (device.capturing, device.replaying):
            where = r" at tests/forward/test_pretended_device.py:\d+ "
            with pytest.raises(CaptureError, match=f"{where}.*({reason})"), mode():
                function(device, there, here)

    def test_pretended_capture_counts_a_replay_as_one_launch(self, device):
        buffer = on(device, 1.0, 2.0, 3.0)

        def step():
            assert torch.cuda.is_current_stream_capturing()
            buffer.mul_(2).add_(torch.where(buffer > 2, buffer, 0.0).softmax(0).sum())

        with device.capturing():
            step()
        for _ in range(3):
            with device.replaying():
                step()
        assert (device.launches, device.replays, device.waits) == (0, 3, [])

    def test_failed_pretended_capture_leaves_no_state(self, device):
        there, asks = on(device, 1, 2, 3), torch.cuda.is_current_stream_capturing
        with pytest.raises(CaptureError), device.capturing():
            there.tolist()
        assert (device.downloads, device.launches) == ([], 0)
        assert torch.cuda.is_current_stream_capturing is asks
        assert there.tolist() == [1, 2, 3]

    def test_pretended_device_has_its_own_random_numbers(self, device):
        torch.manual_seed(7)
        expected = [torch.empty(5).exponential_(), torch.rand(3)]
        torch.manual_seed(7)
        found = [torch.empty(5, device=device.name).exponential_(), torch.rand(3, device=device.name)]
        assert all(torch.equal(e, f.cpu()) for e, f in zip(expected, found, strict=True))
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(7))), "untouched"

    def test_pretended_device_leaves_torch_unchanged(self):
        # A build for GPUs has an accelerator without a GPU, too.
        generator, accelerator = torch.Generator, torch.accelerator.current_accelerator()
        with PretendedDevice():
            assert torch.Generator is not generator
        assert torch.Generator is generator
        assert not hasattr(torch, "privateuseone")
        assert torch.accelerator.current_accelerator() == accelerator


pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def run(device, model, drafter, batch, request, **options):
    """New tokens of every row, and (waits, uploads) of every round under way: from the third on, and before a row is so
    near its end that drafts are cut."""
    speculator = Speculator(drafter, adaptive=False, **options)
    batch = {name: tensor.to(device.name) for name, tensor in batch.items()}
    torch.manual_seed(5)
    texts, costs = [[] for _ in batch["input_ids"]], []
    device.forget()
    for round in hf_speculate.rounds(model, **batch, **request, speculator=speculator):
        num_left = request["max_new_tokens"] - max(map(len, texts))
        costs.append((device.waits, device.uploads.copy()) if num_left > DEPTH else None)
        for text, tokens in zip(texts, round.tokens, strict=True):
            text += tokens
        device.forget()
    under_way = [cost for cost in costs[2:] if cost is not None]
    assert under_way
    return texts, under_way


QUICK = ("prompt_lookup", "draft_model, trees", "eagle-3", "eagle-3, static trees", "medusa", "combined")


@pytest.mark.parametrize("sampling", quick([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_rounds_on_a_device_wait_once_and_give_the_text_of_the_cpu(device, prompt, tmp_path, name, lengths, sampling):
    case, batch, request = CASES[name], padded_batch(prompt, lengths), {**PLAIN, **sampling}
    expected = plain_text(target(), batch, request)
    model = device.place(target())
    texts, costs = run(device, model, case.make(model, tmp_path, device.place), batch, request)
    assert texts == expected
    for waits, uploads in costs:
        assert len(waits) == case.waits, "\n".join(map(str, waits))
        if len(lengths) == 1 and sampling is GREEDY:
            assert len(uploads) <= case.uploads, "\n".join(map(str, uploads))


@pytest.mark.parametrize("name", ["draft_model", "eagle-3"])
def test_ended_rows_leave_on_a_device(device, prompt, tmp_path, name):
    batch, request = padded_batch(prompt, (9, 4, 13)), {**PLAIN, **GREEDY, "max_new_tokens": 20}
    texts = plain_text(target(), batch, request)
    end = texts[0][4]
    expected = [text[: text.index(end) + 1] if end in text else text for text in texts]
    model = device.place(target())
    drafter = CASES[name].make(model, tmp_path, device.place)
    assert run(device, model, drafter, batch, {**request, "eos_token_id": end})[0] == expected


@pytest.mark.parametrize(("name", "waits"), [("prompt_lookup", 1), ("eagle-3", 2)])
def test_processors_that_read_the_text_cost_a_second_wait_at_most(device, prompt, tmp_path, name, waits):
    """They are called with the texts that end at the nodes, which are made on the host: a tree that was drafted on the
    device is read before, and what they choose behind them."""
    batch, request = padded_batch(prompt, (9, 4, 13)), {**PLAIN, **GREEDY, "repetition_penalty": 1.3}
    model = device.place(target())
    texts, costs = run(device, model, CASES[name].make(model, tmp_path, device.place), batch, request)
    assert texts == plain_text(target(), batch, request)
    assert {len(found) for found, _ in costs} == {waits}


class OnDevice(EmptyDrafter):
    """Drafts trees that are on the device, as `make` makes them of the roots and the number of new tokens."""

    name = "sloppy"

    def __init__(self, make: Callable[[torch.Tensor, int], DraftTree]):
        self.make = make

    def start(self, request):
        session = super().start(request)
        session.draft = lambda state: self.make(state.root_ids.to(request.input_ids.device), state.num_emitted[0])
        return session


@pytest.mark.parametrize("kind", ["a token that is none", "a token twice", "a cycle"])
def test_device_trees_are_checked_before_tokens_are_emitted(device, prompt, kind):
    tokens = {"a token that is none": [5, 6, VOCAB], "a token twice": [5, 5, 7], "a cycle": [5, 6, 7]}[kind]
    parents = [-1, 0, 3, 2] if kind == "a cycle" else [-1, 0, 0, 2]

    def make(roots, _):
        return DraftTree(torch.cat([roots[:, None], on(device, tokens)], dim=1), on(device, parents), max_depth=2)

    model, emitted = device.place(target()), []
    rounds = hf_speculate.rounds(
        model, prompt(9).to(device.name), **PLAIN, **GREEDY, speculator=Speculator(OnDevice(make), adaptive=False)
    )
    with pytest.raises(DrafterError, match="drafter 'sloppy'"):
        emitted.extend(round.tokens[0] for round in rounds)
    assert [len(tokens) for tokens in emitted] == [1], "the prompt's"


def test_device_trees_are_read_after_later_writes(device, prompt):
    request = {**PLAIN, **GREEDY}
    (text,) = plain_text(target(), {"input_ids": prompt(9)}, request)

    def make(roots, num_emitted):
        tree = DraftTree(torch.cat([roots[:, None], on(device, [text[num_emitted]])], dim=1), [-1, 0]).gather([0])
        tree.token_ids[:, 1] = (tree.token_ids[:, 1] + 1) % VOCAB  # not what the target will say
        return tree

    assert run(device, device.place(target()), OnDevice(make), {"input_ids": prompt(9)}, request)[0] == [text]
