// Attention of ragged rows over a paged cache; kernels/reference/attention.py has the formula, kv_cache.h the layout, and
// attention_products.h the arithmetic of each type of the cache.
//
// One vector holds a group of dimensions of sixteen keys, so that the scores of sixteen keys are computed at once, or a
// group of keys' values of sixteen dimensions.
//
// The order of a query's sums does not depend on the batch. The context is cut at fixed absolute positions into segments
// of 256 keys. The softmax of a segment has the maximum of its scores; segments are merged in order (online softmax:
// Milakov and Gimelshein, 2018), even if several threads have computed them. A key that a query may not see adds an
// exact zero, so queries are computed together though some see fewer keys. Scores are in units of log 2.
//
// If the cache leaves out a bias b of the keys, the score of a query q and the key at position j lacks q . R(j) b,
// where R(j) is the rotation. That is a sum over pairs of dimensions, (q1 b1 + q2 b2) cos + (q2 b1 - q1 b2) sin. The
// angles are the same for all heads and layers, so a second matmul computes it: these two factors times a table of
// angles. Dimensions that are not rotated are skipped: they would add the same number to all scores of a query, which
// does not change the softmax.
#include "attention.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_products.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int KEY_GROUP = 16;    // keys whose scores fill one vector
constexpr int SEGMENT = 256;     // keys
constexpr int SEGMENT_GROUPS = SEGMENT / KEY_GROUP;
constexpr int ANGLE_TILE = 64;   // positions of a tile of the table of angles
constexpr int MAX_QUERIES = 96;  // (position, head) pairs of one work item, which read the same segments
constexpr int BLOCK = 6;         // queries whose products are computed together
constexpr int ITEMS_PER_THREAD = 4;  // where there are fewer, segments are shared among threads
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;

using Problem = AttentionProblem;

// True if the elements are quants, which are multiplied by a scale for each key.
template <class T>
constexpr bool is_quantized = std::is_same_v<T, int8_t>;

// Queries of one row at consecutive positions, for one kv head, and segments of the context that they see.
struct WorkItem {
    int32_t row, token, start, count, head, segment, end_segment;
    int64_t partial;  // index of its first query's result among those to be merged, or -1 if it has all segments

    int end() const { return start + count; }
};

// Keys within a segment, as [from, to); none if to <= from.
struct KeyRange {
    int from, to;
    bool operator==(const KeyRange&) const = default;
};

// Returns the keys of the segment from position `first` on that a query at `position` sees.
KeyRange visible_keys(const Problem& p, int position, int first) {
    int from = p.window ? std::max(0, position - p.window + 1 - first) : 0;
    return {std::min(from, SEGMENT), std::clamp(position + 1 - first, 0, SEGMENT)};
}

// Pointers to a segment's keys and values, for each group of 16 of those that are read. Rows of keys, of GROUP
// dimensions, are `key_stride` elements apart; rows of values, of GROUP keys, lie one after the other.
template <class T>
struct Segment {
    const T *key[SEGMENT_GROUPS], *value[SEGMENT_GROUPS];
    const float *key_scale[SEGMENT_GROUPS], *value_scale[SEGMENT_GROUPS];  // of each key of a group, if quantised
    int64_t key_stride;
    int first;  // the position of the first key
};

// Prefetches a line to the L2 cache, which takes more outstanding requests than L1.
template <class T>
void prefetch(const T* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

template <class T>
struct TypedCache {
    const KVCache& cache;

    // Elements of a buffer for the blocks of a segment.
    static int64_t buffer_size(int64_t dim) { return SEGMENT_GROUPS * group_size(dim); }

    // Returns a segment that an item reads. Blocks shorter than a group are copied side by side into `buffer`.
    Segment<T> segment(const Problem& p, const WorkItem& item, int index, T* buffer) const {
        Segment<T> segment;
        segment.first = index * SEGMENT;
        segment.key_stride = std::max(cache.block_size, KEY_GROUP) * GROUP<T>;
        int from = visible_keys(p, item.start, segment.first).from / KEY_GROUP;
        int end = std::min(SEGMENT, item.end() - segment.first);
        for (int g = from; g * KEY_GROUP < end; g++)
            if (cache.block_size >= KEY_GROUP)
                point_to_group(p, item, segment, g);
            else
                copy_group(p, item, segment, g, end, buffer + g * group_size(cache.padded_dim));
        for (int g = 0; g < SEGMENT_GROUPS; g++)
            if (g < from || g * KEY_GROUP >= end) {  // these are only prefetched
                segment.key[g] = segment.key[from];
                segment.value[g] = segment.value[from];
            }
        return segment;
    }

  private:
    static int64_t group_size(int64_t dim) { return 2 * KEY_GROUP * (dim + int64_t(sizeof(float))); }

    // Returns the offset of a head's part of the block that has a position.
    int64_t head_start(const Problem& p, const WorkItem& item, int position) const {
        int64_t block = p.block_tables[item.row * p.table_width + position / cache.block_size];
        return (block * cache.kv_heads + item.head) * cache.head_stride();
    }
    const float* scales(const T* head) const {
        return reinterpret_cast<const float*>(head + cache.padded_dim * cache.block_size);
    }

    void point_to_group(const Problem& p, const WorkItem& item, Segment<T>& segment, int g) const {
        int position = segment.first + g * KEY_GROUP;
        int64_t start = head_start(p, item, position), slot = position % cache.block_size;
        const T *k = static_cast<const T*>(cache.keys) + start, *v = static_cast<const T*>(cache.values) + start;
        segment.key[g] = k + slot * GROUP<T>;
        segment.value[g] = v + slot * cache.padded_dim;
        if constexpr (is_quantized<T>) {
            segment.key_scale[g] = scales(k) + slot;
            segment.value_scale[g] = scales(v) + slot;
        }
    }

    void copy_group(const Problem& p, const WorkItem& item, Segment<T>& segment, int g, int end, T* buffer) const {
        int64_t dim = cache.padded_dim, block_size = cache.block_size;
        T *keys = buffer, *values = keys + KEY_GROUP * dim, *end_of_values = values + KEY_GROUP * dim;
        float *key_scale = reinterpret_cast<float*>(end_of_values), *value_scale = key_scale + KEY_GROUP;
        std::fill_n(buffer, group_size(dim), T{});
        for (int slot = 0; slot < KEY_GROUP && g * KEY_GROUP + slot < end; slot += block_size) {
            int64_t start = head_start(p, item, segment.first + g * KEY_GROUP + slot);
            const T *k = static_cast<const T*>(cache.keys) + start, *v = static_cast<const T*>(cache.values) + start;
            for (int64_t d = 0; d < dim; d += GROUP<T>)
                std::copy_n(k + d * block_size, block_size * GROUP<T>, keys + d * KEY_GROUP + slot * GROUP<T>);
            for (int64_t s = 0; s < block_size; s++)
                for (int64_t d = 0; d < dim; d++) {
                    int64_t key = slot + s;
                    values[(key / GROUP<T> * dim + d) * GROUP<T> + key % GROUP<T>] =
                        v[cache.template value_index<T>(s, d)];
                }
            if constexpr (is_quantized<T>) {
                std::copy_n(scales(k), block_size, key_scale + slot);
                std::copy_n(scales(v), block_size, value_scale + slot);
            }
        }
        segment.key[g] = keys;
        segment.value[g] = values;
        segment.key_scale[g] = key_scale;
        segment.value_scale[g] = value_scale;
    }
};

// What the quants of weights stand for, which include the values' scales: the factors of a key's weight, and the size of
// one quant. They depend on the keys that a query sees alone, as all its bits must.
struct ValueScales {
    KeyRange keys{-1, -1};
    float quantum;
    alignas(64) float factors[SEGMENT];

    // Computes them for `range`, unless they are.
    void set(const Segment<int8_t>& segment, KeyRange range) {
        if (keys == range) return;
        keys = range;
        F32x16 max_lanes = F32x16::zero(), nan_lanes = F32x16::zero();
        int first = range.from / KEY_GROUP, end = (range.to + KEY_GROUP - 1) / KEY_GROUP;
        for (int g = first; g < end; g++) {
            F32x16 scales = F32x16::load(segment.value_scale[g]);
            if (g == first || g == end - 1)
                scales = scales.keep_lanes(range.from - g * KEY_GROUP, range.to - g * KEY_GROUP, 0.0f);
            max_lanes = max(max_lanes, scales);
            nan_lanes = fma(scales, F32x16::zero(), nan_lanes);
            scales.store(factors + g * KEY_GROUP);
        }
        float largest = reduce_max(max_lanes);
        bool tiny = largest < 1e-30f;  // its inverse would overflow
        F32x16 inverse = F32x16::set(tiny ? 0.0f : MAX_UNSIGNED / largest);
        for (int i = first * KEY_GROUP; i < end * KEY_GROUP; i += KEY_GROUP)
            min(F32x16::load(factors + i) * inverse, F32x16::set(MAX_UNSIGNED)).store(factors + i);
        quantum = (tiny ? 0.0f : largest / MAX_UNSIGNED) + reduce_sum(nan_lanes);
    }
};

// Maximum, sum and sums of values (dim) of some queries, of one segment or several.
struct SoftmaxState {
    float *maximum, *sum, *acc;
};

// Merges the results of a later segment with those of earlier ones.
inline void merge(float& maximum, float& sum, float* acc, float next_maximum, float next_sum, const float* next_acc,
                  int dim) {
    if (next_maximum == NEG_INF) return;  // no key was visible
    float total = std::max(maximum, next_maximum), lanes[16];
    F32x16 scale = exp2(F32x16::set(maximum - total)), next_scale = exp2(F32x16::set(next_maximum - total));
    fma(F32x16::set(sum), scale, F32x16::set(next_sum) * next_scale).store(lanes);
    sum = lanes[0];
    maximum = total;
    for (int d = 0; d < dim; d += 16)
        fma(F32x16::load(acc + d), scale, F32x16::load(next_acc + d) * next_scale).store(acc + d);
}

// A thread's memory for one work item's queries.
template <class T>
struct Scratch {
    using Operand = typename Products<T>::Operand;

    std::vector<F32x16> floats;
    std::vector<T> segment_buffers;
    std::vector<QueryScale> query_scales;
    float *query, *angle_factors, *scores, *block_acc, *acc;
    Operand *queries, *weights;
    ValueScales value_scales;
    alignas(64) float maximum[MAX_QUERIES], sum[MAX_QUERIES];
    int buffer = 0;

    void resize(int dim, int block_size) {
        int64_t sizes[] = {dim, MAX_QUERIES * dim, BLOCK * SEGMENT, BLOCK * dim, MAX_QUERIES * dim, MAX_QUERIES * dim,
                           BLOCK * SEGMENT}, total = 0;
        for (int64_t size : sizes) total += size;
        floats.resize(total / 16);
        float *next = reinterpret_cast<float*>(floats.data()), *parts[7];
        for (int i = 0; i < 7; i++) {
            parts[i] = next;
            next += sizes[i];
        }
        query = parts[0];
        angle_factors = parts[1];
        scores = parts[2];
        block_acc = parts[3];
        acc = parts[4];
        queries = reinterpret_cast<Operand*>(parts[5]);
        weights = reinterpret_cast<Operand*>(parts[6]);
        query_scales.resize(MAX_QUERIES);
        if (block_size < KEY_GROUP) segment_buffers.resize(2 * TypedCache<T>::buffer_size(dim));
    }
    // Returns the buffer for the next segment. There are two, used in turn, so the current one is not overwritten.
    T* next_segment_buffer() {
        buffer ^= 1;
        return segment_buffers.data() + buffer * segment_buffers.size() / 2;
    }
};

// Calls f(size, first) for blocks of BLOCK, and for the rest of `total`. The size is a compile-time constant.
template <class F>
void for_each_block(int total, F&& f) {
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
void for_each_power_of_two(int first, int end, F&& f) {
    for (; first + MAX_SIZE <= end; first += MAX_SIZE) f(std::integral_constant<int, MAX_SIZE>{}, first);
    if constexpr (MAX_SIZE > 1) for_each_power_of_two<MAX_SIZE / 2>(first, end, f);
}

// Vectors of sums for each of N queries that fit into the registers.
template <class P, int N>
#if defined(__AVX512F__)
constexpr int MAX_VECTORS = std::bit_floor(unsigned(std::min(4, P::SUMS / N)));
#else
constexpr int MAX_VECTORS = 1;
#endif

template <class P, int N, int V>
using Sums = typename P::Sum[N][V];

// Adds the products of one group of factors of each of N rows of factors, `count` in a row, to sums of V vectors.
template <class P, bool KEYS, int N, int V, class Vector>
inline __attribute__((always_inline)) void add_products(const typename P::Operand* rows, int64_t count, int64_t first,
                                                        const Vector (&vectors)[V], Sums<P, N, V>& sums) {
    for (int n = 0; n < N; n++) {
        auto factor = P::Factor::load(rows + n * count * P::OPERANDS, count, first);
        for (int v = 0; v < V; v++)
            if constexpr (KEYS)
                sums[n][v].add_key(vectors[v], factor);
            else
                sums[n][v].add_value(vectors[v], factor);
    }
}

// Sets scores (N, SEGMENT) of N queries and G groups of keys. Prefetches the next segment's keys.
template <int N, int G, bool PREFETCH, class T>
void compute_scores(const typename Products<T>::Operand* queries, const QueryScale* scales, int dim,
                    const Segment<T>& segment, const Segment<T>& next, int group, float* scores) {
    using P = Products<T>;
    Sums<P, N, G> sums;
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) sums[n][g] = P::Sum::zero();
    for (int d = 0, row = 0; d < dim; d += GROUP<T>, row++) {
        typename P::Vector vectors[G];
        for (int g = 0; g < G; g++) {
            vectors[g] = P::Vector::load(segment.key[group + g] + row * segment.key_stride);
            if constexpr (PREFETCH) prefetch(next.key[group + g] + row * next.key_stride);
        }
        add_products<P, true, N, G>(queries, dim, d, vectors, sums);
    }
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) {
            F32x16 score = sums[n][g].scores(scales[n]);
            if constexpr (is_quantized<T>) score = score * F32x16::load(segment.key_scale[group + g]);
            score.store(scores + n * SEGMENT + (group + g) * KEY_GROUP);
        }
}

// Adds to scores (N, SEGMENT) of G groups of keys what the factors (N, rotated) of the keys' bias give.
template <int N, int G>
void add_bias_scores(const Problem& p, const float* factors, int first, int group, float* scores) {
    using P = Products<float>;
    Sums<P, N, G> sums;
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) sums[n][g].v = F32x16::load(scores + n * SEGMENT + (group + g) * KEY_GROUP);
    for (int d = 0; d < p.rotated; d++) {
        typename P::Vector vectors[G];
        for (int g = 0; g < G; g++) {
            int position = first + (group + g) * KEY_GROUP;
            const float* tile = p.angles + position / ANGLE_TILE * ANGLE_TILE * p.rotated + position % ANGLE_TILE;
            vectors[g] = P::Vector::load(tile + d * ANGLE_TILE);
        }
        add_products<P, true, N, G>(factors, p.rotated, d, vectors, sums);
    }
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) sums[n][g].v.store(scores + n * SEGMENT + (group + g) * KEY_GROUP);
}

// Sets acc (N, dim) to the sums over a range of keys of weight * value, for 16 V dimensions from `first` on. Prefetches
// the next segment's values.
template <int N, int V, bool PREFETCH, class T>
void sum_values(const typename Products<T>::Operand* weights, const float* scales, int dim, const Segment<T>& segment,
                const Segment<T>& next, KeyRange keys, int first, float* acc) {
    using P = Products<T>;
    Sums<P, N, V> sums;
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) sums[n][v] = P::Sum::zero();
    auto vector = [&](int key, int v) {
        int64_t offset = key % KEY_GROUP * dim + (first + v * 16) * GROUP<T>;
        if constexpr (PREFETCH) prefetch(next.value[key / KEY_GROUP] + offset);
        return P::Vector::load(segment.value[key / KEY_GROUP] + offset);
    };
    int key = keys.from;
    for (; key + (GROUP<T> == 2) < keys.to; key += GROUP<T>) {
        typename P::Vector vectors[V];
        for (int v = 0; v < V; v++) vectors[v] = vector(key, v);
        add_products<P, false, N, V>(weights, SEGMENT, key, vectors, sums);
    }
    if constexpr (GROUP<T> == 2)
        if (key < keys.to) {  // the last pair's second value may not be a number yet
            typename P::Vector vectors[V];
            for (int v = 0; v < V; v++) vectors[v] = vector(key, v).first_of_pairs();
            add_products<P, false, N, V>(weights, SEGMENT, key, vectors, sums);
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) sums[n][v].values(scales[n]).store(acc + n * dim + first + v * 16);
}

// Caps the scores, and brings them to units of log 2.
void cap_scores(float softcap, float* scores, int count) {
    for (int i = 0; i < count; i++) scores[i] = softcap * LOG2_E * std::tanh(scores[i] / softcap);
}

// Returns the maximum of scores (SEGMENT) of `keys`, which are not empty, after setting others in their groups to -inf.
float mask_scores(KeyRange keys, float* scores) {
    int first = keys.from / KEY_GROUP, last = (keys.to - 1) / KEY_GROUP;
    for (int g : {first, last}) {
        F32x16 s = F32x16::load(scores + g * KEY_GROUP);
        s.keep_lanes(keys.from - g * KEY_GROUP, keys.to - g * KEY_GROUP, NEG_INF).store(scores + g * KEY_GROUP);
    }
    F32x16 maximum = F32x16::load(scores + first * KEY_GROUP);
    for (int g = first + 1; g <= last; g++) maximum = max(maximum, F32x16::load(scores + g * KEY_GROUP));
    return reduce_max(maximum);
}

// Turns a query's scores of `keys` into weights, and returns their sum. Keys of `all` that are not in `keys` weigh 0.
// Weights are multiplied by `factors`, unless that is nullptr.
template <class T>
float compute_weights(const float* scores, float maximum, KeyRange keys, KeyRange all, const float* factors,
                      typename Products<T>::Operand* weights) {
    F32x16 sums = F32x16::zero(), base = F32x16::set(maximum);
    int first = keys.from / KEY_GROUP, end = keys.to > keys.from ? (keys.to + KEY_GROUP - 1) / KEY_GROUP : first;
    for (int g = all.from / KEY_GROUP; g < first; g++)
        Products<T>::store_weights(F32x16::zero(), weights, SEGMENT, g * KEY_GROUP);
    for (int g = first; g < end; g++) {
        F32x16 weight = exp2(F32x16::load(scores + g * KEY_GROUP) - base);
        sums = sums + weight;
        if constexpr (is_quantized<T>) weight = weight * F32x16::load(factors + g * KEY_GROUP);
        Products<T>::store_weights(weight, weights, SEGMENT, g * KEY_GROUP);
    }
    for (int g = end; g * KEY_GROUP < all.to; g++)
        Products<T>::store_weights(F32x16::zero(), weights, SEGMENT, g * KEY_GROUP);
    return reduce_sum(sums);
}

// Adds a segment to the softmax of an item's N queries from `query` on.
template <int N, bool PREFETCH, class T>
void attend_block(const Problem& p, const WorkItem& item, const Segment<T>& segment, const Segment<T>& next, int query,
                  Scratch<T>& scratch) {
    using P = Products<T>;
    int dim = p.cache.padded_dim, queries_per_kv = p.heads / p.cache.kv_heads;
    auto visible = [&](int n) { return visible_keys(p, item.start + (query + n) / queries_per_kv, segment.first); };
    KeyRange all{visible(0).from / KEY_GROUP * KEY_GROUP, visible(N - 1).to};
    if (all.to <= all.from) return;
    int first = all.from / KEY_GROUP, end = (all.to + KEY_GROUP - 1) / KEY_GROUP;
    for_each_power_of_two<MAX_VECTORS<P, N>>(first, end, [&](auto g, int group) {
        compute_scores<N, decltype(g)::value, PREFETCH, T>(scratch.queries + query * dim * P::OPERANDS,
                                                           &scratch.query_scales[query], dim, segment, next, group,
                                                           scratch.scores);
    });
    if (p.angles && p.key_bias)
        for_each_power_of_two<MAX_VECTORS<Products<float>, N>>(first, end, [&](auto g, int group) {
            add_bias_scores<N, decltype(g)::value>(p, scratch.angle_factors + query * p.rotated, segment.first, group,
                                                   scratch.scores);
        });
    float maximum[N], sum[N], value_scale[N];
    for (int n = 0; n < N; n++) {
        KeyRange keys = visible(n);
        float* scores = scratch.scores + n * SEGMENT;
        if (p.softcap != 0) cap_scores(p.softcap, scores + first * KEY_GROUP, (end - first) * KEY_GROUP);
        maximum[n] = keys.from < keys.to ? mask_scores(keys, scores) : NEG_INF;
    }
    for (int n = 0; n < N; n++) {
        KeyRange keys = visible(n);
        if constexpr (is_quantized<T>) scratch.value_scales.set(segment, keys);
        sum[n] = compute_weights<T>(scratch.scores + n * SEGMENT, maximum[n] == NEG_INF ? 0.0f : maximum[n], keys, all,
                                    scratch.value_scales.factors, scratch.weights + n * SEGMENT * P::OPERANDS);
        value_scale[n] = scratch.value_scales.quantum;
    }
    for_each_power_of_two<MAX_VECTORS<P, N>>(0, dim / 16, [&](auto v, int vector) {
        sum_values<N, decltype(v)::value, PREFETCH, T>(scratch.weights, value_scale, dim, segment, next, all,
                                                       vector * 16, scratch.block_acc);
    });
    for (int n = 0; n < N; n++)
        merge(scratch.maximum[query + n], scratch.sum[query + n], scratch.acc + (query + n) * dim, maximum[n], sum[n],
              scratch.block_acc + n * dim, dim);
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

// Stores an item's queries as the products take them, and begins their softmax.
template <class T>
void begin_item(const Problem& p, const WorkItem& item, Scratch<T>& scratch) {
    int queries_per_kv = p.heads / p.cache.kv_heads, queries = item.count * queries_per_kv, dim = p.cache.padded_dim;
    float scale = p.softcap == 0 ? p.scale * LOG2_E : p.scale;
    std::fill_n(scratch.query, dim, 0.0f);
    for (int i = 0; i < queries; i++) {
        const float* token = p.q + (item.token + i / queries_per_kv) * p.q_token_stride;
        const float* query = token + (item.head * queries_per_kv + i % queries_per_kv) * p.q_head_stride;
        for (int d = 0; d < p.head_dim; d++) scratch.query[d] = query[d] * scale;
        scratch.query_scales[i] =
            Products<T>::store_query(scratch.query, dim, scratch.queries + i * dim * Products<T>::OPERANDS);
        if (p.angles && p.key_bias)
            compute_angle_factors(scratch.query, p.key_bias + item.head * p.head_dim, p.rotated,
                                  scratch.angle_factors + i * p.rotated);
    }
    std::fill_n(scratch.maximum, queries, NEG_INF);
    std::fill_n(scratch.sum, queries, 0.0f);
    std::fill_n(scratch.acc, queries * dim, 0.0f);
}

template <class T>
void attend_segment(const Problem& p, const WorkItem& item, const Segment<T>& segment, const Segment<T>& next,
                    Scratch<T>& scratch) {
    scratch.value_scales.keys = {-1, -1};
    for_each_block(item.count * (p.heads / p.cache.kv_heads), [&](auto n, int query) {
        constexpr int N = decltype(n)::value;
        if (query == 0)
            attend_block<N, true>(p, item, segment, next, query, scratch);
        else
            attend_block<N, false>(p, item, segment, next, query, scratch);
    });
}

// Results of the segments of items that share a context, to be merged: (segments of the item's queries, queries).
struct Partials {
    std::vector<float> maximum, sum, acc;
    explicit Partials(int64_t count, int dim) : maximum(count), sum(count), acc(count * dim) {}
};

// Writes the output of one of an item's queries. Adds the bias that the cache leaves out of the values as it is, since
// the weights sum to 1.
void write_output(const Problem& p, const WorkItem& item, int query, float sum, const float* acc) {
    int queries_per_kv = p.heads / p.cache.kv_heads;
    int64_t token = item.token + query / queries_per_kv, head = item.head * queries_per_kv + query % queries_per_kv;
    float* out = p.out + (token * p.heads + head) * p.head_dim;
    const float* bias = p.value_bias ? p.value_bias + item.head * p.head_dim : nullptr;
    float inverse = 1.0f / sum;
    for (int d = 0; d < p.head_dim; d++) out[d] = acc[d] * inverse;
    for (int d = 0; bias && d < p.head_dim; d++) out[d] += bias[d];
}

template <class T>
void end_item(const Problem& p, const WorkItem& item, const Scratch<T>& scratch, Partials& partials) {
    int queries = item.count * (p.heads / p.cache.kv_heads), dim = p.cache.padded_dim;
    if (item.partial < 0) {
        for (int i = 0; i < queries; i++) write_output(p, item, i, scratch.sum[i], scratch.acc + i * dim);
        return;
    }
    std::copy_n(scratch.maximum, queries, &partials.maximum[item.partial]);
    std::copy_n(scratch.sum, queries, &partials.sum[item.partial]);
    std::copy_n(scratch.acc, queries * dim, &partials.acc[item.partial * dim]);
}

// Computes items, which threads take one after the other, segment by segment.
template <class T>
void run_items(const Problem& p, const std::vector<WorkItem>& items, Partials& partials) {
    TypedCache<T> cache{p.cache};
    std::atomic<size_t> taken{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), items.size()), 1, [&](int64_t, int64_t) {
        static thread_local Scratch<T> scratch;
        scratch.resize(p.cache.padded_dim, p.cache.block_size);
        auto take_item = [&] {
            size_t i = taken.fetch_add(1);
            return i < items.size() ? &items[i] : nullptr;
        };
        const WorkItem *item = take_item(), *next_item;
        if (!item) return;
        Segment<T> segment = cache.segment(p, *item, item->segment, scratch.next_segment_buffer()), next = segment;
        for (; item; item = next_item) {
            next_item = take_item();
            begin_item(p, *item, scratch);
            for (int s = item->segment; s < item->end_segment; s++) {
                if (s + 1 < item->end_segment)
                    next = cache.segment(p, *item, s + 1, scratch.next_segment_buffer());
                else if (next_item)
                    next = cache.segment(p, *next_item, next_item->segment, scratch.next_segment_buffer());
                attend_segment(p, *item, segment, next, scratch);
                segment = next;
            }
            end_item(p, *item, scratch, partials);
        }
    });
}

// Merges the segments of the item's queries, of which `item` has the first, and writes their outputs.
void merge_segments(const Problem& p, const WorkItem& item, int segments, const Partials& partials) {
    int queries = item.count * (p.heads / p.cache.kv_heads), dim = p.cache.padded_dim;
    std::vector<float> acc(dim);
    for (int i = 0; i < queries; i++) {
        float maximum = NEG_INF, sum = 0;
        std::fill(acc.begin(), acc.end(), 0.0f);
        for (int64_t s = 0, at = item.partial + i; s < segments; s++, at += queries)
            merge(maximum, sum, acc.data(), partials.maximum[at], partials.sum[at], &partials.acc[at * dim], dim);
        write_output(p, item, i, sum, acc.data());
    }
}

// Splits the rows into items that have all segments of their queries.
std::vector<WorkItem> split_rows(const Problem& p) {
    int max_count = std::max(1, MAX_QUERIES / int(p.heads / p.cache.kv_heads));
    std::vector<WorkItem> items;
    for (int32_t row = 0; row < p.rows; row++)
        for (int64_t done = 0, count = p.offsets[row + 1] - p.offsets[row]; done < count; done += max_count) {
            int32_t size = std::min<int64_t>(max_count, count - done), start = p.starts[row] + done;
            int32_t first = p.window ? std::max(0, start - p.window + 1) / SEGMENT : 0;
            int32_t end = (start + size + SEGMENT - 1) / SEGMENT;
            for (int32_t head = 0; head < p.cache.kv_heads; head++)
                items.push_back({row, int32_t(p.offsets[row] + done), start, size, head, first, end, -1});
        }
    return items;
}

template <class T>
void run(const Problem& p) {
    std::vector<WorkItem> rows = split_rows(p), items;
    auto cost = [](const WorkItem& item) { return int64_t(item.count) * (item.end_segment - item.segment); };
    int64_t total = 0, count = 0;
    for (const WorkItem& row : rows) total += cost(row);
    std::vector<WorkItem> shared;  // those whose segments threads share
    for (WorkItem& row : rows) {
        int segments = row.end_segment - row.segment;
        if (segments == 1 || cost(row) * at::get_num_threads() * ITEMS_PER_THREAD <= total) {
            items.push_back(row);
            continue;
        }
        row.partial = count;
        shared.push_back(row);
        for (int s = row.segment; s < row.end_segment; s++) {
            WorkItem item = row;
            item.segment = s;
            item.end_segment = s + 1;
            item.partial = count;
            items.push_back(item);
            count += row.count * (p.heads / p.cache.kv_heads);
        }
    }
    Partials partials(count, p.cache.padded_dim);
    run_items<T>(p, items, partials);
    at::parallel_for(0, shared.size(), 1 + 512 / std::max<int64_t>(1, shared.empty() ? 1 : count / shared.size()),
                     [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++)
            merge_segments(p, shared[i], shared[i].end_segment - shared[i].segment, partials);
    });
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
    TORCH_CHECK(!angles || (angles->dim() == 3 && angles->size(2) == ANGLE_TILE && angles->size(1) <= p.head_dim),
                "angles must be (tiles, R, ", ANGLE_TILE, ") with R at most a head's dimensions");
    p.key_bias = data(key_bias);
    p.value_bias = data(value_bias);
    p.angles = data(angles);
    p.angle_tiles = angles ? angles->size(0) : 0;
    p.rotated = angles ? angles->size(1) : 0;
}

void paged_attention(const AttentionProblem& p) {
    const KVCache& cache = p.cache;
    for (int64_t row = 0; p.angles && row < p.rows; row++)
        TORCH_CHECK(p.starts[row] + p.offsets[row + 1] - p.offsets[row] <= p.angle_tiles * ANGLE_TILE,
                    "positions without angles");
    TORCH_CHECK(cache.block_size % KEY_GROUP == 0 || KEY_GROUP % cache.block_size == 0, "no kernel for blocks of ",
                cache.block_size);
    TORCH_CHECK(cache.padded_dim >= p.head_dim, "the cache has ", cache.padded_dim, " dimensions for ", p.head_dim);
    TORCH_CHECK(p.heads % cache.kv_heads == 0 && p.heads / cache.kv_heads <= MAX_QUERIES,
                "no kernel for ", p.heads, " query heads and ", cache.kv_heads, " kv heads");
    for_cache_type(cache.type, [&](auto tag) { run<decltype(tag)>(p); });
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor offsets, Tensor starts, Tensor block_tables, "
        "float scale, int window, float softcap, Tensor? key_bias, Tensor? value_bias, Tensor? angles, "
        "Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("paged_attention", paged_attention_op); }

}  // namespace quire
