// Makes a KVCache of tensors, and checks their strides.
#include "kv_cache.h"

namespace quire {
namespace {

CacheType cache_type(const at::Tensor& cache) {
    switch (cache.scalar_type()) {
        case at::kFloat: return CacheType::float32;
        case at::kBFloat16: return CacheType::bfloat16;
        case at::kHalf: return CacheType::float16;
        case at::kChar: return CacheType::int8;
        default: TORCH_CHECK(false, "no kernel for a cache of ", cache.scalar_type());
    }
}

}  // namespace

KVCache kv_cache(const at::Tensor& keys, const at::Tensor& values) {
    int64_t heads = keys.size(1), block_size = keys.size(2), padded_dim = values.stride(2);
    KVCache cache{keys.data_ptr(), values.data_ptr(), cache_type(keys), int(heads), int(block_size), int(padded_dim)};
    int64_t head_stride = cache.head_stride();
    auto has_strides = [&](const at::Tensor& tensor, int64_t slot, int64_t dimension) {
        return tensor.stride(2) == slot && tensor.stride(3) == dimension && tensor.size(2) == block_size &&
               (heads == 1 || tensor.stride(1) == head_stride) &&
               (tensor.size(0) == 1 || tensor.stride(0) == heads * head_stride);
    };
    TORCH_CHECK(has_strides(keys, 1, block_size), "keys must be stored as (block, kv head, dim, slot)");
    TORCH_CHECK(has_strides(values, padded_dim, 1) && values.scalar_type() == keys.scalar_type(),
                "values must be stored as (block, kv head, slot, dim), in the type of the keys");
    TORCH_CHECK(padded_dim % 16 == 0 && padded_dim >= values.size(3),
                "the head's dimension must be padded to a multiple of 16");
    return cache;
}

}  // namespace quire
