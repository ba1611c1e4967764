// A weight that a checkpoint has in parts, whose outputs follow one another: they are packed from where they lie, often
// in a mapped file.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "dtypes.h"
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

// Calls f(row, stride, lane) for each output of a panel: its inputs are row[0], row[stride], ... of the C++ type of its
// part, and `lane` is its place in the panel.
template <class F>
void for_each_output(at::TensorList parts, int64_t panel, F&& f) {
    int64_t first = 0;
    for (const at::Tensor& part : parts) {
        int64_t from = std::max(panel * PANEL, first), to = std::min((panel + 1) * PANEL, first + part.size(0));
        for_dtype(part.scalar_type(), [&](auto tag) {
            const auto* weights = static_cast<const decltype(tag)*>(part.const_data_ptr());
            for (int64_t n = from; n < to; n++)
                f(weights + (n - first) * part.stride(0), part.stride(1), int(n - panel * PANEL));
        });
        first += part.size(0);
    }
}

// Reads inputs of an output, row[0], row[stride], ..., into x (count) in float32.
template <class T>
void read_inputs(const T* row, int64_t stride, int64_t count, float* x) {
    int64_t k = 0;
    for (; stride == 1 && k + 16 <= count; k += 16) F32x16::load(row + k).store(x + k);
    for (; k < count; k++) x[k] = widen(row[k * stride]);
}

}  // namespace quire
