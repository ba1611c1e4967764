// Where one layer's keys and values lie. kernels/layout.py lays out those of all layers.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace quire {

enum class CacheType { float32, bfloat16, float16, int8 };

// For each block and kv head: keys (padded_dim, slot) and values (slot, padded_dim), where `padded_dim` is the head's
// dimension rounded up to sixteens. In int8 a float32 scale for each slot follows, by which its quants are multiplied.
struct KVCache {
    void *keys, *values;
    CacheType type;
    int kv_heads, block_size, padded_dim;  // block_size: slots

    // Elements of `type` from one kv head of a block to the next, for keys and for values.
    int64_t head_stride() const {
        return int64_t(block_size) * (padded_dim + (type == CacheType::int8 ? int(sizeof(float)) : 0));
    }
};

// The cache of tensors (block, kv head, slot, head_dim). Raises c10::Error if they lie in another way.
KVCache kv_cache(const at::Tensor& keys, const at::Tensor& values);

// Calls f with a value of the C++ type of the cache's elements.
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
