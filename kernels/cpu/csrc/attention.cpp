// Attention of ragged rows over a paged cache; the formula stands in kernels/reference/paged_attention.py.
//
// The keys of a block lie with the position as the last dimension, so that sixteen keys are the sixteen lanes of a
// score; the values lie as usual, with the head's dimension last. In the cache that dimension is rounded up to
// sixteens, of which the last ones are zero.
//
// What a query's result is made of does not depend on the batch. Its context is cut at fixed absolute positions: groups
// of 16 keys, tiles of 64, segments of 256. Within a segment tiles are taken from left to right with a running maximum
// (online softmax: Milakov and Gimelshein, 2018); segments are merged from left to right, also where one thread has
// done them all. A key that the query may not see adds an exact zero, so it does not matter for which neighbour it was
// read, or whether it was.
//
// Where keys lack a bias b, a score of a query q lacks q . R(j) b, R(j) being the rotation of position j. That is a sum over
// pairs of dimensions, (q1 b1 + q2 b2) cos + (q2 b1 - q1 b2) sin, with angles that all heads and layers share: one more
// product, of these two factors with a table of angles. Dimensions that are not rotated would give all of a query's
// scores the same, which softmax does not see.
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

constexpr int GROUP = 16;     // keys, one vector of scores
constexpr int TILE = 64;      // keys between two looks at the running maximum
constexpr int SEGMENT = 256;  // keys
constexpr int QUERIES = 96;   // (position, head) pairs that share the tiles that one work item reads
constexpr int GROUPS = TILE / GROUP;
#if defined(__AVX512F__)
constexpr int WIDE = 4;  // vectors of a product that fit the registers, for six queries
#else
constexpr int WIDE = 1;
#endif
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

using Problem = AttentionProblem;

// Queries of one row at consecutive positions, for one kv head, and one of the segments of their context that they see.
struct Item {
    int32_t row, token, start, count, head, segment, segments;
    int32_t first, end;  // what of the segment is read: the keys that some query sees, from the start of a tile
    int64_t partial;  // where its (maximum, sum, accumulator) go, in queries; unused if there is only one segment
};

// Whether numbers are codes, to be multiplied by a scale for each key.
template <class T>
constexpr bool coded = std::is_same_v<T, int8_t>;

// Where a tile's keys and values are, by group: keys (dim, 16), rows `key_stride` apart, and values (16, dim).
template <class T, bool SCALED = coded<T>>
struct Tile {
    const T* key[GROUPS];
    const T* value[GROUPS];
    const float *key_scale[GROUPS], *value_scale[GROUPS];  // of each key of a group, if scaled
    int64_t key_stride;
    int first, keys, groups;
};

// Calls a line to the second cache: more of them can be under way than to the first.
template <class T>
void fetch(const T* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

template <class T>
struct Cache {
    const T *keys, *values;

    // That of the keys [first, end), of which there may be fewer than a tile holds. Blocks shorter than a group are
    // joined in `scratch`, of 2 * TILE * (dim + 4).
    Tile<T> tile(const Problem& p, const Item& item, int first, T* scratch) const {
        const int32_t* table = p.tables + item.row * p.table_width;
        int64_t block = p.cache.block, dim = p.cache.dim;
        auto piece = [&](int position) {
            return (int64_t(table[position / block]) * p.cache.kv_heads + item.head) * p.cache.piece();
        };
        auto scales = [&](const T* of, int position) {
            return reinterpret_cast<const float*>(of + piece(position) + dim * block) + position % block;
        };
        Tile<T> tile;
        tile.key_stride = std::max<int64_t>(block, GROUP);
        int end = std::min(first + TILE, item.end);
        tile.first = first;
        tile.keys = end - first;
        tile.groups = (tile.keys + GROUP - 1) / GROUP;
        for (int g = 0, at = first; at < end; g++, at += GROUP) {
            if (block >= GROUP) {
                tile.key[g] = keys + piece(at) + at % block;
                tile.value[g] = values + piece(at) + at % block * dim;
                if constexpr (coded<T>) {
                    tile.key_scale[g] = scales(keys, at);
                    tile.value_scale[g] = scales(values, at);
                }
                continue;
            }
            T *k = scratch + 2 * g * GROUP * (dim + sizeof(float)), *v = k + GROUP * dim, *end_of_v = v + GROUP * dim;
            std::fill(k, end_of_v, T{});
            float *key_scale = reinterpret_cast<float*>(end_of_v), *value_scale = key_scale + GROUP;
            for (int position = at; position < std::min(end, at + GROUP); position += block) {
                int64_t from = piece(position), column = position - at;
                for (int d = 0; d < dim; d++) std::copy_n(keys + from + d * block, block, k + d * GROUP + column);
                std::copy_n(values + from, dim * block, v + column * dim);
                if constexpr (coded<T>) {
                    std::copy_n(scales(keys, position), block, key_scale + column);
                    std::copy_n(scales(values, position), block, value_scale + column);
                }
            }
            tile.key[g] = k;
            tile.value[g] = v;
            tile.key_scale[g] = key_scale;
            tile.value_scale[g] = value_scale;
        }
        for (int g = tile.groups; g < GROUPS; g++) {
            tile.key[g] = tile.key[0];
            tile.value[g] = tile.value[0];
            tile.key_scale[g] = tile.key_scale[0];
            tile.value_scale[g] = tile.value_scale[0];
        }
        return tile;
    }
};

// scores[query][64] of N queries, whose vectors lie one behind the other, with G groups of keys, added to those that are
// there if ADD. The keys of `next` are called to the cache meanwhile.
template <int N, int G, bool ADD = false, class T, bool SCALED, class Next>
void score(const float* q, int dim, const Tile<T, SCALED>& tile, int group, const Next& next, float* scores) {
    F32x16 sums[N][G];
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++)
            sums[n][g] = ADD ? F32x16::load(scores + n * TILE + (group + g) * GROUP) : F32x16::zero();
    int d = 0;
    do {
        F32x16 key[G];
        for (int g = 0; g < G; g++) key[g] = F32x16::load(tile.key[group + g] + d * tile.key_stride);
        if (group == 0) next.keys(d);
        for (int n = 0; n < N; n++) {
            F32x16 x = F32x16::set(q[n * dim + d]);
            for (int g = 0; g < G; g++) sums[n][g] = fma(x, key[g], sums[n][g]);
        }
    } while (++d < dim);
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) {
            if constexpr (SCALED) sums[n][g] = sums[n][g] * F32x16::load(tile.key_scale[group + g]);
            sums[n][g].store(scores + n * TILE + (group + g) * GROUP);
        }
}

// acc[query] = acc[query] * fade[query] + sum over `keys` keys of weight * value, for N queries and 16 L dimensions.
template <int N, int L, class T, bool SCALED, class Next>
void accumulate(const float* weights, const float* fade, int dim, const Tile<T, SCALED>& tile, int first, int keys,
                const Next& next, float* acc) {
    F32x16 sums[N][L];
    for (int n = 0; n < N; n++)
        for (int l = 0; l < L; l++) sums[n][l] = F32x16::load(acc + n * dim + l * 16) * F32x16::set(fade[n]);
    int key = 0;
    do {
        const T* values = tile.value[key / GROUP] + key % GROUP * dim + first;
        next.values(key);
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

// Calls f with a compile-time count for each six of `total`, and one for what remains.
template <class F>
void in_sixes(int total, F&& f) {
    int done = 0;
    for (; done + 6 <= total; done += 6) f(std::integral_constant<int, 6>{}, done);
    switch (total - done) {
        case 1: return f(std::integral_constant<int, 1>{}, done);
        case 2: return f(std::integral_constant<int, 2>{}, done);
        case 3: return f(std::integral_constant<int, 3>{}, done);
        case 4: return f(std::integral_constant<int, 4>{}, done);
        case 5: return f(std::integral_constant<int, 5>{}, done);
    }
}

// The same in pieces of at most MOST, a power of two.
template <int MOST, class F>
void in_halves(int total, F&& f, int done = 0) {
    for (; done + MOST <= total; done += MOST) f(std::integral_constant<int, MOST>{}, done);
    if constexpr (MOST > 1) in_halves<MOST / 2>(total, f, done);
}

// Room for one work item's queries.
template <class T>
struct Scratch {
    std::vector<F32x16> q_, turned_, scores_, acc_, wide_;
    std::vector<T> tiles;
    alignas(64) float most[QUERIES], total[QUERIES], fade[QUERIES], sums[QUERIES];
    float *q, *turned, *scores, *acc, *wide;
    int turn = 0;

    void fit(int dim) {
        q = room(q_, QUERIES * dim);
        turned = room(turned_, QUERIES * dim);
        scores = room(scores_, QUERIES * TILE);
        acc = room(acc_, QUERIES * dim);
        wide = room(wide_, 2 * TILE * dim);
        tiles.resize(2 * 2 * TILE * (dim + sizeof(float)));
    }
    // For the blocks of one tile, while those of the last one are used.
    T* room() {
        turn ^= 1;
        return tiles.data() + turn * tiles.size() / 2;
    }
    static float* room(std::vector<F32x16>& lanes, int floats) {
        lanes.resize(floats / 16);
        return reinterpret_cast<float*>(lanes.data());
    }
};

// Hides one query's scores but those of the tile's keys within [from, to); gives the highest.
float hide(const Problem& p, float* scores, int from, int to) {
    F32x16 s[GROUPS];
    for (int g = 0; g < GROUPS; g++) s[g] = F32x16::load(scores + g * GROUP);
    if (p.softcap != 0 || from > 0 || to < TILE)
        for (int g = 0; g < GROUPS; g++) {
            if (p.softcap != 0) {
                float lanes[GROUP];
                s[g].store(lanes);
                for (float& x : lanes) x = p.softcap * std::tanh(x / p.softcap);
                s[g] = F32x16::load(lanes);
            }
            s[g] = s[g].keep(from - g * GROUP, to - g * GROUP, NOTHING);
            s[g].store(scores + g * GROUP);
        }
    F32x16 most = s[0];
    for (int g = 1; g < GROUPS; g++) most = max(most, s[g]);
    return largest(most);
}

// Scores of all queries into weights; their maxima, sums and how much of what was before them stays.
template <class T, class Of, bool SCALED>
void soften(const Problem& p, const Item& item, int queries, const Tile<Of, SCALED>& tile, Scratch<T>& scratch) {
    int shared = p.heads / p.cache.kv_heads, first = tile.first;
    float now[QUERIES];
    for (int i = 0; i < queries; i++) {
        int position = item.start + i / shared, from = p.window ? position - p.window + 1 - first : 0;
        now[i] = std::max(scratch.most[i], hide(p, scratch.scores + i * TILE, from, position + 1 - first));
    }
    for (int i = 0; i < queries; i++) {
        float base = now[i] == NOTHING ? 0 : now[i];
        F32x16 weights[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            float* at = scratch.scores + i * TILE + g * GROUP;
            weights[g] = exp(F32x16::load(at) - F32x16::set(base));
            if constexpr (SCALED)
                (weights[g] * F32x16::load(tile.value_scale[std::min(g, tile.groups - 1)])).store(at);
            else
                weights[g].store(at);
        }
        F32x16 sums = weights[0];
        for (int g = 1; g < GROUPS; g++) sums = sums + weights[g];
        scratch.sums[i] = sum(sums);
        scratch.fade[i] = scratch.most[i] - base;
        scratch.most[i] = now[i];
    }
    for (int i = 0; i < queries; i += 16) {
        F32x16 fade = exp(F32x16::load(scratch.fade + i));
        fade.store(scratch.fade + i);
        fma(F32x16::load(scratch.total + i), fade, F32x16::load(scratch.sums + i)).store(scratch.total + i);
    }
}

struct Nothing {
    void keys(int) const {}
    void values(int) const {}
};

template <class T>
struct Next {
    const Tile<T>& tile;
    int dim;
    void keys(int d) const {
        for (int g = 0; g < GROUPS; g++) fetch(tile.key[g] + d * tile.key_stride);
    }
    void values(int key) const {
        const T* value = tile.value[key / GROUP] + key % GROUP * dim;
        for (int d = 0; d < dim; d += 64 / sizeof(T)) fetch(value + d);
    }
};

template <class T, bool SCALED, class N, class Of>
void attend_tile(const Problem& p, const Item& item, int queries, const Tile<T, SCALED>& tile, const N& next,
                 Scratch<Of>& scratch) {
    int dim = p.cache.dim, shared = p.heads / p.cache.kv_heads;
    // How many keys the query sees at most; those behind it too are not looked at, though others of the item see them.
    auto visible = [&](int query) { return std::min(tile.keys, item.start + query / shared + 1 - tile.first); };
    in_sixes(queries, [&](auto n, int at) {
        int seen = visible(at + n - 1);
        in_halves<WIDE>((seen + GROUP - 1) / GROUP, [&](auto g, int group) {
            score<decltype(n)::value, decltype(g)::value>(scratch.q + at * dim, dim, tile, group, next,
                                                          scratch.scores + at * TILE);
        });
    });
    if (p.angles && p.key_bias) {
        Tile<float, false> angles;
        angles.key_stride = TILE;
        for (int g = 0; g < GROUPS; g++) angles.key[g] = p.angles + tile.first * p.rotated + g * GROUP;
        in_sixes(queries, [&](auto n, int at) {
            in_halves<WIDE>((visible(at + n - 1) + GROUP - 1) / GROUP, [&](auto g, int group) {
                score<decltype(n)::value, decltype(g)::value, true>(scratch.turned + at * p.rotated, p.rotated, angles,
                                                                    group, Nothing{}, scratch.scores + at * TILE);
            });
        });
    }
    soften(p, item, queries, tile, scratch);
    in_sixes(queries, [&](auto n, int at) {
        int seen = visible(at + n - 1);
        if (seen <= 0) return;
        in_halves<WIDE>(dim / 16, [&](auto l, int vector) {
            accumulate<decltype(n)::value, decltype(l)::value>(scratch.scores + at * TILE, scratch.fade + at, dim, tile,
                                                               vector * 16, seen, next,
                                                               scratch.acc + at * dim + vector * 16);
        });
    });
}

// The same tile in float32, where several products will read it.
template <class T>
Tile<float, coded<T>> widened(const Tile<T>& tile, int dim, const Tile<T>& next, float* to) {
    Tile<float, coded<T>> wide;
    wide.key_stride = TILE;
    wide.first = tile.first;
    wide.keys = tile.keys;
    wide.groups = tile.groups;
    float *k = to, *v = to + TILE * dim;
    for (int g = 0; g < tile.groups; g++) {
        wide.key[g] = k + g * GROUP;
        wide.key_scale[g] = tile.key_scale[g];
        wide.value_scale[g] = tile.value_scale[g];
        for (int d = 0; d < dim; d++) {
            F32x16::load(tile.key[g] + d * tile.key_stride).store(k + g * GROUP + d * TILE);
            fetch(next.key[g] + d * next.key_stride);
        }
        wide.value[g] = v + g * GROUP * dim;
        for (int i = 0; i < std::min(GROUP, tile.keys - g * GROUP) * dim; i += 16) {
            F32x16::load(tile.value[g] + i).store(v + g * GROUP * dim + i);
            fetch(next.value[g] + i);
        }
    }
    return wide;
}

// What a query's products with the angles of a key's position are to be multiplied by: half of `turned` for cosines, half
// for sines.
void turn(const float* q, const float* bias, int64_t rotated, float* turned) {
    int64_t half = rotated / 2;
    for (int64_t d = 0; d < half; d++) {
        float q1 = q[d], q2 = q[half + d], b1 = bias[d], b2 = bias[half + d];
        turned[d] = std::fma(q1, b1, q2 * b2);
        turned[half + d] = std::fma(q2, b1, -q1 * b2);
    }
}

// The running maximum, sum and accumulator of each of an item's queries over its segment. `tile` is its first one and
// becomes the first of `then`, the thread's next item.
template <class T>
void attend(const Problem& p, const Cache<T>& cache, const Item& item, const Item* then, Tile<T>& tile,
            Scratch<T>& scratch) {
    int shared = p.heads / p.cache.kv_heads, queries = item.count * shared, dim = p.cache.dim;
    for (int i = 0; i < queries; i++) {
        const float* from = p.q + (item.token + i / shared) * p.q_token + (item.head * shared + i % shared) * p.q_head;
        for (int d = 0; d < p.head_dim; d++) scratch.q[i * dim + d] = from[d] * p.scale;
        std::fill_n(scratch.q + i * dim + p.head_dim, dim - p.head_dim, 0.0f);
        if (p.angles && p.key_bias)
            turn(scratch.q + i * dim, p.key_bias + item.head * p.head_dim, p.rotated, scratch.turned + i * p.rotated);
    }
    std::fill_n(scratch.most, QUERIES, NOTHING);
    std::fill_n(scratch.total, QUERIES, 0.0f);
    std::fill_n(scratch.acc, queries * dim, 0.0f);
    for (int first = item.first; first < item.end; first += TILE) {
        Tile<T> next = first + TILE < item.end ? cache.tile(p, item, first + TILE, scratch.room())
                       : then                  ? cache.tile(p, *then, then->first, scratch.room())
                                               : tile;
        if (queries > 6)
            attend_tile(p, item, queries, widened(tile, dim, next, scratch.wide), Nothing{}, scratch);
        else
            attend_tile(p, item, queries, tile, Next<T>{next, dim}, scratch);
        for (int key = tile.keys; key < next.keys; key++) Next<T>{next, dim}.values(key);
        tile = next;
    }
}

// The output, with the bias that the values lack: their weights sum to 1.
void finish(float* out, const float* acc, float total, const float* bias, int head_dim) {
    for (int d = 0; d < head_dim; d++) out[d] = acc[d] / total;
    for (int d = 0; bias && d < head_dim; d++) out[d] += bias[d];
}

// Merge the segments of one query, from left to right, and write its output.
void merge(float* out, const float* most, const float* total, const float* acc, int64_t stride, int segments,
           const float* bias, int dim, int head_dim) {
    float top = NOTHING;
    for (int s = 0; s < segments; s++) top = std::max(top, most[s * stride]);
    float sum = 0;
    std::vector<float> joined(dim, 0.0f);
    for (int s = 0; s < segments; s++) {
        float lanes[16];
        exp(F32x16::set(most[s * stride] - top)).store(lanes);
        sum = std::fma(total[s * stride], lanes[0], sum);
        for (int d = 0; d < dim; d += 16) {
            F32x16 part = F32x16::load(acc + s * stride * dim + d);
            fma(part, F32x16::set(lanes[0]), F32x16::load(&joined[d])).store(&joined[d]);
        }
    }
    finish(out, joined.data(), sum, bias, head_dim);
}

template <class T>
void run(const Problem& p, const Cache<T>& cache, const std::vector<Item>& items, int64_t partials) {
    int shared = p.heads / p.cache.kv_heads, dim = p.cache.dim;
    std::vector<float> most(partials), total(partials), acc(partials * dim);
    auto output = [&](const Item& item, int i) {
        return p.out + ((item.token + i / shared) * int64_t(p.heads) + item.head * shared + i % shared) * p.head_dim;
    };
    auto bias = [&](const Item& item) { return p.value_bias ? p.value_bias + item.head * p.head_dim : nullptr; };
    std::atomic<size_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), items.size()), 1, [&](int64_t, int64_t) {
        static thread_local Scratch<T> scratch;
        scratch.fit(dim);
        auto claim = [&] {
            size_t i = next.fetch_add(1);
            return i < items.size() ? &items[i] : nullptr;
        };
        const Item *at = claim(), *then;
        if (!at) return;
        Tile<T> tile = cache.tile(p, *at, at->first, scratch.room());
        for (; at; at = then) {
            then = claim();
            const Item& item = *at;
            int queries = item.count * shared;
            attend(p, cache, item, then, tile, scratch);
            for (int n = 0; n < queries; n++) {
                if (item.segments == 1) {
                    finish(output(item, n), scratch.acc + n * dim, scratch.total[n], bias(item), p.head_dim);
                    continue;
                }
                most[item.partial + n] = scratch.most[n];
                total[item.partial + n] = scratch.total[n];
                std::copy_n(scratch.acc + n * dim, dim, &acc[(item.partial + n) * dim]);
            }
        }
    });
    for (const Item& item : items)
        if (item.segments > 1 && item.segment == 0)
            for (int n = 0; n < item.count * shared; n++) {
                int64_t at = item.partial + n;
                merge(output(item, n), &most[at], &total[at], &acc[at * dim], item.count * shared, item.segments,
                      bias(item), dim, p.head_dim);
            }
}

// Rows into items.
std::vector<Item> cut(const Problem& p, int64_t& partials) {
    int shared = p.heads / p.cache.kv_heads, most = std::max(1, QUERIES / shared);
    std::vector<Item> items;
    partials = 0;
    for (int32_t row = 0; row < p.rows; row++)
        for (int64_t done = 0, count = p.offsets[row + 1] - p.offsets[row]; done < count; done += most) {
            int32_t size = std::min<int64_t>(most, count - done), start = p.starts[row] + done;
            int32_t seen = p.window ? std::max(0, start - p.window + 1) / TILE * TILE : 0, end = start + size;
            int32_t before = seen / SEGMENT, segments = (end + SEGMENT - 1) / SEGMENT - before;
            for (int32_t head = 0; head < p.cache.kv_heads; head++)
                for (int32_t segment = 0; segment < segments; segment++) {
                    int32_t from = (before + segment) * SEGMENT;
                    items.push_back({row, int32_t(p.offsets[row] + done), start, size, head, segment, segments,
                                     std::max(from, seen), std::min(from + SEGMENT, end), partials});
                    if (segments > 1) partials += size * shared;
                }
        }
    return items;
}

void op(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& offsets,
        const at::Tensor& starts, const at::Tensor& tables, double scale, int64_t window, double softcap,
        const std::optional<at::Tensor>& key_bias, const std::optional<at::Tensor>& value_bias,
        const std::optional<at::Tensor>& angles, at::Tensor& out) {
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
    lack(problem, key_bias, value_bias, angles);
    paged_attention(problem);
}

}  // namespace

void lack(AttentionProblem& p, const std::optional<at::Tensor>& key_bias, const std::optional<at::Tensor>& value_bias,
          const std::optional<at::Tensor>& angles) {
    auto numbers = [](const std::optional<at::Tensor>& tensor) {
        TORCH_CHECK(!tensor || (tensor->scalar_type() == at::kFloat && tensor->is_contiguous()),
                    "biases and angles must be float32 and contiguous");
        return tensor ? tensor->const_data_ptr<float>() : nullptr;
    };
    for (const auto& bias : {key_bias, value_bias})
        TORCH_CHECK(!bias || bias->numel() == p.cache.kv_heads * p.head_dim, "a bias has a number for each of a token's");
    TORCH_CHECK(!angles || (angles->dim() == 3 && angles->size(2) == TILE && angles->size(1) <= p.head_dim),
                "angles must be (tiles, R, ", TILE, ") with R at most a head's dimensions");
    p.key_bias = numbers(key_bias);
    p.value_bias = numbers(value_bias);
    p.angles = numbers(angles);
    p.angle_tiles = angles ? angles->size(0) : 0;
    p.rotated = angles ? angles->size(1) : 0;
}

void paged_attention(const AttentionProblem& p) {
    const KVCache& cache = p.cache;
    for (int64_t row = 0; p.angles && row < p.rows; row++)
        TORCH_CHECK(p.starts[row] + p.offsets[row + 1] - p.offsets[row] <= p.angle_tiles * TILE, "positions without angles");
    TORCH_CHECK(cache.block % GROUP == 0 || GROUP % cache.block == 0, "no kernel for blocks of ", cache.block);
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
        "float scale, int window, float softcap, Tensor? key_bias, Tensor? value_bias, Tensor? angles, "
        "Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("paged_attention", op); }

}  // namespace quire
