"""What a step needs comes to the device in one copy."""

import numpy as np
import torch

from services.worker.transfers import StepBuffer


def test_sections_are_contiguous_tensors_of_what_was_added() -> None:
    """Kernels read them as such, and so they are on a GPU, where they are parts of one buffer."""
    buffer = StepBuffer(torch.device("cpu"))
    pairs = np.array([(1, 2), (3, 4), (5, 6)], np.int64)
    sections = [buffer.add(array) for array in (pairs.T, np.arange(10, dtype=np.int32)[::3], pairs)]
    buffer.send()
    for section, expected in zip(sections, ([[1, 3, 5], [2, 4, 6]], [0, 3, 6, 9], pairs.tolist()), strict=True):
        assert section.tensor.is_contiguous()
        assert section.tensor.tolist() == expected
        words = buffer.words[section.word : section.word + section.array.nbytes // 4]
        assert words.numpy().tobytes() == section.array.tobytes()
