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
    int64_t heads = keys.size(1), block_size = keys.size(2), padded_dim = keys.size(3);
    KVCache cache{keys.data_ptr(), values.data_ptr(), cache_type(keys), int(heads), int(block_size), int(padded_dim)};
    int64_t head_stride = cache.head_stride();
    auto has_layout = [&](const at::Tensor& tensor) {
        return tensor.sizes() == keys.sizes() && tensor.scalar_type() == keys.scalar_type() &&
               tensor.stride(3) == 1 && tensor.stride(2) == padded_dim &&
               (heads == 1 || tensor.stride(1) == head_stride) &&
               (tensor.size(0) == 1 || tensor.stride(0) == heads * head_stride);
    };
    TORCH_CHECK(has_layout(keys) && has_layout(values), "keys and values must have the layout of this processor");
    TORCH_CHECK(padded_dim % 16 == 0, "the head's dimension must be padded to a multiple of 16");
    return cache;
}

}  // namespace quire
