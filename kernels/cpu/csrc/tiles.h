// The division of a GEMM: rows into blocks, panels of outputs over threads, the rows of a panel into tiles of a
// compile-time size. The results do not depend on it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "simd.h"

namespace quire {

// Calls f(first, count) for consecutive blocks of at most `max_rows`. Their sizes differ by at most 1.
template <class F>
void for_even_blocks(int64_t rows, int64_t max_rows, F&& f) {
    int64_t blocks = (rows + max_rows - 1) / max_rows;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = rows * block / blocks;
        f(first, rows * (block + 1) / blocks - first);
    }
}

// Calls f(panel) for all panels, with work stealing. Each thread begins with its own share, which is the same in each
// call, so the weights may still be in its core's cache. A thread that has finished its share takes panels of the
// others, whose cores may be busy with other processes.
template <class F>
void parallel_for_panels(int64_t panels, F&& f) {
    constexpr int64_t MAX_THREADS = 256;
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };
    int64_t threads = std::min({int64_t(at::get_num_threads()), panels, MAX_THREADS});
    if (threads <= 1 || at::in_parallel_region()) {
        for (int64_t panel = 0; panel < panels; panel++) f(panel);
        return;
    }
    Share shares[MAX_THREADS];
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
void call_with_size(int size, int64_t first, F& f) {
    if (size == N) return f(std::integral_constant<int, N>{}, first);
    if constexpr (N > 1) call_with_size<N - 1>(size, first, f);
}

// Calls f(size, first) for consecutive tiles of at most MAX_SIZE, whose sizes differ by at most 1. The size is a
// compile-time constant.
template <int MAX_SIZE, class F>
void for_even_tiles(int64_t total, F&& f) {
    int64_t tiles = (total + MAX_SIZE - 1) / MAX_SIZE;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = total * tile / tiles, end = total * (tile + 1) / tiles;
        call_with_size<MAX_SIZE>(int(end - first), first, f);
    }
}

// With few rows, most of the time is spent reading weights, and the processor's own prefetching is not enough. Panels
// are contiguous, so the bytes ahead are the ones that are read next.
constexpr int PREFETCH_DISTANCE = 4096;  // bytes

inline void prefetch_ahead(const void* p, int bytes) {
    const char* ahead = static_cast<const char*>(p) + PREFETCH_DISTANCE;
    for (int offset = 0; offset < bytes; offset += 64) _mm_prefetch(ahead + offset, _MM_HINT_T0);
}

// Writes the first `width` of 32 sums to y, plus the bias if there is one.
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
