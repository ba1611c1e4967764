"""Tensors of weight files reach the device whole, whatever their type and layout, and larger than a pinned buffer."""

import pytest
import torch

from services.worker.models.device_copy import copy_to


@pytest.mark.parametrize("types", ["bfloat16 bfloat16", "float32 bfloat16", "float16 float32"])
def test_tensors_reach_the_device(types: str, device: torch.device) -> None:
    """A product launched at once sees the last of them."""
    stored, dtype = (getattr(torch, name) for name in types.split())
    generator = torch.Generator().manual_seed(0)
    shapes = [(4500, 9000), (0, 3), (3, 5), (1,), (123457,)]  # the first has 77 MiB or more
    sources = [torch.randn(shape, generator=generator).to(stored) for shape in shapes]
    sources += [sources[0].T, sources[0][:900, ::2], sources[2]]
    copy = copy_to(device)
    for _ in range(2):
        targets = [torch.zeros(source.shape, dtype=dtype, device=device) for source in sources]
        copy(zip(targets, sources, strict=True))
        doubled = targets[-1] * 2
        assert torch.equal(doubled.cpu(), sources[-1].to(dtype) * 2)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target.cpu(), source.to(dtype))
