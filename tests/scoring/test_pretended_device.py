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
    "in place": lambda d, here, there: here.add_(there),
    "in place, of a scalar": lambda d, here, there: here[0].add_(there[0]),
    "product": lambda d, here, there: there[None] @ here[:, None],
    "cat": lambda d, here, there: torch.cat([there, here]),
    "stack": lambda d, here, there: torch.stack([there[0], here[0]]),
    "where": lambda d, here, there: torch.where(here > 0, there, there),
    "mask": lambda d, here, there: there.masked_fill_(here > 0, 0.0),
    "gather": lambda d, here, there: there.gather(0, here.long()),
    "index_select": lambda d, here, there: there.index_select(0, here.long()),
    "index_copy_": lambda d, here, there: there.index_copy_(0, here.long(), there),
    "index on another device": lambda d, here, there: here[there.long()],
    "values of another device": lambda d, here, there: there.__setitem__(torch.tensor([0, 1]), here[:2]),
    "embedding": lambda d, here, there: nn.functional.embedding(here.long(), there[:, None]),
    "generator": lambda d, here, there: there.exponential_(generator=torch.Generator()),
    "generator of the device": lambda d, here, there: here.exponential_(generator=torch.Generator(d.name)),
}
WAITS = {
    "item": lambda t: t[0].item(),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool(t[0]),
    "any": lambda t: 1 if t.any() else 0,
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to and dtype": lambda t: t.to("cpu", torch.float64),
    "copy_": lambda t: torch.empty(3, dtype=t.dtype).copy_(t),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 1),
    "mask": lambda t: t[t > 1],
    "written through a mask": lambda t: t.__setitem__(t > 1, t[1:] + 1),
    "masked_select": lambda t: t.masked_select(t > 1),
    "equal": lambda t: torch.equal(t, t + 1),
    "unique": lambda t: t.unique(),
    "repeat_interleave": lambda t: t.repeat_interleave(t),
    "index of a scalar": lambda t: t[t[0]],
    "range": lambda t: range(t[0]),
    "numpy by force": lambda t: t.numpy(force=True),
}
UPLOADS = {
    "to": lambda d, t, here: here.to(d.name),
    "to, without blocking": lambda d, t, here: here.to(d.name, non_blocking=True),
    "copy_": lambda d, t, here: t.copy_(here),
    "copy_, without blocking": lambda d, t, here: t.copy_(here, non_blocking=True),
    "copy_ of a scalar": lambda d, t, here: t.copy_(here[0]),
    "tensor": lambda d, t, here: torch.tensor([1, 2], device=d.name),
    "new_tensor": lambda d, t, here: t.new_tensor([1, 2]),
    "index": lambda d, t, here: t[here],
    "written at an index": lambda d, t, here: t.__setitem__(here, 0),
    "list as index": lambda d, t, here: t[[0, 1]],
}
FROZEN = {
    "operand": lambda d, t, here: t + here[0],
    "in place": lambda d, t, here: t.mul_(here[0]),
    "fill_": lambda d, t, here: t.fill_(here[0]),
    "item": lambda d, t, here: t + int(here[0]),
}
UNRECORDABLE = {
    "random numbers": lambda d, t, here: torch.rand(3, device=d.name),
    "random numbers of a generator": lambda d, t, here: t.float().exponential_(generator=d.generator),
    "random numbers of the CPU": lambda d, t, here: torch.rand(3),
    "multinomial": lambda d, t, here: t.float().multinomial(1),
    "seed": lambda d, t, here: torch.manual_seed(3),
    "seed of a generator": lambda d, t, here: d.generator.manual_seed(3),
    "random state of a generator": lambda d, t, here: d.generator.get_state(),
    "reads the random state": lambda d, t, here: torch.get_device_module(d.name).get_rng_state(),
    "sets the random state": lambda d, t, here: torch.get_device_module(d.name).set_rng_state(torch.get_rng_state()),
    "pinned memory": lambda d, t, here: torch.empty(3, pin_memory=True),
}
ONE_LAUNCH = {
    "sum": lambda d, t, here: t + 1,
    "in place": lambda d, t, here: t.add_(t),
    "matrix product": lambda d, t, here: t @ t,
    "of two results": lambda d, t, here: t.max(dim=0),
    "zeros": lambda d, t, here: torch.zeros(3, device=d.name),
    "zero_": lambda d, t, here: t[1:].zero_(),
    "copy_": lambda d, t, here: t[:1].copy_(t[1:2]),
    "copy of what is not contiguous": lambda d, t, here: t.expand(2, 3).reshape(6),
    "index": lambda d, t, here: t[t],
    "random numbers": lambda d, t, here: torch.rand(3, device=d.name),
    "upload": lambda d, t, here: here.to(d.name, non_blocking=True),
    "download": lambda d, t, here: t.cpu(),
    "item": lambda d, t, here: t[0].item(),
    "nonzero": lambda d, t, here: t.nonzero(),
}
NO_LAUNCH = {
    "views": lambda d, t, here: t.view(1, 3).transpose(0, 1)[:2].unbind(),
    "reshape": lambda d, t, here: t.reshape(1, 3).flatten(),
    "detach": lambda d, t, here: t.detach(),
    "split": lambda d, t, here: t.split(1),
    "the same device": lambda d, t, here: t.to(d.name).contiguous(),
    "allocation": lambda d, t, here: (torch.empty(3, device=d.name), torch.empty_like(t), t.new_empty(2)),
    "shape": lambda d, t, here: t.shape[0] + t.dim(),
    "on the host": lambda d, t, here: here + here,
}


class TestTheDoubleItself:
    def test_a_tensor_is_elsewhere_and_computed_like_a_cpus(self, device):
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
    def test_two_devices_in_one_operation_are_refused(self, device, name):
        with pytest.raises(RuntimeError, match=r"same device|generator"):
            MIXED[name](device, torch.arange(3.0), torch.arange(3.0).to(device.name))

    @pytest.mark.parametrize("name", WAITS)
    def test_what_the_host_waits_for_is_counted_with_its_line(self, device, name):
        WAITS[name](on(device, 1, 2, 3))
        (transfer,) = device.downloads
        assert transfer.where.startswith("tests/scoring/test_pretended_device.py:")

    def test_a_copy_to_the_device_that_does_not_block_is_not_waited_for(self, device):
        torch.arange(3).to(device.name, non_blocking=True)
        torch.empty(3, device=device.name).copy_(torch.zeros(3), non_blocking=True)
        assert (len(device.uploads), device.waits) == (2, [])

    @pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.inference_mode])
    @pytest.mark.parametrize(
        ("function", "number"),
        [
            *(pytest.param(function, 1, id=name) for name, function in ONE_LAUNCH.items()),
            *(pytest.param(function, 0, id=f"none: {name}") for name, function in NO_LAUNCH.items()),
            pytest.param(lambda d, t, here: t[here], 2, id="two: a copy and a kernel"),
        ],
    )
    def test_launches_are_counted(self, device, function, number, grad_mode):
        with grad_mode():
            function(device, on(device, 0, 1, 2), torch.tensor([0, 1, 2]))
        assert device.launches == number
        device.forget()
        assert device.launches == 0

    def test_a_module_is_placed_uncounted(self, device):
        device.place(nn.Linear(2, 2))
        assert (device.launches, device.uploads) == (0, [])

    @pytest.mark.parametrize("mode", ["capturing", "replaying"])
    @pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.inference_mode])
    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            *(pytest.param(lambda d, t, here, f=f: f(t), "wait for values", id=name) for name, f in WAITS.items()),
            *(pytest.param(f, "copies from the host", id=f"upload: {name}") for name, f in UPLOADS.items()),
            *(pytest.param(f, "would be frozen", id=f"frozen: {name}") for name, f in FROZEN.items()),
            *(pytest.param(f, "random|pinned", id=name) for name, f in UNRECORDABLE.items()),
        ],
    )
    def test_what_cuda_cannot_record_is_refused_with_its_line(self, device, function, reason, grad_mode, mode):
        device.generator = torch.Generator(device.name)
        with grad_mode():
            there, here = on(device, 0, 2, 2), torch.tensor([0, 1, 2])
            function(device, there, here)  # works without a recording
            device.forget()
            where = r" at tests/scoring/test_pretended_device.py:\d+ "
            with pytest.raises(CaptureError, match=f"{where}.*({reason})"), getattr(device, mode)():
                function(device, there, here)

    def test_a_recording_is_not_counted_and_a_replay_counts_once(self, device):
        buffer = on(device, 1.0, 2.0, 3.0)

        def step():
            assert torch.cuda.is_current_stream_capturing()
            buffer.mul_(2).add_(torch.where(buffer > 2, buffer, 0.0).softmax(0).sum())
            buffer[torch.arange(2, device=device.name)] += 1

        with device.capturing():
            step()
        assert (device.launches, device.replays) == (0, 0)
        for _ in range(3):
            with device.replaying():
                step()
        assert (device.launches, device.replays, device.waits) == (0, 3, [])
        buffer += 1
        assert (device.launches, device.replays) == (1, 3)
        device.forget()
        assert device.replays == 0

    def test_nothing_is_left_of_a_recording_that_failed(self, device):
        there, asks = on(device, 1, 2, 3), torch.cuda.is_current_stream_capturing
        with pytest.raises(CaptureError), device.capturing():
            there.tolist()
        assert (device.downloads, device.launches) == ([], 0)
        assert torch.cuda.is_current_stream_capturing is asks
        assert there.tolist() == [1, 2, 3]
        assert (len(device.downloads), device.launches) == (1, 1)

    def test_recordings_are_not_nested(self, device):
        with device.capturing():
            with pytest.raises(CaptureError, match="another graph"), device.replaying():
                pass
            with pytest.raises(CaptureError, match="copies from the host"):
                on(device, 1)

    def test_its_random_numbers_are_a_cpus_and_its_own(self, device):
        torch.manual_seed(7)
        expected = [torch.empty(5).exponential_(), torch.rand(3)]
        state = torch.get_rng_state()
        torch.manual_seed(7)
        found = [torch.empty(5, device=device.name).exponential_(), torch.rand(3, device=device.name)]
        assert all(torch.equal(e, f.cpu()) for e, f in zip(expected, found, strict=True))
        module = torch.get_device_module(device.name)
        assert torch.equal(module.get_rng_state(), state)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(7))), "untouched"
        generator = torch.Generator(device.name)
        generator.set_state(state)
        torch.set_rng_state(state)
        assert torch.equal(torch.empty(5, device=device.name).normal_(generator=generator).cpu(), torch.randn(5))

    def test_nothing_of_it_is_left_behind(self):
        generator, seeded = torch.Generator, torch.Generator().manual_seed(3).get_state()
        with PretendedDevice():
            assert torch.Generator is not generator
            assert torch.equal(torch.Generator().manual_seed(3).get_state(), seeded)
        assert torch.Generator is generator
        assert not hasattr(torch, "privateuseone")
        assert torch.accelerator.current_accelerator() is None
        assert torch.tensor([1]).tolist() == [1]


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
def test_one_device_one_wait_a_round_and_the_text_of_the_cpu(device, prompt, tmp_path, name, lengths, sampling):
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
def test_rows_that_end_leave_and_nothing_is_mixed(device, prompt, tmp_path, name):
    batch, request = padded_batch(prompt, (9, 4, 13)), {**PLAIN, **GREEDY, "max_new_tokens": 20}
    texts = plain_text(target(), batch, request)
    end = texts[0][4]
    expected = [text[: text.index(end) + 1] if end in text else text for text in texts]
    model = device.place(target())
    drafter = CASES[name].make(model, tmp_path, device.place)
    assert run(device, model, drafter, batch, {**request, "eos_token_id": end})[0] == expected


@pytest.mark.parametrize(("name", "waits"), [("prompt_lookup", 1), ("eagle-3", 2)])
def test_processors_that_read_the_text(device, prompt, tmp_path, name, waits):
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
def test_a_tree_on_the_device_is_checked_before_anything_of_it_is_emitted(device, prompt, kind):
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


def test_a_tree_that_was_written_after_it_was_made_from_another_is_read_as_it_is(device, prompt):
    request = {**PLAIN, **GREEDY}
    (text,) = plain_text(target(), {"input_ids": prompt(9)}, request)

    def make(roots, num_emitted):
        tree = DraftTree(torch.cat([roots[:, None], on(device, [text[num_emitted]])], dim=1), [-1, 0]).gather([0])
        tree.token_ids[:, 1] = (tree.token_ids[:, 1] + 1) % VOCAB  # not what the target will say
        return tree

    assert run(device, device.place(target()), OnDevice(make), {"input_ids": prompt(9)}, request)[0] == [text]
