// The C++ type of a tensor's dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace quire {

// Calls f(tag), where the tag has the C++ type of weights of this dtype.
template <class F>
void for_dtype(at::ScalarType dtype, F&& f) {
    switch (dtype) {
        case at::kFloat: return f(float{});
        case at::kBFloat16: return f(bf16{});
        case at::kHalf: return f(fp16{});
        default: TORCH_CHECK(false, "no kernel for ", dtype);
    }
}

}  // namespace quire
