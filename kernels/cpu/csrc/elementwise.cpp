// Operations on each token by itself: root-mean-square norm, rotary positions, gated activation, storing keys and
// values. kernels/reference has the formulas under the same names. All arithmetic is in float32; the cache may be of a
// narrower type.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "elementwise.h"
#include "quant_scale.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t FLOATS_PER_THREAD = 16384;  // fewer are not worth waking another thread

// Returns the smallest number of rows, each of `width` floats, for one thread.
int64_t grain_size(int64_t width) { return std::max<int64_t>(1, FLOATS_PER_THREAD / std::max<int64_t>(1, width)); }

// Calls f(first, count) for each vector of a row. The last one may have fewer than sixteen lanes; `load_partial` pads
// it with zeros.
template <class F>
void for_each_vector(int64_t width, F&& f) {
    for (int64_t i = 0; i < width; i += 16) f(i, int(std::min<int64_t>(16, width - i)));
}

F32x16 load_partial(const float* p, int count) {
    if (count == 16) return F32x16::load(p);
    float lanes[16] = {};
    std::copy_n(p, count, lanes);
    return F32x16::load(lanes);
}

void store_partial(F32x16 x, float* p, int count) {
    if (count == 16) return x.store(p);
    float lanes[16];
    x.store(lanes);
    std::copy_n(lanes, count, p);
}

// Sets `out` (count) to x in the type of the cache. Floats have no scale.
template <class T>
float convert(const float* x, int64_t count, T* out) {
    for (int64_t d = 0; d < count; d++) narrow(x[d], out[d]);
    return 0;
}

// Sets `out` to x as int8 quants, the largest of which is 127 or -127, and returns their scale, which is NaN if x is not
// finite. Writes whole vectors.
float convert(const float* x, int64_t count, int8_t* out) {
    AbsMax max_abs;
    for_each_vector(count, [&](int64_t i, int n) { max_abs.add(load_partial(x + i, n)); });
    QuantScale quants = max_abs.scale_to(127.0f);
    F32x16 limit = F32x16::set(127.0f);
    for_each_vector(count, [&](int64_t i, int n) {
        max(min(load_partial(x + i, n) * quants.inverse, limit), F32x16::zero() - limit).store(out + i);
    });
    return quants.scale;
}

// Stores a key and a value of one head in a slot. `k` and `v` are that head's part of a block, `row` (padded_dim) is
// overwritten.
template <class T>
void store(const float* key, const float* value, int64_t count, const KVCache& cache, int64_t slot, T* k, T* v,
           T* row) {
    int64_t dim = cache.padded_dim, block_size = cache.block_size;
    float key_scale = convert(key, count, row);
    std::fill(row + count, row + dim, T{});
    for (int64_t d = 0; d < dim; d += GROUP<T>) {
        if constexpr (std::is_same_v<T, int8_t>)
            for (int64_t i = d; i < d + GROUP<T>; i++) row[i] ^= int8_t(0x80);
        std::memcpy(k + cache.key_index<T>(slot, d), row + d, GROUP<T> * sizeof(T));
    }
    float value_scale = convert(value, count, row);
    T* first = v + cache.value_index<T>(slot, 0);
    for (int64_t d = 0; d < count; d++) first[d * cache.value_group<T>()] = row[d];
    if constexpr (std::is_same_v<T, int8_t>) {
        reinterpret_cast<float*>(k + dim * block_size)[slot] = key_scale;
        reinterpret_cast<float*>(v + dim * block_size)[slot] = value_scale;
    }
}

template <class T>
void write(HeadVectors keys, HeadVectors values, int64_t tokens, int64_t head_dim, const KVCache& cache,
           const int64_t* slots) {
    int64_t heads = cache.kv_heads, block_size = cache.block_size;
    T *k = static_cast<T*>(cache.keys), *v = static_cast<T*>(cache.values);
    at::parallel_for(0, tokens, grain_size(heads * cache.padded_dim), [&](int64_t from, int64_t to) {
        std::vector<T> row(cache.padded_dim);
        for (int64_t t = from; t < to; t++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t start = (slots[t] / block_size * heads + h) * cache.head_stride();
                const float* key = keys.data + t * keys.token_stride + h * keys.head_stride;
                const float* value = values.data + t * values.token_stride + h * values.head_stride;
                store(key, value, head_dim, cache, slots[t] % block_size, k + start, v + start, row.data());
            }
    });
}

}  // namespace

// total = x + residual where there is one; y = total / sqrt(mean(total²) + eps) * weight.
void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, int64_t rows, int64_t width,
                  float* y, float* total) {
    at::parallel_for(0, rows, grain_size(width), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) {
            int64_t start = row * width;
            F32x16 squares = F32x16::zero();
            for_each_vector(width, [&](int64_t i, int n) {
                F32x16 value = load_partial(x + start + i, n);
                if (residual) {
                    value = value + load_partial(residual + start + i, n);
                    store_partial(value, total + start + i, n);
                }
                squares = fma(value, value, squares);
            });
            const float* source = residual ? total : x;
            F32x16 scale = F32x16::set(1.0f / std::sqrt(reduce_sum(squares) / float(width) + eps));
            for_each_vector(width, [&](int64_t i, int n) {
                F32x16 normed = load_partial(source + start + i, n) * scale * load_partial(weight + i, n);
                store_partial(normed, y + start + i, n);
            });
        }
    });
}

// y = activate(x), or, if `gated`, activate(gate) * up for the halves of x.
void activation(const float* x, bool gelu, bool gated, int64_t rows, int64_t width, float* y) {
    int64_t x_width = gated ? 2 * width : width;
    at::parallel_for(0, rows, grain_size(width), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++)
            for_each_vector(width, [&](int64_t i, int n) {
                const float* gate = x + row * x_width + i;
                F32x16 value = activate(load_partial(gate, n), gelu);
                if (gated) value = value * load_partial(gate + width, n);
                store_partial(value, y + row * width + i, n);
            });
    });
}

// Rotates the first `rotated` dimensions of each head by its token's angles.
void rotary(HeadVectors x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim,
            int64_t rotated, float* y) {
    int64_t half = rotated / 2;
    at::parallel_for(0, tokens, grain_size(heads * dim), [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            for (int64_t h = 0; h < heads; h++) {
                const float* x_head = x.data + t * x.token_stride + h * x.head_stride;
                float* y_head = y + (t * heads + h) * dim;
                for_each_vector(half, [&](int64_t i, int n) {
                    F32x16 a = load_partial(x_head + i, n), b = load_partial(x_head + half + i, n);
                    F32x16 cosines = load_partial(cos + t * 2 * half + i, n);
                    F32x16 sines = load_partial(sin + t * 2 * half + i, n);
                    store_partial(fma(F32x16::zero() - b, sines, a * cosines), y_head + i, n);
                    store_partial(fma(a, sines, b * cosines), y_head + half + i, n);
                });
                std::copy(x_head + 2 * half, x_head + dim, y_head + 2 * half);
            }
    });
}

// Dimensions of the cache beyond the head's stay zero.
void write_kv(HeadVectors keys, HeadVectors values, int64_t tokens, int64_t head_dim, const KVCache& cache,
              const int64_t* slots) {
    TORCH_CHECK(head_dim <= cache.padded_dim, "the cache has ", cache.padded_dim, " dimensions for ", head_dim);
    for_cache_type(cache.type, [&](auto tag) {
        write<decltype(tag)>(keys, values, tokens, head_dim, cache, slots);
    });
}

namespace {

void add_rms_norm_op(const at::Tensor& x, const std::optional<at::Tensor>& residual, const at::Tensor& weight,
                     double eps, at::Tensor& y, at::Tensor& total) {
    int64_t width = weight.numel();
    TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && total.is_contiguous(), "rows must be contiguous");
    TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "x and weight must be float32");
    TORCH_CHECK(x.numel() % width == 0, "x must have rows of the weight's width");
    add_rms_norm(x.const_data_ptr<float>(), residual ? residual->const_data_ptr<float>() : nullptr,
                 weight.const_data_ptr<float>(), eps, x.numel() / width, width, y.mutable_data_ptr<float>(),
                 total.mutable_data_ptr<float>());
}

void activation_op(const at::Tensor& x, bool gelu, at::Tensor& y) {
    int64_t width = y.size(-1), in_width = x.size(-1);
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && y.is_contiguous(),
                "x must be float32, and rows contiguous");
    TORCH_CHECK(in_width == width || in_width == 2 * width, "x must be as wide as y, or twice as wide");
    activation(x.const_data_ptr<float>(), gelu, in_width != width, y.numel() / std::max<int64_t>(1, width), width,
               y.mutable_data_ptr<float>());
}

HeadVectors head_vectors(const at::Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(2) == 1, "vectors must be float32 and contiguous");
    return {x.const_data_ptr<float>(), x.stride(0), x.stride(1)};
}

void rotary_op(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, at::Tensor& y) {
    int64_t dim = x.size(2), rotated = cos.size(1);
    TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && rotated <= dim, "angles (T, R) contiguous, R <= D");
    TORCH_CHECK(y.is_contiguous(), "y must be contiguous");
    rotary(head_vectors(x), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), x.size(0), x.size(1), dim,
           rotated, y.mutable_data_ptr<float>());
}

void write_kv_op(const at::Tensor& keys, const at::Tensor& values, at::Tensor& key_cache, at::Tensor& value_cache,
                 const at::Tensor& slots) {
    TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots must be int64 and contiguous");
    TORCH_CHECK(keys.sizes() == values.sizes() && keys.size(1) == key_cache.size(1) && slots.numel() == keys.size(0),
                "keys and values must be (T, kv heads, head_dim), with a slot for each token");
    write_kv(head_vectors(keys), head_vectors(values), keys.size(0), keys.size(2), kv_cache(key_cache, value_cache),
             slots.const_data_ptr<int64_t>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor(a!) y, Tensor(b!) total) "
        "-> ()");
    m.def("activation(Tensor x, bool gelu, Tensor(a!) y) -> ()");
    m.def("rotary(Tensor x, Tensor cos, Tensor sin, Tensor(a!) y) -> ()");
    m.def(
        "write_kv(Tensor keys, Tensor values, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("add_rms_norm", add_rms_norm_op);
    m.impl("activation", activation_op);
    m.impl("rotary", rotary_op);
    m.impl("write_kv", write_kv_op);
}

}  // namespace quire
