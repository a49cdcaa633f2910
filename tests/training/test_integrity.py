"""A fingerprint sees whatever can happen to memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.integrity import fingerprint, fingerprinter


def by_definition(tensor: Tensor) -> int:
    total = 0
    for index, word in enumerate(tensor.view(torch.int32).reshape(-1).tolist()):
        weight = (index + 1) * 0x9E3779B1 % 2**32
        weight ^= weight >> 15
        total += (word % 2**32) * weight
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("words", [0, 1, 1000])
def test_is_what_the_module_says(words: int) -> None:
    tensor = torch.randn(words, generator=torch.Generator().manual_seed(words))
    assert fingerprint(tensor) == by_definition(tensor)


def test_does_not_depend_on_how_it_is_computed() -> None:
    # larger than one block of the vectorised sum
    tensor = torch.randn(2_100_000, generator=torch.Generator().manual_seed(0))
    assert fingerprint(tensor) == by_definition(tensor)


def flip(tensor: Tensor) -> None:
    tensor.view(torch.int32)[17] ^= 1 << 3


def exchange_words(tensor: Tensor) -> None:
    tensor[[3, 900]] = tensor[[900, 3]]


def exchange_opposite_words(tensor: Tensor) -> None:
    tensor[7] = -tensor[8]
    expected = tensor.clone()
    tensor[[7, 8]] = tensor[[8, 7]]
    assert not torch.equal(expected, tensor)


def exchange_halves(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(len(tensor) // 2))


def zero_a_page(tensor: Tensor) -> None:
    tensor[:512] = 0


def shift(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(1))


@pytest.mark.parametrize(
    "damage", [flip, exchange_words, exchange_opposite_words, exchange_halves, zero_a_page, shift]
)
def test_sees_damage(damage: Callable[[Tensor], None]) -> None:
    tensor = torch.randn(1024, generator=torch.Generator().manual_seed(1))
    tensor[7] = -tensor[8]
    before = fingerprint(tensor)
    damage(tensor)
    assert fingerprint(tensor) != before


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=40),
    st.data(),
)
def test_sees_any_exchange_of_two_words(words: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(words) - 1))
    second = data.draw(st.integers(0, len(words) - 1))
    exchanged = list(words)
    exchanged[first], exchanged[second] = exchanged[second], exchanged[first]
    left, right = (torch.tensor(values, dtype=torch.int64).to(torch.uint32) for values in (words, exchanged))
    assert (fingerprint(left) == fingerprint(right)) == (words == exchanged)


def test_takes_all_tensors_at_once() -> None:
    tensors = [torch.arange(10, dtype=torch.float32), torch.empty(0), torch.ones(3, dtype=torch.int64)]
    taken = fingerprinter(tensors, torch.device("cpu"))()
    assert taken.tolist() == [fingerprint(tensor) for tensor in tensors]
