// Attention of ragged rows over a paged cache; the formula stands in kernels/reference/paged_attention.py.
//
// The keys of a block lie with the position as the last dimension, so that sixteen keys are the sixteen lanes of a
// score; the values lie as usual, with the head's dimension last. In the cache that dimension is rounded up to sixteens,
// of which the last ones are zero.
//
// What a query's result is made of does not depend on the batch. Its context is cut at fixed absolute positions: tiles
// of 16 keys, segments of 256. Within a segment tiles are taken from left to right with a running maximum (online
// softmax: Milakov and Gimelshein, 2018); segments are merged from left to right, also where one thread has done them
// all. A key that the query may not see adds an exact zero, so it does not matter for which neighbour it was read.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int TILE = 16;       // keys
constexpr int SEGMENT = 256;   // keys; a multiple of TILE
constexpr int QUERIES = 48;    // (position, head) pairs that share the tiles that one work item reads
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

using Problem = AttentionProblem;

// Queries of one row at consecutive positions, for one kv head, and one segment of their context.
struct Item {
    int32_t row, token, start, count, head, segment, segments;
    int64_t partial;  // where its (maximum, sum, accumulator) go, in queries; unused if there is only one segment
};

// Where one tile's keys (dim, 16) and values (16, dim) are, with their strides.
template <class T>
struct TileData {
    const T* keys;
    int64_t key_stride;
    const T* values;
};

template <class T>
struct Cache {
    const T *keys, *values;

    // Blocks shorter than a tile are joined in `scratch`, of 2 * 16 * dim.
    TileData<T> tile(const Problem& p, const int32_t* table, int head, int first, int end, T* scratch) const {
        int64_t part = int64_t(p.cache.dim) * p.cache.block;
        auto at = [&](int position) { return (int64_t(table[position / p.cache.block]) * p.cache.kv_heads + head) * part; };
        if (p.cache.block >= TILE) {
            int64_t base = at(first), slot = first % p.cache.block;
            return {keys + base + slot, p.cache.block, values + base + slot * p.cache.dim};
        }
        T *k = scratch, *v = scratch + TILE * p.cache.dim;
        std::fill(scratch, scratch + 2 * TILE * p.cache.dim, T{});
        for (int position = first; position < std::min(end, first + TILE); position += p.cache.block) {
            int64_t base = at(position), column = position - first;
            for (int d = 0; d < p.cache.dim; d++) std::copy_n(keys + base + d * p.cache.block, p.cache.block, k + d * TILE + column);
            std::copy_n(values + base, part, v + column * p.cache.dim);
        }
        return {k, TILE, v};
    }
};

// scores[query][16] of N queries, whose vectors lie one behind the other.
template <int N, class T>
void score(const float* q, int dim, const TileData<T>& tile, float* scores) {
    F32x16 sums[N];
    for (auto& s : sums) s = F32x16::zero();
    for (int d = 0; d < dim; d++) {
        F32x16 key = F32x16::load(tile.keys + d * tile.key_stride);
        for (int n = 0; n < N; n++) sums[n] = fma(F32x16::set(q[n * dim + d]), key, sums[n]);
    }
    for (int n = 0; n < N; n++) sums[n].store(scores + n * TILE);
}

// acc[query] = acc[query] * fade[query] + sum over `keys` keys of weight * value, for N queries and 16 L dimensions.
template <int N, int L, class T>
void accumulate(const float* weights, const float* fade, int dim, const T* values, int keys, float* acc) {
    F32x16 sums[N][L];
    for (int n = 0; n < N; n++)
        for (int l = 0; l < L; l++) sums[n][l] = F32x16::load(acc + n * dim + l * 16) * F32x16::set(fade[n]);
    for (int key = 0; key < keys; key++)
        for (int l = 0; l < L; l++) {
            F32x16 value = F32x16::load(values + key * dim + l * 16);
            for (int n = 0; n < N; n++) sums[n][l] = fma(F32x16::set(weights[n * TILE + key]), value, sums[n][l]);
        }
    for (int n = 0; n < N; n++)
        for (int l = 0; l < L; l++) sums[n][l].store(acc + n * dim + l * 16);
}

// Calls f with a compile-time count for each group of at most MOST out of `total`.
template <int MOST, class F>
void in_groups(int total, F&& f) {
    int done = 0;
    for (; done + MOST <= total; done += MOST) f(std::integral_constant<int, MOST>{}, done);
    if constexpr (MOST > 1) {
        if (done < total) in_groups<MOST / 2>(total - done, [&](auto n, int at) { f(n, done + at); });
    }
}

template <class T>
void attend_tile(const TileData<T>& tile, const float* q, int queries, int dim, int keys, float* scores, float* acc,
                 const Problem& p, const Item& item, int shared, int first, float* most, float* total) {
    in_groups<8>(queries, [&](auto n, int at) {
        score<decltype(n)::value>(q + at * dim, dim, tile, scores + at * TILE);
    });
    float fade[QUERIES];
    for (int i = 0; i < queries; i++) {
        int position = item.start + i / shared;
        F32x16 s = F32x16::load(scores + i * TILE);
        if (p.softcap != 0) {
            float lanes[TILE];
            s.store(lanes);
            for (float& x : lanes) x = p.softcap * std::tanh(x / p.softcap);
            s = F32x16::load(lanes);
        }
        int from = p.window ? position - p.window + 1 - first : 0;
        s = s.keep(from, position + 1 - first, NOTHING);
        float now = std::max(most[i], largest(s));
        float base = now == NOTHING ? 0 : now;
        F32x16 weights = exp(s - F32x16::set(base));
        weights.store(scores + i * TILE);
        float lanes[TILE];
        exp(F32x16::set(most[i] - base)).store(lanes);
        fade[i] = lanes[0];
        total[i] = total[i] * fade[i] + sum(weights);
        most[i] = now;
    }
    int l = 0;
    for (; l + 4 <= dim / 16; l += 4)
        in_groups<4>(queries, [&](auto n, int at) {
            accumulate<decltype(n)::value, 4>(scores + at * TILE, fade + at, dim, tile.values + l * 16, keys,
                                              acc + at * dim + l * 16);
        });
    for (; l < dim / 16; l++)
        in_groups<4>(queries, [&](auto n, int at) {
            accumulate<decltype(n)::value, 1>(scores + at * TILE, fade + at, dim, tile.values + l * 16, keys,
                                              acc + at * dim + l * 16);
        });
}

template <class T>
struct Scratch {
    std::vector<float> q, scores, acc, wide;
    std::vector<T> tile;
    explicit Scratch(int dim)
        : q(QUERIES * dim), scores(QUERIES * TILE), acc(QUERIES * dim), wide(2 * TILE * dim), tile(2 * TILE * dim) {}
};

// The running maximum, sum and accumulator of each of an item's queries over its segment.
template <class T>
void attend(const Problem& p, const Cache<T>& cache, const Item& item, Scratch<T>& scratch, float* most, float* total) {
    int shared = p.heads / p.cache.kv_heads, queries = item.count * shared, dim = p.cache.dim;
    for (int i = 0; i < queries; i++) {
        const float* from = p.q + (item.token + i / shared) * p.q_token + (item.head * shared + i % shared) * p.q_head;
        for (int d = 0; d < p.head_dim; d++) scratch.q[i * dim + d] = from[d] * p.scale;
    }
    std::fill_n(most, queries, NOTHING);
    std::fill_n(total, queries, 0.0f);
    std::fill_n(scratch.acc.data(), queries * dim, 0.0f);
    const int32_t* table = p.tables + item.row * p.table_width;
    int end = std::min((item.segment + 1) * SEGMENT, item.start + item.count);  // beyond it nothing may be read
    int seen = p.window ? std::max(0, item.start - p.window + 1) / TILE * TILE : 0;
    for (int first = std::max(item.segment * SEGMENT, seen); first < end; first += TILE) {
        int keys = std::min(TILE, end - first);
        TileData<T> tile = cache.tile(p, table, item.head, first, end, scratch.tile.data());
        auto go = [&](const auto& data) {
            attend_tile(data, scratch.q.data(), queries, dim, keys, scratch.scores.data(), scratch.acc.data(), p, item,
                        shared, first, most, total);
        };
        if (queries <= 8) {
            go(tile);
            continue;
        }
        float *k = scratch.wide.data(), *v = k + TILE * dim;  // widened once for all queries
        for (int d = 0; d < dim; d++) F32x16::load(tile.keys + d * tile.key_stride).store(k + d * TILE);
        for (int i = 0; i < keys * dim; i += 16) F32x16::load(tile.values + i).store(v + i);
        go(TileData<float>{k, TILE, v});
    }
}

void finish(float* out, const float* acc, float total, int head_dim) {
    for (int d = 0; d < head_dim; d++) out[d] = acc[d] / total;
}

// Merge the segments of one query, from left to right, and write its output.
void merge(float* out, const float* most, const float* total, const float* acc, int64_t stride, int segments, int dim,
           int head_dim) {
    float top = NOTHING;
    for (int s = 0; s < segments; s++) top = std::max(top, most[s * stride]);
    float sum = 0;
    std::vector<float> joined(dim, 0.0f);
    for (int s = 0; s < segments; s++) {
        float lanes[16];
        exp(F32x16::set(most[s * stride] - top)).store(lanes);
        sum = std::fma(total[s * stride], lanes[0], sum);
        for (int d = 0; d < dim; d += 16)
            fma(F32x16::load(acc + s * stride * dim + d), F32x16::set(lanes[0]), F32x16::load(&joined[d])).store(&joined[d]);
    }
    finish(out, joined.data(), sum, head_dim);
}

template <class T>
void run(const Problem& p, const Cache<T>& cache, const std::vector<Item>& items, int64_t partials) {
    int shared = p.heads / p.cache.kv_heads, dim = p.cache.dim;
    std::vector<float> most(partials), total(partials), acc(partials * dim);
    auto output = [&](const Item& item, int i) {
        return p.out + ((item.token + i / shared) * int64_t(p.heads) + item.head * shared + i % shared) * p.head_dim;
    };
    std::atomic<size_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), items.size()), 1, [&](int64_t, int64_t) {
        Scratch<T> scratch(dim);
        float highest[QUERIES], sums[QUERIES];
        for (size_t i; (i = next.fetch_add(1)) < items.size();) {
            const Item& item = items[i];
            int queries = item.count * shared;
            attend(p, cache, item, scratch, highest, sums);
            for (int n = 0; n < queries; n++) {
                if (item.segments == 1) {
                    finish(output(item, n), &scratch.acc[n * dim], sums[n], p.head_dim);
                    continue;
                }
                most[item.partial + n] = highest[n];
                total[item.partial + n] = sums[n];
                std::copy_n(&scratch.acc[n * dim], dim, &acc[(item.partial + n) * dim]);
            }
        }
    });
    for (const Item& item : items)
        if (item.segments > 1 && item.segment == 0)
            for (int n = 0; n < item.count * shared; n++) {
                int64_t at = item.partial + n;
                merge(output(item, n), &most[at], &total[at], &acc[at * dim], item.count * shared, item.segments, dim,
                      p.head_dim);
            }
}

// Rows into items.
std::vector<Item> cut(const Problem& p, int64_t& partials) {
    int shared = p.heads / p.cache.kv_heads, most = std::max(1, QUERIES / shared);
    std::vector<Item> items;
    partials = 0;
    for (int32_t row = 0; row < p.rows; row++)
        for (int64_t done = 0, count = p.offsets[row + 1] - p.offsets[row]; done < count; done += most) {
            int32_t size = std::min<int64_t>(most, count - done), first = p.starts[row] + done;
            int32_t segments = (first + size + SEGMENT - 1) / SEGMENT;
            for (int32_t head = 0; head < p.cache.kv_heads; head++)
                for (int32_t segment = 0; segment < segments; segment++) {
                    items.push_back({row, int32_t(p.offsets[row] + done), first, size, head, segment, segments, partials});
                    if (segments > 1) partials += size * shared;
                }
        }
    return items;
}

void op(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& offsets,
        const at::Tensor& starts, const at::Tensor& tables, double scale, int64_t window, double softcap,
        at::Tensor& out) {
    TORCH_CHECK(q.scalar_type() == at::kFloat && q.stride(2) == 1, "q must be float32 with contiguous heads");
    TORCH_CHECK(out.scalar_type() == at::kFloat && out.is_contiguous(), "out must be float32 and contiguous");
    TORCH_CHECK(tables.scalar_type() == at::kInt && tables.is_contiguous(), "tables must be int32 and contiguous");
    TORCH_CHECK(offsets.is_contiguous() && starts.is_contiguous(), "offsets and starts must be contiguous");
    AttentionProblem problem{};
    problem.q = q.const_data_ptr<float>();
    problem.q_token = q.stride(0);
    problem.q_head = q.stride(1);
    problem.out = out.mutable_data_ptr<float>();
    problem.cache = kv_cache(keys, values);
    problem.offsets = offsets.const_data_ptr<int64_t>();
    problem.starts = starts.const_data_ptr<int64_t>();
    problem.rows = starts.numel();
    problem.tables = tables.const_data_ptr<int32_t>();
    problem.table_width = tables.size(1);
    problem.heads = q.size(1);
    problem.head_dim = q.size(2);
    problem.scale = scale;
    problem.softcap = softcap;
    problem.window = window;
    paged_attention(problem);
}

}  // namespace

void paged_attention(const AttentionProblem& p) {
    const KVCache& cache = p.cache;
    TORCH_CHECK(cache.block % TILE == 0 || TILE % cache.block == 0, "no kernel for blocks of ", cache.block);
    TORCH_CHECK(cache.dim >= p.head_dim, "the cache has ", cache.dim, " dimensions for ", p.head_dim);
    TORCH_CHECK(p.heads % cache.kv_heads == 0 && p.heads / cache.kv_heads <= QUERIES, "too many heads share one");
    int64_t partials;
    std::vector<Item> items = cut(p, partials);
    for_cache_type(cache.type, [&](auto one) {
        using T = decltype(one);
        run(p, Cache<T>{static_cast<const T*>(cache.keys), static_cast<const T*>(cache.values)}, items, partials);
    });
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor offsets, Tensor starts, Tensor tables, "
        "float scale, int window, float softcap, Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("paged_attention", op); }

}  // namespace quire
