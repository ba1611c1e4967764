// From a tensor's dtype to a type of C++.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace quire {

// Calls f with a value of the type that `tensor` holds, one of those that weights and caches are stored in.
template <class F>
void for_dtype(const at::Tensor& tensor, F&& f) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return f(float{});
        case at::kBFloat16: return f(bf16{});
        case at::kHalf: return f(fp16{});
        default: TORCH_CHECK(false, "no kernel for ", tensor.scalar_type());
    }
}

template <class T>
const T* data(const at::Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
}

}  // namespace quire
