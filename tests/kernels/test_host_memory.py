import pytest
import torch

from eventlm.kernels import host_memory


@pytest.mark.parametrize("make", [host_memory.empty, host_memory.zeros])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), torch.float32), ((1 << 20,), torch.bfloat16), ((2, 0, 4), torch.int8), ((300, 301, 5), torch.float32)],
)
def test_a_tensor_begins_on_a_cache_line(make, shape, dtype):
    tensor = make(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    if tensor.numel():
        assert tensor.data_ptr() % 64 == 0


def test_zeros_are_zeros():
    assert host_memory.zeros((700, 1000), torch.float32).count_nonzero() == 0
