// Operations on each token by itself, on raw pointers, for other kernels to call. elementwise.cpp has the formulas.
// Memory is contiguous unless there are strides.
#pragma once

#include <cstdint>

#include "kv_cache.h"
#include "simd.h"

namespace quire {

// x, residual, y, total (rows, width), weight (width). If `residual` is nullptr, `total` is not written. y may be x.
void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, int64_t rows, int64_t width,
                  float* y, float* total);

// Returns silu, x / (1 + e^-x), or the tanh form of gelu, x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with
// u = sqrt(2/pi) (x + 0.044715 x^3).
inline F32x16 activate(F32x16 x, bool gelu) {
    F32x16 exponent = x;
    if (gelu) exponent = x * fma(x * x, F32x16::set(0.0713548162726f), F32x16::set(1.5957691216057f));
    return x / (F32x16::set(1.0f) + exp(min(F32x16::zero() - exponent, F32x16::set(88.0f))));
}

// y (rows, width), x (rows, width); if `gated`, x (rows, 2 * width) has the gate in its first half and up in the
// second.
void activation(const float* x, bool gelu, bool gated, int64_t rows, int64_t width, float* y);

// Vectors (tokens, heads, dim) with strides.
struct HeadVectors {
    const float* data;
    int64_t token_stride, head_stride;
};

// x, y (tokens, heads, dim), cos and sin (tokens, rotated), of which the first half is read. y may be x.
void rotary(HeadVectors x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim,
            int64_t rotated, float* y);

// Writes keys and values (tokens, kv heads, head_dim) to the cache, at flat indices `slots` (tokens).
void write_kv(HeadVectors keys, HeadVectors values, int64_t tokens, int64_t head_dim, const KVCache& cache,
              const int64_t* slots);

}  // namespace quire
