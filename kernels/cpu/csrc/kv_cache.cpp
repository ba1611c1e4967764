// From the tensors of a layer's cache to where they lie.
#include "kv_cache.h"

namespace quire {
namespace {

CacheType type_of(const at::Tensor& cache) {
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
    int64_t heads = keys.size(1), block = keys.size(2), dim = values.stride(2);
    KVCache found{keys.data_ptr(), values.data_ptr(), type_of(keys), int(heads), int(block), int(dim)};
    int64_t piece = found.piece();
    auto lies = [&](const at::Tensor& cache, int64_t slot, int64_t dimension) {
        return cache.stride(2) == slot && cache.stride(3) == dimension && cache.size(2) == block &&
               (heads == 1 || cache.stride(1) == piece) && (cache.size(0) == 1 || cache.stride(0) == heads * piece);
    };
    TORCH_CHECK(lies(keys, 1, block), "keys must lie (block, kv head, dim, slot)");
    TORCH_CHECK(lies(values, dim, 1) && values.scalar_type() == keys.scalar_type(),
                "values must lie (block, kv head, slot, dim), in the type of the keys");
    TORCH_CHECK(dim % 16 == 0 && dim >= values.size(3), "the cache's dimensions must be rounded up to sixteens");
    return found;
}

}  // namespace quire
