// Attention of ragged rows over a paged cache; kernels/reference/attention.py has the formula, kv_cache.h the layout,
// attention_products.h the arithmetic of each type of the cache, and attention_block.h what is computed of one segment.
//
// One vector holds a group of dimensions of sixteen keys, so that the scores of sixteen keys are computed at once, or a
// group of keys' values of sixteen dimensions.
//
// The order of a query's sums does not depend on the batch. The context is cut at fixed absolute positions into
// segments of 256 keys. The softmax of a segment has the maximum of its scores; segments are merged in order (online
// softmax: Milakov and Gimelshein, 2018), even if several threads have computed them. A key that a query may not see
// adds an exact zero, so queries are computed together though some see fewer keys. Scores are in units of log 2.
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
#include <cmath>
#include <memory>
#include <vector>

#include "attention_block.h"
#include "attention_products.h"
#include "attention_segments.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int ITEMS_PER_THREAD = 4;  // where there are fewer, segments are shared among threads

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
    float* padded = scratch.query.data();
    std::fill_n(padded, dim, 0.0f);
    for (int i = 0; i < queries; i++) {
        const float* token = p.q + (item.token + i / queries_per_kv) * p.q_token_stride;
        const float* query = token + (item.head * queries_per_kv + i % queries_per_kv) * p.q_head_stride;
        for (int d = 0; d < p.head_dim; d++) padded[d] = query[d] * scale;
        scratch.query_scales[i] =
            Products<T>::store_query(padded, dim, scratch.queries.data() + i * dim * Products<T>::OPERANDS);
        if (p.angles && p.key_bias)
            compute_angle_factors(padded, p.key_bias + item.head * p.head_dim, p.rotated,
                                  scratch.angle_factors.data() + i * p.rotated);
    }
    std::fill_n(scratch.maximum, queries, NEG_INF);
    std::fill_n(scratch.sum, queries, 0.0f);
    std::fill_n(scratch.acc.data(), queries * dim, 0.0f);
}

template <class T>
void attend_segment(const Problem& p, const WorkItem& item, const Segment<T>& segment, const Segment<T>& next,
                    Scratch<T>& scratch) {
    scratch.value_scales.keys = {-1, -1};
    for_even_tiles<Products<T>::QUERY_TILE>(item.count * (p.heads / p.cache.kv_heads), [&](auto n, int64_t first) {
        constexpr int N = decltype(n)::value;
        int query = int(first);
        if (query == 0)
            attend_block<N, true>(p, item, segment, next, query, scratch);
        else
            attend_block<N, false>(p, item, segment, next, query, scratch);
    });
}

// Results of the segments of items that share a context, to be merged: (segments of the item's queries, queries).
struct Partials {
    std::vector<float> maximum, sum;
    std::unique_ptr<float[]> acc;  // not zeroed, since it may be large
    explicit Partials(int64_t count, int dim)
        : maximum(count), sum(count), acc(std::make_unique_for_overwrite<float[]>(count * dim)) {}
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
void end_item(const Problem& p, const WorkItem& item, Scratch<T>& scratch, Partials& partials) {
    int queries = item.count * (p.heads / p.cache.kv_heads), dim = p.cache.padded_dim;
    if (item.partial < 0) {
        for (int i = 0; i < queries; i++) write_output(p, item, i, scratch.sum[i], scratch.acc.data() + i * dim);
        return;
    }
    std::copy_n(scratch.maximum, queries, &partials.maximum[item.partial]);
    std::copy_n(scratch.sum, queries, &partials.sum[item.partial]);
    std::copy_n(scratch.acc.data(), queries * dim, &partials.acc[item.partial * dim]);
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
    TORCH_CHECK(cache.type != CacheType::int8 || cache.padded_dim <= MAX_INT8_DIM, "no kernel for int8 heads of ",
                cache.padded_dim);
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
