// y = x Wᵀ + b for weights of 8 or 4 bits in groups of 32 inputs. x is quantised to 8 bits first.
//
//     w[n, k] = scale[n, g] * quant[n, k] + min[n, g]      quants are unsigned; g = k / 32
//     x[m, k] ≈ x_scale[m, g] * q[m, k]                    or the sum of two such terms: quantized_rows.h
//     y[m, n] = Σ_g x_scale * (scale * Σ_k quant q  +  min * Σ_k q)
//
// Formats without mins have one zero point for the entire weight: `min = -zero_point * scale`. Then the second sum is
// the start value of the integer sum, and costs nothing.
//
// A row's result does not depend on the other rows: activations have a scale for each row and group, groups are added
// in order, and integer sums are exact.
//
// A packed weight is an array of records (panel of 32 outputs, group): the quants in the order in which they are used,
// then 32 scales and, if there are any, 32 mins, in float16. With 4 bits, byte i of quad s holds the quant of input
// 4 s + i % 4 in its low half and that of input 16 + 4 s + i % 4 in its high half.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "int8.h"
#include "matrix.h"
#include "tiles.h"

namespace quire {
namespace {

// Terms that are multiplied together, and vectors of their sums that fit into the registers with the other operands: if
// those of both halves of a panel do not, the halves are computed one after the other.
#if defined(__AVX512VNNI__)
template <int BITS>
constexpr int TERM_TILE = 6;
constexpr int TILE_SUMS = 12;
constexpr int DIRECT_TERMS = 6;  // with more terms, 4 bits are widened once for all
#elif defined(__AVXVNNI__)
template <int BITS>
constexpr int TERM_TILE = 2;
constexpr int TILE_SUMS = 4;
constexpr int DIRECT_TERMS = 2;
#else
template <int BITS>
constexpr int TERM_TILE = BITS == 4 ? 4 : 2;
constexpr int TILE_SUMS = 4;
constexpr int DIRECT_TERMS = std::numeric_limits<int>::max();  // products of 4 bits need half the time
#endif

// The layout of a record.
template <int BITS, bool MINS>
struct Record {
    static constexpr int quant_bytes = PANEL * QUANT_GROUP_SIZE * BITS / 8;
    static constexpr int bytes = quant_bytes + PANEL * 2 * (MINS ? 2 : 1);
};

// Calls f(x, k) for each quad of inputs k..k+3, where x are the quants of HALVES halves of the panel, and `quants` begins
// with the first of them. The loops are unrolled explicitly: otherwise the compiler would keep an array of sums in f in
// memory instead of registers.
template <int BITS, int HALVES, class F>
[[gnu::always_inline]] inline void for_each_quad(const uint8_t* quants, F&& f) {
#pragma GCC unroll 8
    for (int s = 0; s < BITS; s++) {
        U8x64 x[HALVES];
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++) x[half] = U8x64::load(quants + s * 128 + half * 64);
        if constexpr (BITS == 8) {
            f(x, 4 * s);
        } else {
            U8x64 nibbles[HALVES];
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) nibbles[half] = x[half].low_nibbles();
            f(nibbles, 4 * s);
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) nibbles[half] = x[half].high_nibbles();
            f(nibbles, 16 + 4 * s);
        }
    }
}

void widen_quants(const uint8_t* quants, uint8_t* wide) {
    for_each_quad<4, 2>(quants, [&](const U8x64 (&x)[2], int k) {
        x[0].store(wide + k * 32);
        x[1].store(wide + k * 32 + 64);
    });
}

// Adds N terms times the quants of one group, for HALVES halves of the panel, to the sums of their rows. The mins follow
// the 32 scales.
template <int N, int HALVES, int BITS, bool MINS>
void multiply_halves(const uint8_t* quants, const fp16* scales, int zero_point, const int8_t* q, const Term* term,
                     float* sums) {
    using Sum = std::conditional_t<BITS == 4, NibbleSum, I32x16>;
    Sum dot[HALVES][N];
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) dot[half][n] = Sum::set(MINS ? 0 : -zero_point * term[n].total);
    for_each_quad<BITS, HALVES>(quants, [&](const U8x64 (&x)[HALVES], int k) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) dot[half][n].add_dot(x[half], q + n * QUANT_GROUP_SIZE + k);
    });
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
        F32x16 scale = F32x16::load(scales + half * 16), min;
        if (MINS) min = F32x16::load(scales + PANEL + half * 16);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            float* row_sums = sums + term[n].row * PANEL + half * 16;
            F32x16 product_scale = scale * F32x16::set(term[n].scale);
            F32x16 sum = fma(dot[half][n].total().to_float(), product_scale, F32x16::load(row_sums));
            if (MINS) sum = fma(min, F32x16::set(term[n].shift), sum);
            sum.store(row_sums);
        }
    }
}

template <int N, int BITS, bool MINS>
void multiply_tile(const uint8_t* quants, const fp16* scales, int zero_point, const int8_t* q, const Term* term,
                   float* sums) {
    constexpr int HALVES = 2 * N <= TILE_SUMS ? 2 : 1;
    for (int half = 0; half < 2; half += HALVES)
        multiply_halves<N, HALVES, BITS, MINS>(quants + half * 64, scales + half * 16, zero_point, q, term,
                                               sums + half * 16);
}

template <int BITS, bool MINS>
void multiply_group(const uint8_t* record, int zero_point, const Terms& terms, float* sums) {
    const fp16* scales = reinterpret_cast<const fp16*>(record + Record<BITS, MINS>::quant_bytes);
    auto multiply_terms = [&](auto bits, const uint8_t* quants) {
        for_even_tiles<TERM_TILE<bits>>(terms.count, [&](auto n, int64_t first) {
            const int8_t* q = terms.q + first * QUANT_GROUP_SIZE;
            multiply_tile<n, bits, MINS>(quants, scales, zero_point, q, terms.term + first, sums);
        });
    };
    prefetch_ahead(record, Record<BITS, MINS>::bytes);
    if (BITS == 8 || terms.count <= DIRECT_TERMS) return multiply_terms(std::integral_constant<int, BITS>{}, record);
    alignas(64) uint8_t wide[PANEL * QUANT_GROUP_SIZE];
    widen_quants(record, wide);
    multiply_terms(std::integral_constant<int, 8>{}, wide);
}

template <int BITS, bool MINS>
void panel_sums(const Matrix& w, const QuantizedRows& rows, int64_t panel, float* sums) {
    constexpr int bytes = Record<BITS, MINS>::bytes;
    int64_t groups = w.inputs / QUANT_GROUP_SIZE;
    const uint8_t* records = static_cast<const uint8_t*>(w.data) + panel * groups * bytes;
    for (int64_t g = 0; g < groups; g++)
        multiply_group<BITS, MINS>(records + g * bytes, w.zero_point, rows.terms(g), sums);
}

// The byte of a record that holds the quant of an output and of input k of the group, and its first bit.
struct QuantPosition {
    int byte, shift;
};

template <int BITS>
QuantPosition quant_position(int lane, int k) {
    int column = lane / 16 * 64 + lane % 16 * 4 + k % 4;
    if (BITS == 8) return {k / 4 * 128 + column, 0};
    return {k % 16 / 4 * 128 + column, k / 16 * 4};
}

void quantized_linear(const at::Tensor& x, const at::Tensor& packed, int64_t bits, bool has_mins, int64_t zero_point,
                      const std::optional<at::Tensor>& bias, at::Tensor& y) {
    matmul(group_matrix(packed, y.size(1), bits, has_mins, zero_point), x, bias, y);
}

template <int BITS, bool MINS>
void rows(const at::Tensor& packed, int zero_point, const at::Tensor& ids, at::Tensor& y) {
    using R = Record<BITS, MINS>;
    int64_t groups = packed.size(1);
    const uint8_t* records = packed.const_data_ptr<uint8_t>();
    const int64_t* id_data = ids.const_data_ptr<int64_t>();
    float* y_data = y.mutable_data_ptr<float>();
    at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            int64_t id = id_data[t], lane = id % PANEL;
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t* record = records + (id / PANEL * groups + g) * R::bytes;
                const fp16* tail = reinterpret_cast<const fp16*>(record + R::quant_bytes);
                float scale = widen(tail[lane]), min = MINS ? widen(tail[PANEL + lane]) : 0;
                float* group = y_data + (t * groups + g) * QUANT_GROUP_SIZE;
                for (int k = 0; k < QUANT_GROUP_SIZE; k++) {
                    auto [byte, shift] = quant_position<BITS>(lane, k);
                    int quant = record[byte] >> shift & ((1 << BITS) - 1);
                    group[k] = MINS ? std::fma(float(quant), scale, min) : (quant - zero_point) * scale;
                }
            }
        }
    });
}

// y[t] = the weight's row ids[t], dequantised.
void quantized_rows(const at::Tensor& packed, int64_t bits, bool has_mins, int64_t zero_point, const at::Tensor& ids,
                    at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    if (bits == 8) return (has_mins ? rows<8, true> : rows<8, false>)(packed, zero_point, ids, y);
    return (has_mins ? rows<4, true> : rows<4, false>)(packed, zero_point, ids, y);
}

}  // namespace

Matrix group_matrix(const at::Tensor& packed, int64_t outputs, int64_t bits, bool has_mins, int64_t zero_point) {
    TORCH_CHECK(packed.is_contiguous() && packed.dim() == 3 && packed.scalar_type() == at::kByte, "bytes, contiguous");
    TORCH_CHECK(bits == 8 || bits == 4, "8 or 4 bits");
    TORCH_CHECK(packed.size(2) == PANEL * (QUANT_GROUP_SIZE * bits / 8 + (has_mins ? 4 : 2)),
                "the weight has another format");
    TORCH_CHECK((outputs + PANEL - 1) / PANEL == packed.size(0), "the weight has another number of outputs");
    int64_t inputs = packed.size(1) * QUANT_GROUP_SIZE;
    return {packed.const_data_ptr(), outputs, inputs, WeightFormat::group, at::kByte, int(bits), has_mins, int(zero_point)};
}

void group_panel_matmul(const Matrix& w, const QuantizedRows& rows, int64_t panel, int64_t count, float* sums) {
    std::fill_n(sums, count * PANEL, 0.0f);
    if (w.bits == 8) return (w.has_mins ? panel_sums<8, true> : panel_sums<8, false>)(w, rows, panel, sums);
    return (w.has_mins ? panel_sums<4, true> : panel_sums<4, false>)(w, rows, panel, sums);
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("quantized_rows(Tensor packed, int bits, bool has_mins, int zero_point, Tensor ids, Tensor(a!) y) -> ()");
    m.def(
        "quantized_linear(Tensor x, Tensor packed, int bits, bool has_mins, int zero_point, Tensor? bias, "
        "Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("quantized_rows", quantized_rows);
    m.impl("quantized_linear", quantized_linear);
}

}  // namespace quire
