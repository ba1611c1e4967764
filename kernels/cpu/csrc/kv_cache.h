// Where one layer's keys and values lie; kernels/layout.py tells the same of all layers.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace quire {

enum class CacheType { float32, bfloat16, float16 };

// Pieces of (block, kv head): keys (dim, slot) and values (slot, dim), `dim` being the head's rounded up to sixteens.
struct KVCache {
    void *keys, *values;
    CacheType type;
    int kv_heads, block, dim;  // block: slots
};

// Of tensors (block, kv head, slot, head_dim) that lie like that; anything else is an error.
KVCache kv_cache(const at::Tensor& keys, const at::Tensor& values);

// Calls f with a value of the type of C++ that the cache's numbers have.
template <class F>
void for_cache_type(CacheType type, F&& f) {
    switch (type) {
        case CacheType::float32: return f(float{});
        case CacheType::bfloat16: return f(bf16{});
        case CacheType::float16: return f(fp16{});
    }
}

}  // namespace quire
