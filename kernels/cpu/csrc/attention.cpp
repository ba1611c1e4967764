// Attention of ragged rows over a paged cache; kernels/reference/attention.py has the formula.
//
// A block stores its keys with the position as the last dimension, so that one vector holds the same dimension of
// sixteen keys and the scores of sixteen keys are computed at once. It stores values with the head's dimension last.
// The head's dimension is padded with zeros to a multiple of 16.
//
// The order of a query's sums does not depend on the batch. The context is cut at fixed absolute positions: groups of
// 16 keys, tiles of 64, segments of 256. A segment's tiles are processed in order with a running maximum (online
// softmax: Milakov and Gimelshein, 2018). Segments are merged in order, even if one thread has computed them all. A key
// that a query may not see adds an exact zero, so a work item may read keys that only some of its queries see.
//
// If the cache leaves out a bias b of the keys, the score of a query q and the key at position j lacks q . R(j) b,
// where R(j) is the rotation. That is a sum over pairs of dimensions, (q1 b1 + q2 b2) cos + (q2 b1 - q1 b2) sin. The
// angles are the same for all heads and layers, so a second matmul computes it: these two factors times a table of
// angles. Dimensions that are not rotated are skipped: they would add the same number to all scores of a query, which
// does not change the softmax.
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

constexpr int KEY_GROUP = 16;    // keys whose scores fill one vector
constexpr int TILE = 64;         // keys between two updates of the running maximum
constexpr int SEGMENT = 256;     // keys
constexpr int MAX_QUERIES = 96;  // (position, head) pairs of one work item, which read the same tiles
constexpr int GROUPS_PER_TILE = TILE / KEY_GROUP;
#if defined(__AVX512F__)
constexpr int MAX_VECTORS = 4;  // of sums for each query; those of six queries fit into the registers
#else
constexpr int MAX_VECTORS = 1;
#endif
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

using Problem = AttentionProblem;

// Queries of one row at consecutive positions, for one kv head, and one segment of the context that they see.
struct WorkItem {
    int32_t row, token, start, count, head, segment, num_segments;
    int32_t first, end;  // positions of the keys that are read: those that some query sees, from the start of a tile
    int64_t partial;  // index of its first query's result among those to be merged; unused if there is one segment
};

// True if the elements are quants, which are multiplied by a scale for each key.
template <class T>
constexpr bool is_quantized = std::is_same_v<T, int8_t>;

// Pointers to a tile's keys and values, for each group of 16: keys (dim, 16) with the stride `key_stride` between
// dimensions, and values (16, dim).
template <class T, bool SCALED = is_quantized<T>>
struct Tile {
    const T* key[GROUPS_PER_TILE];
    const T* value[GROUPS_PER_TILE];
    const float *key_scale[GROUPS_PER_TILE], *value_scale[GROUPS_PER_TILE];  // of each key of a group, if scaled
    int64_t key_stride;
    int first, num_keys, num_groups;  // first: the position of the first key
};

// Prefetches a line to the L2 cache, which takes more outstanding requests than L1.
template <class T>
void prefetch(const T* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

template <class T>
struct TypedCache {
    const T *keys, *values;

    // Returns the tile that begins at position `first`; the last one may have fewer keys. Blocks shorter than a group
    // are copied side by side into `buffer`, which has 2 * TILE * (dim + 4) elements.
    Tile<T> tile(const Problem& p, const WorkItem& item, int first, T* buffer) const {
        const int32_t* table = p.block_tables + item.row * p.table_width;
        int64_t block_size = p.cache.block_size, dim = p.cache.padded_dim;
        auto head_start = [&](int position) {
            return (int64_t(table[position / block_size]) * p.cache.kv_heads + item.head) * p.cache.head_stride();
        };
        auto scales = [&](const T* cache, int position) {
            const T* end_of_quants = cache + head_start(position) + dim * block_size;
            return reinterpret_cast<const float*>(end_of_quants) + position % block_size;
        };
        Tile<T> tile;
        tile.key_stride = std::max<int64_t>(block_size, KEY_GROUP);
        int end = std::min(first + TILE, item.end);
        tile.first = first;
        tile.num_keys = end - first;
        tile.num_groups = (tile.num_keys + KEY_GROUP - 1) / KEY_GROUP;
        for (int g = 0, start = first; start < end; g++, start += KEY_GROUP) {
            if (block_size >= KEY_GROUP) {
                tile.key[g] = keys + head_start(start) + start % block_size;
                tile.value[g] = values + head_start(start) + start % block_size * dim;
                if constexpr (is_quantized<T>) {
                    tile.key_scale[g] = scales(keys, start);
                    tile.value_scale[g] = scales(values, start);
                }
                continue;
            }
            T* k = buffer + 2 * g * KEY_GROUP * (dim + sizeof(float));
            T *v = k + KEY_GROUP * dim, *end_of_v = v + KEY_GROUP * dim;
            std::fill(k, end_of_v, T{});
            float *key_scale = reinterpret_cast<float*>(end_of_v), *value_scale = key_scale + KEY_GROUP;
            for (int position = start; position < std::min(end, start + KEY_GROUP); position += block_size) {
                int64_t from = head_start(position), column = position - start;
                for (int d = 0; d < dim; d++)
                    std::copy_n(keys + from + d * block_size, block_size, k + d * KEY_GROUP + column);
                std::copy_n(values + from, dim * block_size, v + column * dim);
                if constexpr (is_quantized<T>) {
                    std::copy_n(scales(keys, position), block_size, key_scale + column);
                    std::copy_n(scales(values, position), block_size, value_scale + column);
                }
            }
            tile.key[g] = k;
            tile.value[g] = v;
            tile.key_scale[g] = key_scale;
            tile.value_scale[g] = value_scale;
        }
        for (int g = tile.num_groups; g < GROUPS_PER_TILE; g++) {
            tile.key[g] = tile.key[0];
            tile.value[g] = tile.value[0];
            tile.key_scale[g] = tile.key_scale[0];
            tile.value_scale[g] = tile.value_scale[0];
        }
        return tile;
    }
};

// Sets scores[query][64] of N queries (N, dim) and G groups of keys, or adds to them if ADD. Prefetches the next tile's
// keys.
template <int N, int G, bool ADD = false, class T, bool SCALED, class Prefetch>
void compute_scores(const float* q, int dim, const Tile<T, SCALED>& tile, int group, const Prefetch& prefetch,
                    float* scores) {
    F32x16 sums[N][G];
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++)
            sums[n][g] = ADD ? F32x16::load(scores + n * TILE + (group + g) * KEY_GROUP) : F32x16::zero();
    int d = 0;
    do {
        F32x16 key[G];
        for (int g = 0; g < G; g++) key[g] = F32x16::load(tile.key[group + g] + d * tile.key_stride);
        if (group == 0) prefetch.keys(d);
        for (int n = 0; n < N; n++) {
            F32x16 x = F32x16::set(q[n * dim + d]);
            for (int g = 0; g < G; g++) sums[n][g] = fma(x, key[g], sums[n][g]);
        }
    } while (++d < dim);
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) {
            if constexpr (SCALED) sums[n][g] = sums[n][g] * F32x16::load(tile.key_scale[group + g]);
            sums[n][g].store(scores + n * TILE + (group + g) * KEY_GROUP);
        }
}

// acc[query] = acc[query] * rescale[query] + sum over `keys` keys of weight * value, for N queries and 16 L dimensions.
template <int N, int L, class T, bool SCALED, class Prefetch>
void accumulate_values(const float* weights, const float* rescale, int dim, const Tile<T, SCALED>& tile, int first,
                       int keys, const Prefetch& prefetch, float* acc) {
    F32x16 sums[N][L];
    for (int n = 0; n < N; n++)
        for (int l = 0; l < L; l++) sums[n][l] = F32x16::load(acc + n * dim + l * 16) * F32x16::set(rescale[n]);
    int key = 0;
    do {
        const T* values = tile.value[key / KEY_GROUP] + key % KEY_GROUP * dim + first;
        prefetch.values(key);
        F32x16 value[L];
        for (int l = 0; l < L; l++) value[l] = F32x16::load(values + l * 16);
        for (int n = 0; n < N; n++) {
            F32x16 weight = F32x16::set(weights[n * TILE + key]);
            for (int l = 0; l < L; l++) sums[n][l] = fma(weight, value[l], sums[n][l]);
        }
    } while (++key < keys);
    for (int n = 0; n < N; n++)
        for (int l = 0; l < L; l++) sums[n][l].store(acc + n * dim + l * 16);
}

// Calls f(size, first) for blocks of six, and for the rest of `total`. The size is a compile-time constant.
template <class F>
void for_each_six(int total, F&& f) {
    int first = 0;
    for (; first + 6 <= total; first += 6) f(std::integral_constant<int, 6>{}, first);
    switch (total - first) {
        case 1: return f(std::integral_constant<int, 1>{}, first);
        case 2: return f(std::integral_constant<int, 2>{}, first);
        case 3: return f(std::integral_constant<int, 3>{}, first);
        case 4: return f(std::integral_constant<int, 4>{}, first);
        case 5: return f(std::integral_constant<int, 5>{}, first);
    }
}

// Calls f(size, first) for blocks of MAX_SIZE, a power of two, then for blocks of half that size, and so on.
template <int MAX_SIZE, class F>
void for_each_power_of_two(int total, F&& f, int first = 0) {
    for (; first + MAX_SIZE <= total; first += MAX_SIZE) f(std::integral_constant<int, MAX_SIZE>{}, first);
    if constexpr (MAX_SIZE > 1) for_each_power_of_two<MAX_SIZE / 2>(total, f, first);
}

// A thread's memory for one work item's queries. Maximum, sum and accumulator are those of the online softmax.
template <class T>
struct Scratch {
    std::vector<F32x16> q_, angle_factors_, scores_, acc_, wide_;
    std::vector<T> tile_buffers;
    alignas(64) float maximum[MAX_QUERIES], sum[MAX_QUERIES], rescale[MAX_QUERIES], tile_sum[MAX_QUERIES];
    float *q, *angle_factors, *scores, *acc, *wide;
    int buffer = 0;

    void resize(int dim) {
        q = resize(q_, MAX_QUERIES * dim);
        angle_factors = resize(angle_factors_, MAX_QUERIES * dim);
        scores = resize(scores_, MAX_QUERIES * TILE);
        acc = resize(acc_, MAX_QUERIES * dim);
        wide = resize(wide_, 2 * TILE * dim);
        tile_buffers.resize(2 * 2 * TILE * (dim + sizeof(float)));
    }
    // Returns the buffer for the next tile. There are two, used in turn, so the current tile is not overwritten.
    T* next_tile_buffer() {
        buffer ^= 1;
        return tile_buffers.data() + buffer * tile_buffers.size() / 2;
    }
    static float* resize(std::vector<F32x16>& vectors, int floats) {
        vectors.resize(floats / 16);
        return reinterpret_cast<float*>(vectors.data());
    }
};

// Masks one query's scores except those of the tile's keys within [from, to); returns the maximum.
float mask_scores(const Problem& p, float* scores, int from, int to) {
    F32x16 s[GROUPS_PER_TILE];
    for (int g = 0; g < GROUPS_PER_TILE; g++) s[g] = F32x16::load(scores + g * KEY_GROUP);
    if (p.softcap != 0 || from > 0 || to < TILE)
        for (int g = 0; g < GROUPS_PER_TILE; g++) {
            if (p.softcap != 0) {
                float lanes[KEY_GROUP];
                s[g].store(lanes);
                for (float& x : lanes) x = p.softcap * std::tanh(x / p.softcap);
                s[g] = F32x16::load(lanes);
            }
            s[g] = s[g].keep_lanes(from - g * KEY_GROUP, to - g * KEY_GROUP, NEG_INF);
            s[g].store(scores + g * KEY_GROUP);
        }
    F32x16 maximum = s[0];
    for (int g = 1; g < GROUPS_PER_TILE; g++) maximum = max(maximum, s[g]);
    return reduce_max(maximum);
}

// Turns the scores of all queries into weights, and updates maxima and sums. Sets `rescale` to exp(old maximum - new
// maximum), by which the accumulators must be multiplied.
template <class T, class TileType, bool SCALED>
void update_softmax(const Problem& p, const WorkItem& item, int queries, const Tile<TileType, SCALED>& tile,
                    Scratch<T>& scratch) {
    int queries_per_kv = p.heads / p.cache.kv_heads, first = tile.first;
    float maximum[MAX_QUERIES];
    for (int i = 0; i < queries; i++) {
        int position = item.start + i / queries_per_kv, from = p.window ? position - p.window + 1 - first : 0;
        float tile_maximum = mask_scores(p, scratch.scores + i * TILE, from, position + 1 - first);
        maximum[i] = std::max(scratch.maximum[i], tile_maximum);
    }
    for (int i = 0; i < queries; i++) {
        float base = maximum[i] == NEG_INF ? 0 : maximum[i];
        F32x16 weights[GROUPS_PER_TILE];
        for (int g = 0; g < GROUPS_PER_TILE; g++) {
            float* scores = scratch.scores + i * TILE + g * KEY_GROUP;
            weights[g] = exp(F32x16::load(scores) - F32x16::set(base));
            if constexpr (SCALED)
                (weights[g] * F32x16::load(tile.value_scale[std::min(g, tile.num_groups - 1)])).store(scores);
            else
                weights[g].store(scores);
        }
        F32x16 sums = weights[0];
        for (int g = 1; g < GROUPS_PER_TILE; g++) sums = sums + weights[g];
        scratch.tile_sum[i] = reduce_sum(sums);
        scratch.rescale[i] = scratch.maximum[i] - base;
        scratch.maximum[i] = maximum[i];
    }
    for (int i = 0; i < queries; i += 16) {
        F32x16 rescale = exp(F32x16::load(scratch.rescale + i));
        rescale.store(scratch.rescale + i);
        fma(F32x16::load(scratch.sum + i), rescale, F32x16::load(scratch.tile_sum + i)).store(scratch.sum + i);
    }
}

struct NoPrefetch {
    void keys(int) const {}
    void values(int) const {}
};

template <class T>
struct PrefetchTile {
    const Tile<T>& tile;
    int dim;
    void keys(int d) const {
        for (int g = 0; g < GROUPS_PER_TILE; g++) prefetch(tile.key[g] + d * tile.key_stride);
    }
    void values(int key) const {
        const T* value = tile.value[key / KEY_GROUP] + key % KEY_GROUP * dim;
        for (int d = 0; d < dim; d += 64 / sizeof(T)) prefetch(value + d);
    }
};

template <class T, bool SCALED, class Prefetch, class CacheT>
void attend_tile(const Problem& p, const WorkItem& item, int queries, const Tile<T, SCALED>& tile,
                 const Prefetch& prefetch, Scratch<CacheT>& scratch) {
    int dim = p.cache.padded_dim, queries_per_kv = p.heads / p.cache.kv_heads;
    // Returns how many of the tile's keys a query sees.
    auto num_visible = [&](int query) {
        return std::min(tile.num_keys, item.start + query / queries_per_kv + 1 - tile.first);
    };
    for_each_six(queries, [&](auto n, int query) {
        int keys = num_visible(query + n - 1);
        for_each_power_of_two<MAX_VECTORS>((keys + KEY_GROUP - 1) / KEY_GROUP, [&](auto g, int group) {
            compute_scores<decltype(n)::value, decltype(g)::value>(scratch.q + query * dim, dim, tile, group, prefetch,
                                                                   scratch.scores + query * TILE);
        });
    });
    if (p.angles && p.key_bias) {
        Tile<float, false> angles;
        angles.key_stride = TILE;
        for (int g = 0; g < GROUPS_PER_TILE; g++) angles.key[g] = p.angles + tile.first * p.rotated + g * KEY_GROUP;
        for_each_six(queries, [&](auto n, int query) {
            const float* factors = scratch.angle_factors + query * p.rotated;
            int keys = num_visible(query + n - 1);
            for_each_power_of_two<MAX_VECTORS>((keys + KEY_GROUP - 1) / KEY_GROUP, [&](auto g, int group) {
                compute_scores<decltype(n)::value, decltype(g)::value, true>(
                    factors, p.rotated, angles, group, NoPrefetch{}, scratch.scores + query * TILE);
            });
        });
    }
    update_softmax(p, item, queries, tile, scratch);
    for_each_six(queries, [&](auto n, int query) {
        int keys = num_visible(query + n - 1);
        if (keys <= 0) return;
        for_each_power_of_two<MAX_VECTORS>(dim / 16, [&](auto l, int vector) {
            accumulate_values<decltype(n)::value, decltype(l)::value>(
                scratch.scores + query * TILE, scratch.rescale + query, dim, tile, vector * 16, keys, prefetch,
                scratch.acc + query * dim + vector * 16);
        });
    });
}

// Converts a tile to float32 in `out` (2, TILE, dim), once for all queries that read it. Prefetches the next tile.
template <class T>
Tile<float, is_quantized<T>> widen_tile(const Tile<T>& tile, int dim, const Tile<T>& next, float* out) {
    Tile<float, is_quantized<T>> wide;
    wide.key_stride = TILE;
    wide.first = tile.first;
    wide.num_keys = tile.num_keys;
    wide.num_groups = tile.num_groups;
    float *k = out, *v = out + TILE * dim;
    for (int g = 0; g < tile.num_groups; g++) {
        wide.key[g] = k + g * KEY_GROUP;
        wide.key_scale[g] = tile.key_scale[g];
        wide.value_scale[g] = tile.value_scale[g];
        for (int d = 0; d < dim; d++) {
            F32x16::load(tile.key[g] + d * tile.key_stride).store(k + g * KEY_GROUP + d * TILE);
            prefetch(next.key[g] + d * next.key_stride);
        }
        wide.value[g] = v + g * KEY_GROUP * dim;
        for (int i = 0; i < std::min(KEY_GROUP, tile.num_keys - g * KEY_GROUP) * dim; i += 16) {
            F32x16::load(tile.value[g] + i).store(v + g * KEY_GROUP * dim + i);
            prefetch(next.value[g] + i);
        }
    }
    return wide;
}

// Computes a query's factors (rotated): the first half multiplies the cosines of a key's position, the second half the
// sines.
void compute_angle_factors(const float* q, const float* bias, int64_t rotated, float* factors) {
    int64_t half = rotated / 2;
    for (int64_t d = 0; d < half; d++) {
        float q1 = q[d], q2 = q[half + d], b1 = bias[d], b2 = bias[half + d];
        factors[d] = std::fma(q1, b1, q2 * b2);
        factors[half + d] = std::fma(q2, b1, -q1 * b2);
    }
}

// Computes maximum, sum and accumulator of each of an item's queries over its segment. `tile` is the item's first tile
// on entry, and the first tile of `next_item`, the thread's next one, on return: it is prefetched meanwhile.
template <class T>
void attend(const Problem& p, const TypedCache<T>& cache, const WorkItem& item, const WorkItem* next_item,
            Tile<T>& tile, Scratch<T>& scratch) {
    int queries_per_kv = p.heads / p.cache.kv_heads, queries = item.count * queries_per_kv, dim = p.cache.padded_dim;
    for (int i = 0; i < queries; i++) {
        const float* token = p.q + (item.token + i / queries_per_kv) * p.q_token_stride;
        const float* query = token + (item.head * queries_per_kv + i % queries_per_kv) * p.q_head_stride;
        for (int d = 0; d < p.head_dim; d++) scratch.q[i * dim + d] = query[d] * p.scale;
        std::fill_n(scratch.q + i * dim + p.head_dim, dim - p.head_dim, 0.0f);
        if (p.angles && p.key_bias)
            compute_angle_factors(scratch.q + i * dim, p.key_bias + item.head * p.head_dim, p.rotated,
                                  scratch.angle_factors + i * p.rotated);
    }
    std::fill_n(scratch.maximum, MAX_QUERIES, NEG_INF);
    std::fill_n(scratch.sum, MAX_QUERIES, 0.0f);
    std::fill_n(scratch.acc, queries * dim, 0.0f);
    for (int first = item.first; first < item.end; first += TILE) {
        Tile<T> next = first + TILE < item.end ? cache.tile(p, item, first + TILE, scratch.next_tile_buffer())
                       : next_item ? cache.tile(p, *next_item, next_item->first, scratch.next_tile_buffer())
                                   : tile;
        if (queries > 6)
            attend_tile(p, item, queries, widen_tile(tile, dim, next, scratch.wide), NoPrefetch{}, scratch);
        else
            attend_tile(p, item, queries, tile, PrefetchTile<T>{next, dim}, scratch);
        for (int key = tile.num_keys; key < next.num_keys; key++) PrefetchTile<T>{next, dim}.values(key);
        tile = next;
    }
}

// Writes a query's output. Adds the bias that the cache leaves out of the values as it is, since the weights sum to 1.
void write_output(float* out, const float* acc, float sum, const float* bias, int head_dim) {
    for (int d = 0; d < head_dim; d++) out[d] = acc[d] / sum;
    for (int d = 0; bias && d < head_dim; d++) out[d] += bias[d];
}

// Merges the segments of one query in order, and writes its output. `maximum`, `sum` and `acc` point to the first
// segment's numbers; those of the next segment are `stride` queries further.
void merge_segments(float* out, const float* maximum, const float* sum, const float* acc, int64_t stride, int segments,
                    const float* bias, int dim, int head_dim) {
    float total_maximum = NEG_INF;
    for (int s = 0; s < segments; s++) total_maximum = std::max(total_maximum, maximum[s * stride]);
    float total_sum = 0;
    std::vector<float> total(dim, 0.0f);
    for (int s = 0; s < segments; s++) {
        float lanes[16];
        exp(F32x16::set(maximum[s * stride] - total_maximum)).store(lanes);
        total_sum = std::fma(sum[s * stride], lanes[0], total_sum);
        for (int d = 0; d < dim; d += 16) {
            F32x16 part = F32x16::load(acc + s * stride * dim + d);
            fma(part, F32x16::set(lanes[0]), F32x16::load(&total[d])).store(&total[d]);
        }
    }
    write_output(out, total.data(), total_sum, bias, head_dim);
}

template <class T>
void run(const Problem& p, const TypedCache<T>& cache, const std::vector<WorkItem>& items, int64_t partials) {
    int queries_per_kv = p.heads / p.cache.kv_heads, dim = p.cache.padded_dim;
    std::vector<float> maximum(partials), sum(partials), acc(partials * dim);
    auto output = [&](const WorkItem& item, int i) {
        int64_t token = item.token + i / queries_per_kv, head = item.head * queries_per_kv + i % queries_per_kv;
        return p.out + (token * p.heads + head) * p.head_dim;
    };
    auto bias = [&](const WorkItem& item) { return p.value_bias ? p.value_bias + item.head * p.head_dim : nullptr; };
    std::atomic<size_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), items.size()), 1, [&](int64_t, int64_t) {
        static thread_local Scratch<T> scratch;
        scratch.resize(dim);
        auto take_item = [&] {
            size_t i = next.fetch_add(1);
            return i < items.size() ? &items[i] : nullptr;
        };
        const WorkItem *current = take_item(), *next_item;
        if (!current) return;
        Tile<T> tile = cache.tile(p, *current, current->first, scratch.next_tile_buffer());
        for (; current; current = next_item) {
            next_item = take_item();
            const WorkItem& item = *current;
            int queries = item.count * queries_per_kv;
            attend(p, cache, item, next_item, tile, scratch);
            for (int n = 0; n < queries; n++) {
                if (item.num_segments == 1) {
                    write_output(output(item, n), scratch.acc + n * dim, scratch.sum[n], bias(item), p.head_dim);
                    continue;
                }
                maximum[item.partial + n] = scratch.maximum[n];
                sum[item.partial + n] = scratch.sum[n];
                std::copy_n(scratch.acc + n * dim, dim, &acc[(item.partial + n) * dim]);
            }
        }
    });
    for (const WorkItem& item : items)
        if (item.num_segments > 1 && item.segment == 0)
            for (int n = 0; n < item.count * queries_per_kv; n++) {
                int64_t first = item.partial + n;
                merge_segments(output(item, n), &maximum[first], &sum[first], &acc[first * dim],
                               item.count * queries_per_kv, item.num_segments, bias(item), dim, p.head_dim);
            }
}

// Splits the rows into work items. Sets `partials` to the number of queries' results that are to be merged.
std::vector<WorkItem> split_into_items(const Problem& p, int64_t& partials) {
    int queries_per_kv = p.heads / p.cache.kv_heads, max_count = std::max(1, MAX_QUERIES / queries_per_kv);
    std::vector<WorkItem> items;
    partials = 0;
    for (int32_t row = 0; row < p.rows; row++)
        for (int64_t done = 0, count = p.offsets[row + 1] - p.offsets[row]; done < count; done += max_count) {
            int32_t size = std::min<int64_t>(max_count, count - done), start = p.starts[row] + done;
            int32_t first = p.window ? std::max(0, start - p.window + 1) / TILE * TILE : 0, end = start + size;
            int32_t first_segment = first / SEGMENT, segments = (end + SEGMENT - 1) / SEGMENT - first_segment;
            for (int32_t head = 0; head < p.cache.kv_heads; head++)
                for (int32_t segment = 0; segment < segments; segment++) {
                    int32_t from = (first_segment + segment) * SEGMENT;
                    items.push_back({row, int32_t(p.offsets[row] + done), start, size, head, segment, segments,
                                     std::max(from, first), std::min(from + SEGMENT, end), partials});
                    if (segments > 1) partials += size * queries_per_kv;
                }
        }
    return items;
}

void paged_attention_op(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& offsets, const at::Tensor& starts, const at::Tensor& block_tables,
                        double scale, int64_t window, double softcap, const std::optional<at::Tensor>& key_bias,
                        const std::optional<at::Tensor>& value_bias, const std::optional<at::Tensor>& angles,
                        at::Tensor& out) {
    TORCH_CHECK(q.scalar_type() == at::kFloat && q.stride(2) == 1, "q must be float32 with contiguous heads");
    TORCH_CHECK(out.scalar_type() == at::kFloat && out.is_contiguous(), "out must be float32 and contiguous");
    TORCH_CHECK(block_tables.scalar_type() == at::kInt && block_tables.is_contiguous(),
                "block tables must be int32 and contiguous");
    TORCH_CHECK(offsets.is_contiguous() && starts.is_contiguous(), "offsets and starts must be contiguous");
    AttentionProblem problem{};
    problem.q = q.const_data_ptr<float>();
    problem.q_token_stride = q.stride(0);
    problem.q_head_stride = q.stride(1);
    problem.out = out.mutable_data_ptr<float>();
    problem.cache = kv_cache(keys, values);
    problem.offsets = offsets.const_data_ptr<int64_t>();
    problem.starts = starts.const_data_ptr<int64_t>();
    problem.rows = starts.numel();
    problem.block_tables = block_tables.const_data_ptr<int32_t>();
    problem.table_width = block_tables.size(1);
    problem.heads = q.size(1);
    problem.head_dim = q.size(2);
    problem.scale = scale;
    problem.softcap = softcap;
    problem.window = window;
    set_kv_bias(problem, key_bias, value_bias, angles);
    paged_attention(problem);
}

}  // namespace

void set_kv_bias(AttentionProblem& p, const std::optional<at::Tensor>& key_bias,
                 const std::optional<at::Tensor>& value_bias, const std::optional<at::Tensor>& angles) {
    auto data = [](const std::optional<at::Tensor>& tensor) {
        TORCH_CHECK(!tensor || (tensor->scalar_type() == at::kFloat && tensor->is_contiguous()),
                    "biases and angles must be float32 and contiguous");
        return tensor ? tensor->const_data_ptr<float>() : nullptr;
    };
    for (const auto& bias : {key_bias, value_bias})
        TORCH_CHECK(!bias || bias->numel() == p.cache.kv_heads * p.head_dim, "a bias must be (kv heads, head_dim)");
    TORCH_CHECK(!angles || (angles->dim() == 3 && angles->size(2) == TILE && angles->size(1) <= p.head_dim),
                "angles must be (tiles, R, ", TILE, ") with R at most a head's dimensions");
    p.key_bias = data(key_bias);
    p.value_bias = data(value_bias);
    p.angles = data(angles);
    p.angle_tiles = angles ? angles->size(0) : 0;
    p.rotated = angles ? angles->size(1) : 0;
}

void paged_attention(const AttentionProblem& p) {
    const KVCache& cache = p.cache;
    for (int64_t row = 0; p.angles && row < p.rows; row++)
        TORCH_CHECK(p.starts[row] + p.offsets[row + 1] - p.offsets[row] <= p.angle_tiles * TILE,
                    "positions without angles");
    TORCH_CHECK(cache.block_size % KEY_GROUP == 0 || KEY_GROUP % cache.block_size == 0, "no kernel for blocks of ",
                cache.block_size);
    TORCH_CHECK(cache.padded_dim >= p.head_dim, "the cache has ", cache.padded_dim, " dimensions for ", p.head_dim);
    TORCH_CHECK(p.heads % cache.kv_heads == 0 && p.heads / cache.kv_heads <= MAX_QUERIES,
                "no kernel for ", p.heads, " query heads and ", cache.kv_heads, " kv heads");
    int64_t partials;
    std::vector<WorkItem> items = split_into_items(p, partials);
    for_cache_type(cache.type, [&](auto tag) {
        using T = decltype(tag);
        run(p, TypedCache<T>{static_cast<const T*>(cache.keys), static_cast<const T*>(cache.values)}, items, partials);
    });
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor offsets, Tensor starts, Tensor block_tables, "
        "float scale, int window, float softcap, Tensor? key_bias, Tensor? value_bias, Tensor? angles, "
        "Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("paged_attention", paged_attention_op); }

}  // namespace quire
