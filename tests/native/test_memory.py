"""What the kernel is given: a buffer that is not what it seems raises an error, and nothing is read or written."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.verification.natively import exponential, most_probable, stand_in
from hf_speculate_gguf import native
from hf_speculate_gguf.native import binding
from hf_speculate_gguf.native.growth import NativeGrowth
from hf_speculate_gguf.native.layers import Entries, ranges_of_mask
from hf_speculate_gguf.native.memory import (
    WrongBufferError,
    address_of,
    address_of_strided,
    address_of_table,
    check_range,
)


FLOATS = torch.float32


def filled(*shape, dtype=FLOATS):
    return torch.zeros(shape, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        filled(2, 3, dtype=torch.bfloat16),
        filled(2, 3, dtype=torch.float64),
        filled(3, 2),
        filled(2, 2),
        filled(6),
        filled(3, 2).T,
        filled(2, 6)[:, ::2],
        torch.empty(2, 3, dtype=FLOATS, device="meta"),
    ],
    ids=["half the bytes", "twice", "transposed shape", "too short", "flat", "strides", "gaps", "no memory"],
)
def test_address_of_refuses_a_tensor_that_is_not_what_it_seems(wrong):
    right = filled(2, 3)
    assert address_of(right, FLOATS, (2, 3)) == right.data_ptr()
    with pytest.raises(WrongBufferError, match=r"float32 \[2, 3\].* contiguous; it was given .*Nothing was computed"):
        address_of(wrong, FLOATS, (2, 3))


def test_address_of_strided_checks_the_strides_that_the_kernel_assumes():
    whole = filled(2, 5, 4, 8)
    part = whole[:, 1:3]
    assert address_of_strided(part, FLOATS, (2, 2, 4, 8), (8, 1)) == part.data_ptr()
    for wrong in (whole[..., ::2], whole.transpose(2, 3)):
        with pytest.raises(WrongBufferError, match="inner strides"):
            address_of_strided(wrong, FLOATS, tuple(wrong.shape), (8, 1))


def test_address_of_table_takes_more_rows_but_not_fewer():
    table = filled(5, 4)
    assert address_of_table(table, FLOATS, 3, 4) == table.data_ptr()
    for rows, width in ((6, 4), (5, 3)):
        with pytest.raises(WrongBufferError):
            address_of_table(table, FLOATS, rows, width)


def test_check_range_names_values_outside_of_it():
    check_range("the width", 3, 1, 3)
    with pytest.raises(WrongBufferError, match="the width must be from 1 to 3, got 4"):
        check_range("the width", 4, 1, 3)


def test_library_refuses_wrong_buffers(library):
    state = torch.Generator().get_state()
    tiles = filled(1, library.tile_bytes("Q8_0", 64), dtype=torch.uint8)
    rows = filled(16, 2 * 34, dtype=torch.uint8)
    wrong_calls = {
        "noise in 16 bit": lambda: library.draw_exponential(state, filled(9, dtype=torch.bfloat16)),
        "noise with gaps": lambda: library.draw_exponential(state, filled(9, 2)[:, 0]),
        "a short generator": lambda: library.draw_exponential(state[:100], filled(9)),
        "a row of doubles": lambda: library.argmax(filled(9, dtype=torch.float64)),
        "an empty row": lambda: library.argmax(filled(0)),
        "more than there are": lambda: library.most_probable(filled(1, 2, 5), 6),
        "rows with gaps": lambda: library.most_probable(filled(2, 9, 5)[:, ::2], 2),
        "short blocks": lambda: library.pack("Q8_0", rows[:, :40], 64, tiles),
        "too few tiles": lambda: library.pack("Q8_0", filled(17, 68, dtype=torch.uint8), 64, tiles),
        "tiles of another width": lambda: library.multiply(filled(1, 96), tiles, "Q8_0", 16),
        "tiles for fewer rows": lambda: library.multiply(filled(1, 64), tiles, "Q8_0", 17),
        "a mask that is too narrow": lambda: ranges_of_mask(filled(1, 1, 2, 9), 1, 3, 9),
        "a mask that is too long": lambda: ranges_of_mask(filled(1, 1, 3, 10), 1, 3, 9),
        "a mask of other rows": lambda: ranges_of_mask(filled(2, 1, 3, 9), 3, 3, 9),
        "too wide a tree": lambda: NativeGrowth(1, 129, 2, None),
        "too deep a tree": lambda: NativeGrowth(1, 2, 129, None),
        "token ids in 32 bit": lambda: NativeGrowth(1, 2, 2, filled(9, dtype=torch.int32)),
    }
    before = state.clone()
    for call in wrong_calls.values():
        with pytest.raises(WrongBufferError):
            call()
    assert torch.equal(state, before)


def test_entries_refuse_a_cache_of_another_shape_or_type():
    heads, right = (2, 8), filled(1, 2, 5, 8)
    assert Entries(right, right.clone()).addresses(FLOATS, heads)[0] == right.data_ptr()
    bf16, fewer, narrow = right.bfloat16(), right[:, :1], right[..., :4]
    for keys, values in ((bf16, bf16), (right, bf16), (fewer, fewer), (narrow, narrow), (right, right[:, :, :4])):
        with pytest.raises(WrongBufferError):
            Entries(keys, values).addresses(FLOATS, heads)


@pytest.fixture
def library():
    if not native.has_kernel():
        pytest.skip("no native kernel")
    return binding.library()


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
def test_kernel_computes_under_any_default_dtype(library):
    assert all(stand_in(library))
    generator, same = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    drawn = exponential(filled(5000), generator)
    assert torch.equal(drawn, filled(5000).exponential_(generator=same))
    probs, columns = most_probable(torch.arange(600, dtype=FLOATS, device="cpu").view(1, 2, 300), 4)
    assert probs.dtype is FLOATS
    assert columns[0, 0].tolist() == [299, 298, 297, 296]
