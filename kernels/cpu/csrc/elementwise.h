// What is done to each token on its own, on plain memory, for other kernels to call; formulas stand with
// elementwise.cpp. All is contiguous but what strides are given for.
#pragma once

#include <cstdint>

#include "kv_cache.h"
#include "simd.h"

namespace quire {

// x, y, total (rows, width), weight (width). Without a residual (nullptr) `total` is not written. y may be x.
void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, int64_t rows, int64_t width,
                  float* y, float* total);

// x / (1 + e^-x), and the tanh form of gelu, v / 2 * (1 + tanh(u)) = v / (1 + e^-2u) with u = sqrt(2/pi) (v + 0.044715 v^3).
inline F32x16 activated(F32x16 x, bool gelu) {
    F32x16 slope = x;
    if (gelu) slope = x * fma(x * x, F32x16::set(0.0713548162726f), F32x16::set(1.5957691216057f));
    return x / (F32x16::set(1.0f) + exp(min(F32x16::zero() - slope, F32x16::set(88.0f))));
}

// y (rows, width) of x (rows, width), or of gate and up side by side, (rows, 2 * width), where `gated`.
void activation(const float* x, bool gelu, bool gated, int64_t rows, int64_t width, float* y);

// Vectors of (tokens, heads, dim) with strides.
struct Heads {
    const float* data;
    int64_t token, head;
};

// y (tokens, heads, dim) of x; cos and sin (tokens, rotated), of which the first half is read. y may be x.
void rotary(Heads x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim, int64_t rotated,
            float* y);

// Keys and values (tokens, kv heads, head_dim) to their flat slots.
void write_kv(Heads keys, Heads values, int64_t tokens, int64_t head_dim, const KVCache& cache, const int64_t* slots);

}  // namespace quire
