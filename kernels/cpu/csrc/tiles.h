// How matrix products are divided: panels of outputs over threads, rows into tiles of a compile-time size.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "simd.h"

namespace quire {

constexpr int64_t ROWS_TOGETHER = 192;  // whose inputs stay in a core's cache while panels pass by

// Calls f(panel, first row, last row) for all panels and rows, spread over the threads.
template <class F>
void over_panels(int64_t rows, int64_t panels, F&& f) {
    int64_t parts = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    for (int64_t part = 0; part < parts; part++) {
        int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
        at::parallel_for(0, panels, 1, [&](int64_t from, int64_t to) {
            for (int64_t panel = from; panel < to; panel++) f(panel, first, last);
        });
    }
}

template <int N, class F>
void call_with(int n, int64_t at, F& f) {
    if (n == N) return f(std::integral_constant<int, N>{}, at);
    if constexpr (N > 1) call_with<N - 1>(n, at, f);
}

// Calls f(size, first) for consecutive groups of at most MOST, as even as they can be; the size is a constant.
template <int MOST, class F>
void in_even_groups(int64_t total, F&& f) {
    int64_t groups = (total + MOST - 1) / MOST;
    for (int64_t group = 0; group < groups; group++) {
        int64_t first = total * group / groups, last = total * (group + 1) / groups;
        call_with<MOST>(int(last - first), first, f);
    }
}

// Two vectors of outputs plus the bias, of which `width` floats are written.
inline void write_outputs(const F32x16 (&sums)[2], float* y, const float* bias, int width) {
    float lanes[32];
    bool whole = width == 32;
    float* to = whole ? y : lanes;
    for (int half = 0; half < 2; half++) sums[half].store(to + half * 16);
    if (!whole) std::copy_n(lanes, width, y);
    if (bias)
        for (int i = 0; i < width; i++) y[i] += bias[i];
}

}  // namespace quire
