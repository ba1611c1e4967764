// The memory layout of one layer's keys and values. kernels/layout.py allocates them for all layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace quire {

enum class CacheType { float32, bfloat16, float16, int8 };

// Elements that one lane of a vector multiplies and adds at once.
template <class T>
constexpr int GROUP = std::is_same_v<T, int8_t> ? 4 : std::is_same_v<T, bf16> ? 2 : 1;

// For each block and kv head, keys are (padded_dim / g, slot, g) and values (slot / g, padded_dim, g), where
// `padded_dim` is head_dim rounded up to a multiple of 16, and g is GROUP (in blocks of fewer slots, values have groups
// of all its slots). An int8 cache has a float32 scale for each slot behind these quants, and keys as unsigned bytes,
// 128 more than the quants.
struct KVCache {
    void *keys, *values;
    CacheType type;
    int kv_heads, block_size, padded_dim;  // block_size: slots

    // Returns the distance between two kv heads of a block, in elements of `type`. It is the same for keys and values.
    int64_t head_stride() const {
        return int64_t(block_size) * (padded_dim + (type == CacheType::int8 ? int(sizeof(float)) : 0));
    }
    template <class T>
    int value_group() const {
        return std::min(GROUP<T>, block_size);
    }

    // Return where an element is in a head's part of a block.
    template <class T>
    int64_t key_index(int64_t slot, int64_t d) const {
        return (d / GROUP<T> * block_size + slot) * GROUP<T> + d % GROUP<T>;
    }
    template <class T>
    int64_t value_index(int64_t slot, int64_t d) const {
        int64_t g = value_group<T>();
        return (slot / g * padded_dim + d) * g + slot % g;
    }
};

// Returns the cache behind tensors (block, kv head, slot, padded_dim), which stand for the memory as it lies. Raises
// c10::Error if they have other strides.
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
