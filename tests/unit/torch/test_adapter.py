from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from hvdlab.bindings.adapter import HostMemory
from hvdlab.bindings.handles import OutputAllocator
from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.types import DType
from hvdlab.torch.adapter import ADAPTER, as_stored, plain_array

DTYPES = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float64: DType.F64,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_view_shares_memory_with_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1], dtype=dtype)
    view = ADAPTER.host_view(tensor)
    assert ADAPTER.dtype(tensor) is DTYPES[dtype]
    assert view.itemsize == DTYPES[dtype].itemsize
    assert view.ctypes.data == tensor.data_ptr()
    view[:] = view[::-1].copy()
    assert tensor.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_viewed_tensor_can_still_be_enlarged(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    ADAPTER.host_view(tensor)
    plain_array(tensor)
    assert tensor.resize_(5).numel() == 5


def test_view_keeps_the_memory_of_a_tensor_that_is_dropped() -> None:
    tensor = torch.arange(4)
    view, alive = ADAPTER.host_view(tensor), weakref.ref(tensor)
    del tensor
    assert alive() is not None
    assert view.tolist() == [0, 1, 2, 3]
    del view
    assert alive() is None


def test_bfloat16_is_seen_as_its_bits() -> None:
    assert ADAPTER.host_view(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_view_has_the_tensor_s_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    assert ADAPTER.is_direct(tensor)
    assert ADAPTER.host_view(tensor).shape == shape


def test_view_of_a_leaf_that_requires_gradients() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert ADAPTER.host_view(leaf).ctypes.data == leaf.data_ptr()


def test_view_keeps_the_memory_alive() -> None:
    view = ADAPTER.host_view(torch.full((1000,), 7.0))
    torch.full((1000,), 3.0)  # would reuse the memory if it were freed
    assert np.all(view == 7.0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.arange(10)[::3],
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "channels_last"],
)
def test_tensors_that_are_not_contiguous_are_staged(tensor: torch.Tensor) -> None:
    assert not ADAPTER.is_direct(tensor)
    copy = ADAPTER.stage(tensor)
    assert ADAPTER.is_direct(copy)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()


def test_a_negated_view_is_staged_with_its_values() -> None:
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    assert not ADAPTER.is_direct(negated)
    assert ADAPTER.host_view(ADAPTER.stage(negated)).tolist() == [-2.0, 4.0]


def test_complex_tensors_are_refused_with_a_way_out() -> None:
    with pytest.raises(UnsupportedError, match="view_as_real"):
        ADAPTER.dtype(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_floats_of_eight_bits_are_refused_with_a_way_out(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -0.0, 448.0]).to(dtype)
    with pytest.raises(UnsupportedError, match=r"view\(torch\.uint8\).*cast it to bfloat16") as refused:
        ADAPTER.dtype(tensor)
    assert str(dtype) in str(refused.value)
    assert ADAPTER.dtype(tensor.view(torch.uint8)) is DType.U8


def test_sparse_and_meta_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="to_dense"):
        ADAPTER.stage(torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match="meta"):
        ADAPTER.stage(torch.ones(2, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocator_gives_memory_of_its_tensor(dtype: torch.dtype) -> None:
    allocate = OutputAllocator(HostMemory(ADAPTER), torch.empty(0, dtype=dtype))
    view = allocate((2, 3))
    assert allocate.allocated.shape == (2, 3)
    assert allocate.allocated.dtype is dtype
    assert isinstance(view, np.ndarray)
    assert view.ctypes.data == allocate.allocated.data_ptr()


def test_what_fills_its_memory_in_another_order_is_viewed_as_it_lies() -> None:
    tensor = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    view = as_stored(tensor)
    assert view.shape == (2, 4, 5, 3, 1)
    assert ADAPTER.is_direct(view)
    assert view.data_ptr() == tensor.data_ptr()
    assert as_stored(torch.ones(3, 2).t()).shape == (3, 2, 1)
    for given in (
        torch.ones(2, 3),
        torch.ones(4, 4)[:, ::2],
        torch.ones(3).expand(2, 3),
        torch.eye(2).to_sparse(),
    ):
        assert as_stored(given) is given
