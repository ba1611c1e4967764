// Attention of a few queries over one segment: scores, their softmax, and sums of values. attention.cpp explains it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention_products.h"
#include "attention_segments.h"
#include "quant_scale.h"
#include "simd.h"

namespace quire {

constexpr int ANGLE_TILE = 64;   // positions of a tile of the table of angles
constexpr int MAX_QUERIES = 96;  // (position, head) pairs of one work item, which read the same segments
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;

// How weights become quants. `factors` multiply a key's weight and include its value's scale; `quantum` is what one
// quant stands for. They depend on the keys that a query sees alone, as all its bits must.
struct ValueScales {
    KeyRange keys{-1, -1};
    float quantum = 0;
    alignas(64) float factors[SEGMENT];

    // Computes them for `range`, unless they are.
    void set(const Segment<int8_t>& segment, KeyRange range) {
        if (keys == range) return;
        keys = range;
        AbsMax largest;
        int first = range.from / KEY_GROUP, end = (range.to + KEY_GROUP - 1) / KEY_GROUP;
        for (int g = first; g < end; g++) {
            F32x16 scales = F32x16::load(segment.value_scale[g]);
            if (g == first || g == end - 1)
                scales = scales.keep_lanes(range.from - g * KEY_GROUP, range.to - g * KEY_GROUP, 0.0f);
            largest.add(scales);
            scales.store(factors + g * KEY_GROUP);
        }
        QuantScale quants = largest.scale_to(MAX_UNSIGNED);
        for (int i = first * KEY_GROUP; i < end * KEY_GROUP; i += KEY_GROUP)
            min(F32x16::load(factors + i) * quants.inverse, F32x16::set(MAX_UNSIGNED)).store(factors + i);
        quantum = quants.scale;
    }
};

// Merges the results of a later segment with those of earlier ones.
inline void merge(float& maximum, float& sum, float* acc, float next_maximum, float next_sum, const float* next_acc,
                  int dim) {
    if (next_sum == 0) return;  // no key was visible; a sum that is NaN stays
    float total = std::max(maximum, next_maximum), lanes[16];
    F32x16 scale = exp2(F32x16::set(maximum - total)), next_scale = exp2(F32x16::set(next_maximum - total));
    fma(F32x16::set(sum), scale, F32x16::set(next_sum) * next_scale).store(lanes);
    sum = lanes[0];
    maximum = total;
    for (int d = 0; d < dim; d += 16)
        fma(F32x16::load(acc + d), scale, F32x16::load(next_acc + d) * next_scale).store(acc + d);
}

// Numbers at addresses that are multiples of a vector's size.
template <class U>
struct Buffer {
    std::vector<F32x16> vectors;
    void resize(int64_t count) { vectors.resize((count * sizeof(U) + sizeof(F32x16) - 1) / sizeof(F32x16)); }
    U* data() { return reinterpret_cast<U*>(vectors.data()); }
};

// A thread's memory for one work item's queries.
template <class T>
struct Scratch {
    using Operand = typename Products<T>::Operand;

    Buffer<Operand> queries;       // of the item, as the products take them
    Buffer<float> angle_factors;   // (queries, rotated)
    QueryScale query_scales[MAX_QUERIES];
    float maximum[MAX_QUERIES], sum[MAX_QUERIES];  // of each query's softmax over the segments so far
    Buffer<float> acc;             // (queries, dim): sums of values
    Buffer<float> scores;          // (QUERY_TILE, SEGMENT) of some queries and one segment
    Buffer<Operand> weights;       // likewise
    Buffer<float> segment_acc;     // (QUERY_TILE, dim)
    Buffer<float> query;           // (dim)
    ValueScales value_scales;

    void resize(int dim, int block_size) {
        queries.resize(MAX_QUERIES * dim * Products<T>::OPERANDS);
        angle_factors.resize(MAX_QUERIES * dim);
        acc.resize(MAX_QUERIES * dim);
        scores.resize(Products<T>::QUERY_TILE * SEGMENT);
        weights.resize(Products<T>::QUERY_TILE * SEGMENT * Products<T>::OPERANDS);
        segment_acc.resize(Products<T>::QUERY_TILE * dim);
        query.resize(dim);
        for (auto& buffer : segment_buffers)
            buffer.resize(block_size < KEY_GROUP ? TypedCache<T>::buffer_size(dim) : 0);
    }
    // Returns the buffer for the next segment. There are two, used in turn, so the current one is not overwritten.
    T* next_segment_buffer() {
        std::swap(segment_buffers[0], segment_buffers[1]);
        return segment_buffers[0].data();
    }

  private:
    Buffer<T> segment_buffers[2];
};

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
inline void cap_scores(float softcap, float* scores, int count) {
    for (int i = 0; i < count; i++) scores[i] = softcap * LOG2_E * std::tanh(scores[i] / softcap);
}

// Returns the maximum of scores (SEGMENT) of `keys`, which are not empty, after setting others in their groups to -inf.
inline float mask_scores(KeyRange keys, float* scores) {
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
// With a quantised cache, weights are stored as quants, by `factors` (ValueScales).
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
    const auto* queries = scratch.queries.data() + query * dim * P::OPERANDS;
    float* scores = scratch.scores.data();
    for_each_power_of_two<MAX_VECTORS<P, N>>(first, end, [&](auto g, int group) {
        compute_scores<N, decltype(g)::value, PREFETCH, T>(queries, &scratch.query_scales[query], dim, segment, next,
                                                           group, scores);
    });
    if (p.angles && p.key_bias) {
        const float* factors = scratch.angle_factors.data() + query * p.rotated;
        for_each_power_of_two<MAX_VECTORS<Products<float>, N>>(first, end, [&](auto g, int group) {
            add_bias_scores<N, decltype(g)::value>(p, factors, segment.first, group, scores);
        });
    }
    float maximum[N], sum[N], value_scale[N];
    for (int n = 0; n < N; n++) {
        float* row = scores + n * SEGMENT;
        if (p.softcap != 0) cap_scores(p.softcap, row + first * KEY_GROUP, (end - first) * KEY_GROUP);
        KeyRange keys = visible(n);
        maximum[n] = keys.from < keys.to ? mask_scores(keys, row) : NEG_INF;
    }
    auto* weights = scratch.weights.data();
    for (int n = 0; n < N; n++) {
        KeyRange keys = visible(n);
        if constexpr (is_quantized<T>) scratch.value_scales.set(segment, keys);
        sum[n] = compute_weights<T>(scores + n * SEGMENT, maximum[n] == NEG_INF ? 0.0f : maximum[n], keys, all,
                                    scratch.value_scales.factors, weights + n * SEGMENT * P::OPERANDS);
        value_scale[n] = scratch.value_scales.quantum;
    }
    float *segment_acc = scratch.segment_acc.data(), *acc = scratch.acc.data() + query * dim;
    for_each_power_of_two<MAX_VECTORS<P, N>>(0, dim / 16, [&](auto v, int vector) {
        sum_values<N, decltype(v)::value, PREFETCH, T>(weights, value_scale, dim, segment, next, all, vector * 16,
                                                       segment_acc);
    });
    for (int n = 0; n < N; n++)
        merge(scratch.maximum[query + n], scratch.sum[query + n], acc + n * dim, maximum[n], sum[n],
              segment_acc + n * dim, dim);
}

}  // namespace quire
