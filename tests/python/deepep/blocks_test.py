"""Several tensors in one piece of memory: where they lie, what they are, how long they live."""

import pytest
import torch
from deepep import blocks
from deepep.blocks import ALIGNMENT, Made, Part, Piece

PARTS: list[Part] = [
    ((3, 5), torch.int32),
    ((7,), torch.int64),
    ((2, 130), torch.bfloat16),
    ((0, 4), torch.float32),
    ((1,), torch.bool),
]


def make(parts: list[Part]) -> tuple[Piece, torch.Tensor]:
    memory = torch.zeros(blocks.num_bytes(parts), dtype=torch.uint8)
    return Piece(parts, memory.data_ptr(), memory.view), memory


def test_tensors_are_what_was_asked_for_at_the_addresses_told_before() -> None:
    piece, _ = make(PARTS)
    for (shape, dtype), address, tensor in zip(
        PARTS, piece.addresses, piece.tensors(), strict=True
    ):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() == address


def test_each_begins_at_a_multiple_of_the_alignment_and_none_overlap() -> None:
    piece, memory = make(PARTS)
    assert [address - memory.data_ptr() for address in piece.addresses] == [0, 256, 512, 1280, 1280]
    for number, tensor in enumerate(piece.tensors(), start=1):
        tensor.view(torch.uint8).fill_(number)
    assert [int((memory == number).sum()) for number in range(1, 6)] == [60, 56, 520, 0, 1]
    assert blocks.num_bytes(PARTS) == len(memory) == 1280 + ALIGNMENT


def test_the_memory_lives_as_long_as_the_last_tensor() -> None:
    piece, memory = make(PARTS)

    tensors = piece.tensors()
    address = tensors[2].data_ptr()
    del piece, memory
    kept = tensors[2].fill_(7)
    del tensors
    assert kept.data_ptr() == address and bool((kept == 7).all())


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    piece, _ = make([(shape, torch.float32)])
    assert piece.tensors()[0].shape == shape and piece.tensors()[0].is_contiguous()


def test_tensors_that_are_there_have_the_same_interface() -> None:
    tensors = [torch.zeros(3), torch.zeros((0, 2))]
    made = Made(tensors)
    assert made.addresses == [tensors[0].data_ptr(), 0] and made.tensors() == tensors
