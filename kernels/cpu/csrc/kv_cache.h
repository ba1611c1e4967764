// The memory layout of one layer's keys and values. kernels/layout.py allocates them for all layers.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace quire {

enum class CacheType { float32, bfloat16, float16, int8 };

// For each block and kv head, keys are (padded_dim, slot) and values (slot, padded_dim), where `padded_dim` is head_dim
// rounded up to a multiple of 16. An int8 cache has a float32 scale for each slot behind these quants.
struct KVCache {
    void *keys, *values;
    CacheType type;
    int kv_heads, block_size, padded_dim;  // block_size: slots

    // Returns the distance between two kv heads of a block, in elements of `type`. It is the same for keys and values.
    int64_t head_stride() const {
        return int64_t(block_size) * (padded_dim + (type == CacheType::int8 ? int(sizeof(float)) : 0));
    }
};

// Returns the cache behind tensors (block, kv head, slot, head_dim). Raises c10::Error if they have other strides.
KVCache kv_cache(const at::Tensor& keys, const at::Tensor& values);

// Calls f(tag), where the tag has the C++ type of the cache's elements.
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
