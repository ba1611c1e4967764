// The segments of a context: 256 keys and their values at fixed absolute positions, where they lie in the paged cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention.h"
#include "kv_cache.h"

namespace quire {

constexpr int KEY_GROUP = 16;  // keys whose scores fill one vector
constexpr int SEGMENT = 256;   // keys
constexpr int SEGMENT_GROUPS = SEGMENT / KEY_GROUP;

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
inline KeyRange visible_keys(const Problem& p, int position, int first) {
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

    // Returns the elements of a buffer for the blocks of a segment.
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

}  // namespace quire
