"""Noise belongs to the step: bit for bit what `torch.multinomial` would have used."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_speculate.verification.noise import Noise


CPU = torch.device("cpu")
NUM_STEPS = 6


def stock(seed, num_steps, batch_size, vocab_size):
    """Tokens and RNG states (before each step, and after the last) of stock sampling, with the probabilities used."""
    generator = torch.Generator().manual_seed(99)
    probabilities = [
        torch.softmax(3 * torch.randn(batch_size, vocab_size, generator=generator), -1) for _ in range(num_steps)
    ]
    torch.manual_seed(seed)
    tokens, states = [], [torch.get_rng_state()]
    for step in probabilities:
        tokens.append(torch.multinomial(step, 1)[:, 0])
        states.append(torch.get_rng_state())
    return probabilities, tokens, states


@pytest.mark.parametrize("vocab_size", [8, 96, 50_000])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4, 2]], ids=["in order", "drawn ahead"])
def test_a_row_samples_what_multinomial_samples(batch_size, vocab_size, order):
    for seed in range(3):
        probabilities, tokens, _ = stock(seed, NUM_STEPS, batch_size, vocab_size)
        torch.manual_seed(seed)
        noise = Noise(batch_size, vocab_size, CPU)
        for step in order:
            assert torch.equal((probabilities[step] / noise.row(step)).argmax(-1), tokens[step]), f"step {step}"


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("num_ahead", [0, 1, 4])
@pytest.mark.parametrize("num_steps", [0, 1, 3, NUM_STEPS])
@pytest.mark.parametrize("releases", [False, True])
def test_the_rng_is_left_where_stock_leaves_it(batch_size, num_ahead, num_steps, releases):
    _, _, states = stock(0, NUM_STEPS, batch_size, 96)
    torch.manual_seed(0)
    noise = Noise(batch_size, 96, CPU)
    if num_steps + num_ahead:
        noise.row(num_steps + num_ahead - 1)
    if releases:
        noise.release_before(num_steps)
    noise.finish(num_steps)
    assert torch.equal(torch.get_rng_state(), states[num_steps])


def test_released_rows_are_gone_and_the_others_are_the_same():
    noise = Noise(1, 16, CPU)
    rows = [noise.row(step).clone() for step in range(5)]
    noise.release_before(3)
    assert torch.equal(noise.row(3), rows[3])
    assert torch.equal(noise.row(4), rows[4])
    with pytest.raises(IndexError, match="noise of step 2 was released; the first kept step is 3"):
        noise.row(2)


def test_release_stops_at_what_was_drawn():
    torch.manual_seed(0)
    expected = [torch.empty(1, 16).exponential_() for _ in range(2)]
    torch.manual_seed(0)
    noise = Noise(1, 16, CPU)
    noise.row(0)
    noise.release_before(4)
    assert torch.equal(noise.row(1), expected[1])


def test_rows_takes_every_row_at_its_own_step_and_spares_rows_that_have_ended():
    noise = Noise(3, 16, CPU)
    drawn = [noise.row(step).clone() for step in range(6)]
    noise.release_before(2)
    mixed = noise.rows([5, 0, 3])  # row 1 ended at step 0, long released
    assert torch.equal(mixed[0], drawn[5][0])
    assert torch.equal(mixed[2], drawn[3][2])
    assert mixed.shape == (3, 16)


def test_log_rows_are_the_logs_of_rows_and_columns(monkeypatch):
    noise, columns = Noise(2, 16, CPU), torch.tensor([3, 9, 4])
    steps = [1, 4]
    assert torch.equal(noise.log_rows(steps), noise.rows(steps).log())
    assert torch.equal(noise.log_rows(steps, columns=columns), noise.rows(steps)[:, columns].log())
    assert torch.equal(noise.log_rows([4], rows=[1]), noise.rows([4], [1]).log())
    monkeypatch.setattr(torch.Tensor, "log", None)  # known by now
    noise.log_rows(steps, columns=columns)


def test_logs_of_rows_that_are_drawn_anew_are_computed_anew():
    noise = Noise(1, 16, CPU)
    before = noise.log_rows([2]).clone()
    noise.pause(1)
    torch.rand(1)  # the consumer draws
    noise.resume()
    after = noise.log_rows([2])
    assert not torch.equal(after, before)
    assert torch.equal(after, noise.rows([2]).log())


def test_threads_that_ask_for_rows_in_any_order_find_those_of_stock():
    """A draft of the next round is made while this one is verified."""
    size = 20_000
    for seed in range(10):
        torch.manual_seed(seed)
        expected = [torch.empty(1, size).exponential_() for _ in range(12)]
        torch.manual_seed(seed)
        noise, found = Noise(1, size, CPU), {}

        def ask(steps, noise=noise, found=found):
            for step in steps:
                found[steps[0], step] = noise.log_rows([step])

        threads = [threading.Thread(target=ask, args=[steps]) for steps in (range(12), range(11, 0, -1), range(5, 12))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(rows, expected[step].log()) for (_, step), rows in found.items())
