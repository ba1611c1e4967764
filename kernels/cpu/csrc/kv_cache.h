// Where one layer's keys and values lie; kernels/layout.py tells the same of all layers.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace quire {

enum class CacheType { float32, bfloat16, float16, int8 };

// Pieces of (block, kv head): keys (dim, slot) and values (slot, dim), `dim` being the head's rounded up to sixteens.
// In eight bits each piece ends with a float32 for each slot, by which the slot's codes are to be multiplied.
struct KVCache {
    void *keys, *values;
    CacheType type;
    int kv_heads, block, dim;  // block: slots

    int64_t piece() const {  // numbers of `type`
        return int64_t(block) * (dim + (type == CacheType::int8 ? int(sizeof(float)) : 0));
    }
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
        case CacheType::int8: return f(int8_t{});
    }
}

}  // namespace quire
