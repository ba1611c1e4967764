// y = x Wᵀ + b for weights that were rounded when they were packed: 8 bits with one scale for each output (channel), or
// 4 bits. x is quantised to 8 bits first.
//
//     w[n, k] = scale[n] * (u[n, k] - 128)                 u in 1..255
//     x[m, k] ≈ x_scale[m, g] * q[m, k]                    g = k / 128, or the sum of two such terms: quantized_rows.h
//     y[m, n] = scale[n] * Σ_g x_scale * Σ_k (u - 128) q
//
// With 4 bits, u itself is made of a quant of 4 bits, with a scale and a min for each 32 inputs, all whole numbers of a
// byte (as in QServe: Lin et al., 2024). It is in 0..255 then:
//
//     u[n, k] = group_scale[n, k / 32] * quant[n, k] + min[n, k / 32]
//
// So both have the same GEMM: with VNNI, a thread unpacks 128 inputs of a panel of 4 bits into its L1 cache, where all
// rows use them. Without, products of the quants themselves are faster. A whole group of 128 inputs is one sum of
// integers. Scales for each 32 inputs, as the formats of quantized_linear.cpp have, cost a third of the time of a GEMM
// with many rows.
//
// A row's result does not depend on the other rows: activations have a scale for each row and group, groups are added
// in order, and integer sums are exact.
//
// A packed panel of 32 outputs has their bytes for all inputs, then 32 scales in float32. 8 bits: a u for each output,
// in the order in which a GEMM uses them, (input / 4, output, 4). 4 bits: a record for each 32 inputs, of 512 bytes of
// quants, 32 group scales and 32 mins; byte i of quad s holds the quant of input 4 s + i % 4 in its low half and that of
// input 16 + 4 s + i % 4 in its high half.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "float_parts.h"
#include "int8.h"
#include "int8_tiles.h"
#include "matrix.h"
#include "panel_memory.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int ZERO_POINT = 128;
constexpr int RECORD_INPUTS = PART;                       // of 4 bits
constexpr int RECORD_QUANTS = PANEL * RECORD_INPUTS / 2;  // bytes
constexpr int RECORD_BYTES = RECORD_QUANTS + 2 * PANEL;   // with group scales and mins
constexpr int LINE = 64;  // bytes that a processor fetches at once
constexpr int SCALE_BYTES = PANEL * int(sizeof(float));

// Weights are fetched ahead. A core waits for few lines at a time, and stops for many at once. So where products take
// little time, each tile fetches a share of what comes next, not the first tile all. Others are slower with more to do.
#if defined(__AVX512VNNI__)
constexpr bool SHARED_PREFETCH = true;
constexpr int TERM_TILE = 8;  // terms: their sums, 16 vectors of int32, and what is loaded fit into the registers
constexpr int RECORD_TILE = 4;   // terms that are multiplied by a record together
constexpr int DIRECT_TERMS = 4;  // with more of them, 4 bits are unpacked once for all
#elif defined(__AVXVNNI__)
constexpr bool SHARED_PREFETCH = false;
constexpr int TERM_TILE = 2;
constexpr int RECORD_TILE = 1;
constexpr int DIRECT_TERMS = 1;
#else
constexpr bool SHARED_PREFETCH = false;
constexpr int TERM_TILE = 2;
constexpr int RECORD_TILE = 2;
constexpr int DIRECT_TERMS = std::numeric_limits<int>::max();  // products of 4 bits need half the time
#endif

// Bytes of a panel before its scales.
constexpr int64_t panel_quant_bytes(int bits, int64_t inputs) {
    return bits == 8 ? inputs * PANEL : inputs / RECORD_INPUTS * RECORD_BYTES;
}

int64_t panel_bytes(int bits, int64_t inputs) { return panel_quant_bytes(bits, inputs) + SCALE_BYTES; }

// Adds a term's scale times the integer sums of 32 outputs to those of its row.
[[gnu::always_inline]] inline void add_term(const I32x16& left, const I32x16& right, const Term& term, float* sums) {
    F32x16 scale = F32x16::set(term.scale);
    float* row_sums = sums + term.row * PANEL;
    fma(left.to_float(), scale, F32x16::load(row_sums)).store(row_sums);
    fma(right.to_float(), scale, F32x16::load(row_sums + 16)).store(row_sums + 16);
}

// What a tile fetches of the packed weight while it multiplies: `step` bytes for each four inputs.
struct TilePrefetch {
    const uint8_t* first;
    int step;
};

// sums[row] (32 outputs) += N terms times the `size` inputs of a group. STEP is that of `ahead`, or LINE if it is known
// only when the program runs and at most one line, or 0 if nothing is to be fetched. Where there are 16 registers for
// vectors, GCC 12 would have the sums in memory if this were inlined.
template <int N, int STEP>
[[gnu::noinline]] void multiply_tile(const uint8_t* u, int size, const int8_t* q, const Term* term, TilePrefetch ahead,
                                     float* sums) {
    I32x16 left[N], right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) left[n] = right[n] = I32x16::set(-ZERO_POINT * term[n].total);
    for (int k = 0; k < size; k += 4) {
        const uint8_t* fetched = ahead.first + k / 4 * (STEP == LINE ? ahead.step : STEP);
        if (STEP > 0) _mm_prefetch(fetched, _MM_HINT_T0);
        if (STEP > LINE) _mm_prefetch(fetched + LINE, _MM_HINT_T0);
        U8x64 left_u = U8x64::load(u + k * PANEL), right_u = U8x64::load(u + k * PANEL + 64);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            left[n].add_dot(left_u, q + n * size + k);
            right[n].add_dot(right_u, q + n * size + k);
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) add_term(left[n], right[n], term[n], sums);
}

// Adds N terms, from `first` on, times a group of 4 bits without unpacking its u. The integers, and so the sums, are
// those of `multiply_tile`: Σ u q = group_scale * Σ quant q + min * Σ q.
template <int N>
void multiply_records(const uint8_t* record, const Terms& terms, int64_t first, float* sums) {
    const Term* term = terms.term + first;
    const int8_t* q = terms.q + first * terms.size;
    const int32_t* part_totals = terms.part_totals + first * (terms.size / PART);
    I32x16 total[2][N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) total[0][n] = total[1][n] = I32x16::set(-ZERO_POINT * term[n].total);
    for (int part = 0; part < terms.size / RECORD_INPUTS; part++, record += RECORD_BYTES, q += RECORD_INPUTS) {
        if (first == 0) prefetch_ahead(record, RECORD_BYTES);
        NibbleSum dot[2][N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) dot[0][n] = dot[1][n] = NibbleSum::set(0);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                U8x64 quants = U8x64::load(record + s * 128 + half * 64);
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    dot[half][n].add_dot(quants.low_nibbles(), q + n * terms.size + 4 * s);
                    dot[half][n].add_dot(quants.high_nibbles(), q + n * terms.size + 4 * s + 16);
                }
            }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const uint8_t* tail = record + RECORD_QUANTS + half * 16;
            I32x16 group_scale = I32x16::load(tail), min = I32x16::load(tail + PANEL);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                I32x16 q_total = I32x16::set(part_totals[n * (terms.size / PART) + part]);
                total[half][n] = total[half][n] + dot[half][n].times(group_scale) + min.times_16(q_total);
            }
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) add_term(total[0][n], total[1][n], term[n], sums);
}

// Unpacks a record of 4 bits to the u of 32 inputs.
void unpack_record(const uint8_t* record, uint8_t* u) {
    const uint8_t *group_scales = record + RECORD_QUANTS, *mins = group_scales + PANEL;
    for (int half = 0; half < 2; half++) {
        U8x64 group_scale = U8x64::repeat_four(group_scales + half * 16), min = U8x64::repeat_four(mins + half * 16);
        for (int s = 0; s < 4; s++) {
            U8x64 quants = U8x64::load(record + s * 128 + half * 64);
            multiply_add_bytes(quants.low_nibbles(), group_scale, min).store(u + s * 128 + half * 64);
            multiply_add_bytes(quants.high_nibbles(), group_scale, min).store(u + 512 + s * 128 + half * 64);
        }
    }
}

// Adds all terms times a group, which is at `packed` in the weight, and whose unpacked bytes are u.
template <int BITS>
void multiply_group(const uint8_t* u, const uint8_t* packed, const Terms& terms, Int8Tiles& tiles, float* sums) {
    if (tiles.fit(terms)) {  // the integers, and so the sums, are those of `multiply_tile`
        prefetch_ahead(packed, int(panel_quant_bytes(BITS, terms.size)));
        return tiles.for_each_dots(u, terms, [&](const Term& term, const int32_t* dots) {
            I32x16 zero = I32x16::set(-ZERO_POINT * term.total);
            add_term(I32x16::load(dots) + zero, I32x16::load(dots + 16) + zero, term, sums);
        });
    }
    constexpr int STEP = int(panel_quant_bytes(BITS, PART)) * 4 / PART;
    TilePrefetch ahead{packed + PREFETCH_DISTANCE, STEP};
    if (terms.count <= TERM_TILE || !SHARED_PREFETCH)
        return for_even_tiles<TERM_TILE>(terms.count, [&](auto n, int64_t first) {
            if (SHARED_PREFETCH || first == 0)
                return multiply_tile<n, STEP>(u, terms.size, terms.q, terms.term, ahead, sums);
            multiply_tile<n, 0>(u, terms.size, terms.q + first * terms.size, terms.term + first, ahead, sums);
        });
    int count = (terms.count + TERM_TILE - 1) / TERM_TILE;
    ahead.step = (STEP + count - 1) / count;
    for_even_tiles<TERM_TILE>(terms.count, [&](auto n, int64_t first) {
        multiply_tile<n, LINE>(u, terms.size, terms.q + first * terms.size, terms.term + first, ahead, sums);
        ahead.first += terms.size / 4 * ahead.step;
    });
}

template <int BITS>
void panel_sums(const Matrix& w, const QuantizedRows& rows, int64_t panel, float* sums) {
    Int8Tiles tiles;
    const uint8_t* u = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(BITS, w.inputs);
    for (int64_t g = 0; g < rows.groups(); g++) {
        Terms terms = rows.terms(g);
        if (BITS == 8) {
            multiply_group<8>(u, u, terms, tiles, sums);
        } else if (terms.count <= DIRECT_TERMS) {
            for_even_tiles<RECORD_TILE>(terms.count, [&](auto n, int64_t first) {
                multiply_records<n>(u, terms, first, sums);
            });
        } else {
            alignas(64) uint8_t unpacked[MAX_ACTIVATION_GROUP * PANEL];
            for (int k = 0; k < terms.size; k += RECORD_INPUTS)
                unpack_record(u + panel_quant_bytes(4, k), unpacked + k * PANEL);
            multiply_group<4>(unpacked, u, terms, tiles, sums);
        }
        u += panel_quant_bytes(BITS, terms.size);
    }
}

// The byte of a panel of 8 bits that holds an output's u of input k.
int64_t byte_of(int lane, int64_t k) { return k / 4 * (4 * PANEL) + lane * 4 + k % 4; }

// Panels are packed a tile at a time: 32 outputs of some inputs, whose numbers and bytes stay in the L1 cache.
constexpr int64_t PACKED_TILE = 128;

// The scales of a panel's outputs, and the factors by which their numbers are multiplied before they are rounded.
struct OutputScales {
    alignas(64) float scale[PANEL] = {}, factor[PANEL] = {};

    OutputScales(const FloatPanel& panel, int64_t inputs) {
        alignas(64) float x[PACKED_TILE];
        for (int lane = 0; lane < panel.count; lane++) {
            MagnitudeSum sum;
            for (int64_t first = 0; first < inputs; first += PACKED_TILE) {
                int64_t count = std::min(PACKED_TILE, inputs - first);
                panel.output[lane].read(first, count, x);
                sum.add(x, count);
            }
            scale[lane] = sum.total().max_abs / 127;
            factor[lane] = scale[lane] >= 1e-30f ? 1 / scale[lane] : 0;  // the inverse of less might overflow
        }
    }
};

// Rounds a tile x (32, PACKED_TILE) to bytes of 1..255, of `count` inputs, and writes them as a panel of 8 bits has them.
// If an output's scale is not finite, all products are infinite or NaN, whatever the bytes.
void pack_bytes(const float* x, int64_t count, const OutputScales& scales, uint8_t* u) {
    alignas(64) int8_t rows[PANEL * PACKED_TILE];
    for (int lane = 0; lane < PANEL; lane++) {
        F32x16 factor = F32x16::set(scales.factor[lane]);
        for (int64_t k = 0; k < count; k += 16) {
            int8_t* bytes = rows + lane * PACKED_TILE + k;
            (F32x16::load(x + lane * PACKED_TILE + k) * factor).store(bytes);
            __m128i* vector = reinterpret_cast<__m128i*>(bytes);
            _mm_store_si128(vector, _mm_xor_si128(_mm_load_si128(vector), _mm_set1_epi8(char(ZERO_POINT))));
        }
    }
    for (int64_t k = 0; k < count; k += 32)
        for (int lane = 0; lane < PANEL; lane += 8) {
            const float* quads = reinterpret_cast<const float*>(rows + lane * PACKED_TILE + k);
            transpose(quads, PACKED_TILE / 4, reinterpret_cast<float*>(u + k * PANEL) + lane, PANEL);
        }
}

// Whole scales and mins of 16 outputs, for 32 inputs of each: v (32, stride PANEL), in 1..255.
struct GroupScales {
    F32x16 scale, min, factor, largest;

    GroupScales(F32x16 scale, F32x16 min)
        : scale(scale),
          min(min),
          factor(F32x16::set(1) / scale),
          largest(quire::min(F32x16::set(15), ((F32x16::set(255) - min) / scale).floor())) {}

    // Returns the quants of 4 bits that are nearest to the numbers of an input, of those that give a byte.
    F32x16 quants(const float* v, int k) const {
        F32x16 nearest = ((F32x16::load(v + k * PANEL) - min) * factor).round();
        return quire::min(max(nearest, F32x16::zero()), largest);
    }

    // Returns the sums of the squared errors, added in the order of `reduce_sum`.
    F32x16 error(const float* v) const {
        auto add_square = [&](int k, F32x16 sum) __attribute__((always_inline)) {
            F32x16 difference = F32x16::load(v + k * PANEL) - fma(quants(v, k), scale, min);
            return fma(difference, difference, sum);
        };
        F32x16 sums[4];
        for (int i = 0; i < 4; i++) {
            F32x16 pairs[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) pairs[j] = add_square(i + 4 * j + 16, add_square(i + 4 * j, F32x16::zero()));
            sums[i] = (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
        }
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
};

// Returns the better of the two whole scales next to the range of v over 15. The smaller one cannot reach both ends, and
// leaves out as much at each.
GroupScales best_group_scales(const float* v, F32x16 lowest, F32x16 highest) {
    F32x16 range = highest - lowest;
    auto centered = [&](F32x16 scale) {
        F32x16 min = (lowest + (range - F32x16::set(15) * scale) * F32x16::set(0.5f)).round();
        return GroupScales(scale, quire::min(max(min, F32x16::zero()), F32x16::set(255)));
    };
    F32x16 floor = max((range / F32x16::set(15)).floor(), F32x16::set(1));
    GroupScales small = centered(floor), large = centered(quire::min(floor + F32x16::set(1), F32x16::set(17)));
    F32x16 small_error = small.error(v), large_error = large.error(v);
    return GroupScales(small.scale.replace_where_greater(small_error, large_error, large.scale),
                       small.min.replace_where_greater(small_error, large_error, large.min));
}

// Packs 32 inputs of 16 outputs, v (32, stride PANEL), whose factors are at `factors`, into their lanes of a record of 4
// bits. It multiplies v.
void pack_lanes(float* v, const float* factors, int first_lane, uint8_t* record) {
    F32x16 factor = F32x16::load(factors + first_lane), highest = F32x16::zero();
    F32x16 lowest = F32x16::set(std::numeric_limits<float>::max());
    for (int k = 0; k < RECORD_INPUTS; k++) {
        F32x16 numbers = F32x16::load(v + k * PANEL) * factor + F32x16::set(ZERO_POINT);
        numbers.store(v + k * PANEL);
        lowest = quire::min(lowest, numbers);
        highest = max(highest, numbers);
    }
    GroupScales best = best_group_scales(v, lowest, highest);
    int8_t* tail = reinterpret_cast<int8_t*>(record + RECORD_QUANTS) + first_lane;
    I32x16::round(best.scale).store_low_bytes(tail);
    I32x16::round(best.min).store_low_bytes(tail + PANEL);
    for (int s = 0; s < 4; s++) {
        F32x16 bytes[4];
        for (int i = 0; i < 4; i++)
            bytes[i] = fma(best.quants(v, 16 + 4 * s + i), F32x16::set(16), best.quants(v, 4 * s + i));
        F32x16 three = fma(bytes[2], F32x16::set(1 << 16), fma(bytes[1], F32x16::set(1 << 8), bytes[0]));
        I32x16 word = I32x16::round(three) + I32x16::round(bytes[3]).shift_left<24>();
        word.store(record + s * 4 * PANEL + first_lane * 4);
    }
}

// Rounds a tile x (32, PACKED_TILE) to 4 bits, of `count` inputs, and writes them as records.
void pack_records(const float* x, int64_t count, const OutputScales& scales, uint8_t* records) {
    for (int64_t k = 0; k < count; k += RECORD_INPUTS) {
        alignas(64) float v[RECORD_INPUTS * PANEL];
        for (int i = 0; i < RECORD_INPUTS; i += 8)
            for (int lane = 0; lane < PANEL; lane += 8)
                transpose(x + lane * PACKED_TILE + k + i, PACKED_TILE, v + i * PANEL + lane, PANEL);
        for (int lane = 0; lane < PANEL; lane += 16)
            pack_lanes(v + lane, scales.factor, lane, records + panel_quant_bytes(4, k));
    }
}

void pack_panel(const FloatPanel& panel, int bits, int64_t inputs, uint8_t* data) {
    OutputScales scales(panel, inputs);
    alignas(64) float x[PANEL * PACKED_TILE] = {};
    for (int64_t first = 0; first < inputs; first += PACKED_TILE) {
        int64_t count = std::min(PACKED_TILE, inputs - first);
        for (int lane = 0; lane < panel.count; lane++) panel.output[lane].read(first, count, x + lane * PACKED_TILE);
        (bits == 8 ? pack_bytes : pack_records)(x, count, scales, data + panel_quant_bytes(bits, first));
    }
    std::memcpy(data + panel_quant_bytes(bits, inputs), scales.scale, SCALE_BYTES);
}

// Returns panels of zeros, for `round_and_pack` to fill.
at::Tensor channel_panels(int64_t outputs, int64_t inputs, int64_t bits) {
    return zero_panels({(outputs + PANEL - 1) / PANEL, panel_bytes(int(bits), inputs)}, at::kByte);
}

// Rounds and packs the outputs of all parts into panels of zeros, one after another. `FloatParts` says what the parts are.
void round_and_pack(at::TensorList tensors, at::IntArrayRef types, at::IntArrayRef first_groups, int64_t inputs,
                    int64_t bits, at::Tensor& packed) {
    FloatParts parts(tensors, types, first_groups, inputs);
    TORCH_CHECK(channel_matrix(packed, parts.outputs(), bits).inputs == inputs, "the panels are of another weight");
    uint8_t* data = packed.mutable_data_ptr<uint8_t>();
    parallel_for_panels(packed.size(0), [&](int64_t panel) {
        pack_panel(parts.panel(panel), int(bits), inputs, data + panel * packed.size(1));
    });
}

void channel_linear(const at::Tensor& x, const at::Tensor& packed, int64_t bits, const std::optional<at::Tensor>& bias,
                    at::Tensor& y) {
    matmul(channel_matrix(packed, y.size(1), bits), x, bias, y);
}

// y[t] = the weight's row ids[t], dequantised.
void channel_rows(const at::Tensor& packed, int64_t bits, const at::Tensor& ids, at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    int64_t inputs = channel_matrix(packed, packed.size(0) * PANEL, bits).inputs, bytes = packed.size(1);
    TORCH_CHECK(y.size(0) == ids.numel() && y.size(1) == inputs, "y must have a row for each id, of the weight's inputs");
    const uint8_t* data = packed.const_data_ptr<uint8_t>();
    const int64_t* id_data = ids.const_data_ptr<int64_t>();
    float* y_data = y.mutable_data_ptr<float>();
    at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            int lane = int(id_data[t] % PANEL);
            const uint8_t* panel = data + id_data[t] / PANEL * bytes;
            float scale = reinterpret_cast<const float*>(panel + panel_quant_bytes(int(bits), inputs))[lane];
            for (int64_t k = 0; k < inputs; k++) {
                int u;
                if (bits == 8) {
                    u = panel[byte_of(lane, k)];
                } else {
                    const uint8_t* record = panel + panel_quant_bytes(4, k / RECORD_INPUTS * RECORD_INPUTS);
                    int i = int(k % RECORD_INPUTS), pair = record[byte_of(lane, i % 16)];
                    int quant = i < 16 ? pair & 15 : pair >> 4;
                    u = record[RECORD_QUANTS + lane] * quant + record[RECORD_QUANTS + PANEL + lane];
                }
                y_data[t * inputs + k] = scale * float(u - ZERO_POINT);
            }
        }
    });
}

}  // namespace

Matrix channel_matrix(const at::Tensor& packed, int64_t outputs, int64_t bits) {
    TORCH_CHECK(packed.is_contiguous() && packed.dim() == 2 && packed.scalar_type() == at::kByte, "bytes, contiguous");
    TORCH_CHECK(bits == 8 || bits == 4, "8 or 4 bits");
    TORCH_CHECK((outputs + PANEL - 1) / PANEL == packed.size(0), "the weight has another number of outputs");
    int64_t quants = packed.size(1) - SCALE_BYTES;
    int64_t inputs = bits == 8 ? quants / PANEL : quants / RECORD_BYTES * RECORD_INPUTS;
    TORCH_CHECK(inputs > 0 && inputs % RECORD_INPUTS == 0 && panel_quant_bytes(int(bits), inputs) == quants,
                "the weight has another format");
    return {packed.const_data_ptr(), outputs, inputs, WeightFormat::channel, at::kByte, int(bits), false, 0};
}

void channel_panel_matmul(const Matrix& w, const QuantizedRows& rows, int64_t panel, int64_t count, float* sums) {
    std::fill_n(sums, count * PANEL, 0.0f);
    (w.bits == 8 ? panel_sums<8> : panel_sums<4>)(w, rows, panel, sums);
    const uint8_t* end = static_cast<const uint8_t*>(w.data) + (panel + 1) * panel_bytes(w.bits, w.inputs);
    const float* scales = reinterpret_cast<const float*>(end - SCALE_BYTES);
    F32x16 left = F32x16::load(scales), right = F32x16::load(scales + 16);
    for (int64_t row = 0; row < count; row++) {
        float* row_sums = sums + row * PANEL;
        (F32x16::load(row_sums) * left).store(row_sums);
        (F32x16::load(row_sums + 16) * right).store(row_sums + 16);
    }
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("channel_panels(int outputs, int inputs, int bits) -> Tensor");
    m.def(
        "round_and_pack(Tensor[] parts, int[] types, int[] first_groups, int inputs, int bits, Tensor(a!) packed) -> ()");
    m.def("channel_rows(Tensor packed, int bits, Tensor ids, Tensor(a!) y) -> ()");
    m.def("channel_linear(Tensor x, Tensor packed, int bits, Tensor? bias, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) { m.impl("channel_panels", channel_panels); }
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("round_and_pack", round_and_pack);
    m.impl("channel_rows", channel_rows);
    m.impl("channel_linear", channel_linear);
}

}  // namespace quire
