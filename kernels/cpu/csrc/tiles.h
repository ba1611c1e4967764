// How matrix products are divided: rows into blocks, panels of outputs over threads, rows of a panel into tiles of a
// compile-time size. None of it makes a difference to the numbers.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "simd.h"

namespace quire {

// Calls f(first, count) for consecutive blocks of at most `most`, as even as they can be.
template <class F>
void over_blocks(int64_t rows, int64_t most, F&& f) {
    int64_t blocks = (rows + most - 1) / most;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = rows * block / blocks;
        f(first, rows * (block + 1) / blocks - first);
    }
}

// Calls f(panel) for all panels. Each thread has its own share, which is the same each time and so may be in its cache;
// one that is done helps the others, whose processor may be wanted by somebody else.
template <class F>
void over_panels(int64_t panels, F&& f) {
    constexpr int64_t MOST = 256;
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };
    int64_t threads = std::min({int64_t(at::get_num_threads()), panels, MOST});
    if (threads <= 1 || at::in_parallel_region()) {
        for (int64_t panel = 0; panel < panels; panel++) f(panel);
        return;
    }
    Share shares[MOST];
    for (int64_t t = 0; t < threads; t++) {
        shares[t].next = panels * t / threads;
        shares[t].end = panels * (t + 1) / threads;
    }
    at::parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            for (int64_t other = 0; other < threads; other++) {
                Share& share = shares[(t + other) % threads];
                for (int64_t panel; (panel = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) f(panel);
            }
    });
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

// With few rows, reading the weights is all that takes time, and what a processor fetches of its own accord is too little.
// Panels lie one behind the other, so what is ahead is what comes next.
constexpr int AHEAD = 4096;  // bytes

inline void fetch_ahead(const void* p, int bytes) {
    for (int at = 0; at < bytes; at += 64) _mm_prefetch(static_cast<const char*>(p) + AHEAD + at, _MM_HINT_T0);
}

// 32 sums plus the bias, of which `width` are written.
inline void write_outputs(const float* sums, float* y, const float* bias, int width) {
    if (width == 32) {
        F32x16 left = F32x16::load(sums), right = F32x16::load(sums + 16);
        if (bias) left = left + F32x16::load(bias), right = right + F32x16::load(bias + 16);
        left.store(y);
        right.store(y + 16);
        return;
    }
    for (int i = 0; i < width; i++) y[i] = bias ? sums[i] + bias[i] : sums[i];
}

}  // namespace quire
