// What is done to each token on its own: root-mean-square norm, rotary positions, gated activation, storing of keys and
// values. Formulas stand with the references of the same names in kernels/reference. All in float32; the cache may be
// of a narrower type.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "elementwise.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t WORK = 16384;  // floats that are worth waking another thread for

int64_t grain(int64_t width) { return std::max<int64_t>(1, WORK / std::max<int64_t>(1, width)); }

// The last lanes of a row that is no multiple of sixteen are handled as a vector padded with zeros.
template <class F>
void over_lanes(int64_t width, F&& f) {
    for (int64_t i = 0; i < width; i += 16) f(i, int(std::min<int64_t>(16, width - i)));
}

F32x16 load_some(const float* p, int count) {
    if (count == 16) return F32x16::load(p);
    float lanes[16] = {};
    std::copy_n(p, count, lanes);
    return F32x16::load(lanes);
}

void store_some(F32x16 x, float* p, int count) {
    if (count == 16) return x.store(p);
    float lanes[16];
    x.store(lanes);
    std::copy_n(lanes, count, p);
}

// x to the T at every `step`.
template <class T>
void store(const float* x, int64_t count, T* to, int64_t step, float*) {
    for (int64_t d = 0; d < count; d++) narrow(x[d], to[d * step]);
}

// As eight bits of which the largest is 127, and what they are to be multiplied by: NaN if x is not finite.
void store(const float* x, int64_t count, int8_t* to, int64_t step, float* scale) {
    F32x16 lanes = F32x16::zero(), poison = F32x16::zero(), most = F32x16::set(127.0f);
    over_lanes(count, [&](int64_t i, int n) {
        F32x16 value = load_some(x + i, n);
        lanes = max(lanes, value.abs());
        poison = fma(value, F32x16::zero(), poison);
    });
    float top = largest(lanes);
    bool tiny = top < 1e-30f;  // its inverse would be no number
    F32x16 inverse = F32x16::set(tiny ? 0.0f : 127.0f / top);
    over_lanes(count, [&](int64_t i, int n) {
        int8_t codes[16];
        max(min(load_some(x + i, n) * inverse, most), F32x16::zero() - most).store(codes);
        for (int d = 0; d < n; d++) to[(i + d) * step] = codes[d];
    });
    *scale = (tiny ? 0.0f : top / 127.0f) + sum(poison);
}

template <class T>
void write(Heads keys, Heads values, int64_t tokens, int64_t head_dim, const KVCache& cache, const int64_t* slots) {
    int64_t heads = cache.kv_heads, dim = cache.dim, block = cache.block;
    T *k = static_cast<T*>(cache.keys), *v = static_cast<T*>(cache.values);
    at::parallel_for(0, tokens, grain(heads * dim), [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t at = (slots[t] / block * heads + h) * cache.piece(), slot = slots[t] % block;
                auto scale = [&](T* piece) { return reinterpret_cast<float*>(piece + dim * block) + slot; };
                const float* key = keys.data + t * keys.token + h * keys.head;
                const float* value = values.data + t * values.token + h * values.head;
                store(key, head_dim, k + at + slot, block, scale(k + at));
                store(value, head_dim, v + at + slot * dim, 1, scale(v + at));
            }
    });
}

}  // namespace

// total = x + residual where there is one; y = total / sqrt(mean(total²) + eps) * weight.
void add_rms_norm(const float* in, const float* rest, const float* w, float eps, int64_t rows, int64_t width,
                  float* out, float* joined) {
    at::parallel_for(0, rows, grain(width), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) {
            int64_t at = row * width;
            F32x16 squares = F32x16::zero();
            over_lanes(width, [&](int64_t i, int n) {
                F32x16 value = load_some(in + at + i, n);
                if (rest) {
                    value = value + load_some(rest + at + i, n);
                    store_some(value, joined + at + i, n);
                }
                squares = fma(value, value, squares);
            });
            const float* source = rest ? joined : in;
            F32x16 scale = F32x16::set(1.0f / std::sqrt(sum(squares) / float(width) + eps));
            over_lanes(width, [&](int64_t i, int n) {
                store_some(load_some(source + at + i, n) * scale * load_some(w + i, n), out + at + i, n);
            });
        }
    });
}

// y = activated(x), or, where x is twice as wide, activated(gate) * up for its halves.
void activation(const float* in, bool gelu, bool gated, int64_t rows, int64_t width, float* out) {
    int64_t in_width = gated ? 2 * width : width;
    at::parallel_for(0, rows, grain(width), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++)
            over_lanes(width, [&](int64_t i, int n) {
                const float* gate = in + row * in_width + i;
                F32x16 value = activated(load_some(gate, n), gelu);
                if (gated) value = value * load_some(gate + width, n);
                store_some(value, out + row * width + i, n);
            });
    });
}

// The first `rotated` dimensions of each head turned by its token's angle.
void rotary(Heads x, const float* c, const float* s, int64_t tokens, int64_t heads, int64_t dim, int64_t rotated,
            float* out) {
    int64_t half = rotated / 2;
    at::parallel_for(0, tokens, grain(heads * dim), [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            for (int64_t h = 0; h < heads; h++) {
                const float* from_head = x.data + t * x.token + h * x.head;
                float* to_head = out + (t * heads + h) * dim;
                over_lanes(half, [&](int64_t i, int n) {
                    F32x16 a = load_some(from_head + i, n), b = load_some(from_head + half + i, n);
                    F32x16 ca = load_some(c + t * 2 * half + i, n), sa = load_some(s + t * 2 * half + i, n);
                    store_some(fma(F32x16::zero() - b, sa, a * ca), to_head + i, n);
                    store_some(fma(a, sa, b * ca), to_head + half + i, n);
                });
                std::copy(from_head + 2 * half, from_head + dim, to_head + 2 * half);
            }
    });
}

// Dimensions of the cache beyond the head's stay zero.
void write_kv(Heads keys, Heads values, int64_t tokens, int64_t head_dim, const KVCache& cache, const int64_t* slots) {
    for_cache_type(cache.type, [&](auto one) {
        write<decltype(one)>(keys, values, tokens, head_dim, cache, slots);
    });
}

namespace {

void add_rms_norm_op(const at::Tensor& x, const std::optional<at::Tensor>& residual, const at::Tensor& weight,
                     double eps, at::Tensor& y, at::Tensor& total) {
    int64_t width = weight.numel();
    TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && total.is_contiguous(), "rows must be contiguous");
    TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && x.numel() % width == 0, "float32");
    add_rms_norm(x.const_data_ptr<float>(), residual ? residual->const_data_ptr<float>() : nullptr,
                 weight.const_data_ptr<float>(), eps, x.numel() / width, width, y.mutable_data_ptr<float>(),
                 total.mutable_data_ptr<float>());
}

void activation_op(const at::Tensor& x, bool gelu, at::Tensor& y) {
    int64_t width = y.size(-1), in_width = x.size(-1);
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && y.is_contiguous(), "float32, contiguous");
    TORCH_CHECK(in_width == width || in_width == 2 * width, "x must be as wide as y, or twice as wide");
    activation(x.const_data_ptr<float>(), gelu, in_width != width, y.numel() / std::max<int64_t>(1, width), width,
               y.mutable_data_ptr<float>());
}

Heads heads_of(const at::Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(2) == 1, "float32, contiguous heads");
    return {x.const_data_ptr<float>(), x.stride(0), x.stride(1)};
}

void rotary_op(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, at::Tensor& y) {
    int64_t dim = x.size(2), rotated = cos.size(1);
    TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && rotated <= dim, "angles (T, R) contiguous, R <= D");
    TORCH_CHECK(y.is_contiguous(), "y must be contiguous");
    rotary(heads_of(x), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), x.size(0), x.size(1), dim, rotated,
           y.mutable_data_ptr<float>());
}

void write_kv_op(const at::Tensor& keys, const at::Tensor& values, at::Tensor& key_cache, at::Tensor& value_cache,
                 const at::Tensor& slots) {
    TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots must be int64 and contiguous");
    write_kv(heads_of(keys), heads_of(values), keys.size(0), keys.size(2), kv_cache(key_cache, value_cache),
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
