// A weight that a checkpoint has in parts, whose outputs follow one another: they are packed from where they lie, often
// in a mapped file.
#pragma once

#include <ATen/core/Tensor.h>
#include <immintrin.h>

#include <algorithm>

#include "matrix.h"

namespace quire {

// Returns the outputs of all parts (out, in). Raises c10::Error for parts that do not fit each other.
inline int64_t count_outputs(at::TensorList parts) {
    TORCH_CHECK(!parts.empty(), "there must be a weight");
    int64_t outputs = 0;
    for (const at::Tensor& part : parts) {
        TORCH_CHECK(part.dim() == 2 && part.size(1) == parts[0].size(1), "parts must have equally many inputs");
        outputs += part.size(0);
    }
    return outputs;
}

// Calls f(part, first, lane, count) for each part of a weight that has outputs in a panel: `count` of them, from its
// output `first` on, are in the lanes from `lane` on. `parts` are tensors with a row for each output.
template <class F>
void for_each_part(at::TensorList parts, int64_t panel, F&& f) {
    int64_t begin = 0;
    for (size_t part = 0; part < parts.size(); begin += parts[part++].size(0)) {
        int64_t from = std::max(panel * PANEL, begin), to = std::min((panel + 1) * PANEL, begin + parts[part].size(0));
        if (from < to) f(part, from - begin, int(from - panel * PANEL), int(to - from));
    }
}

// Writes x (8, 8) to y with its rows as columns. Strides are in floats.
inline void transpose(const float* x, int64_t x_stride, float* y, int64_t y_stride) {
    __m256 pairs[8], quads[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        int row = i / 2 * 4 + i % 2;  // 0, 1, 4, 5: joined with the one after the next
        __m256 a = _mm256_loadu_ps(x + row * x_stride), b = _mm256_loadu_ps(x + (row + 2) * x_stride);
        pairs[2 * i] = _mm256_unpacklo_ps(a, b);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(a, b);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 8; half += 4)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            quads[half + 2 * i] = _mm256_unpacklo_ps(pairs[half + i], pairs[half + 2 + i]);
            quads[half + 2 * i + 1] = _mm256_unpackhi_ps(pairs[half + i], pairs[half + 2 + i]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(y + i * y_stride, _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x20));
        _mm256_storeu_ps(y + (4 + i) * y_stride, _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x31));
    }
}

}  // namespace quire
