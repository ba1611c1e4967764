// y = x Wᵀ + b for weights of 8 or 4 bits in groups of 32 inputs, and x quantised to 8 bits on the way in.
//
//     w[n, k] = step[n, g] * code[n, k] + least[n, g]      code unsigned; g = k / 32
//     x[m, k] ≈ scale[m, g] * q[m, k]                      or the sum of two such terms: quantized_rows.h
//     y[m, n] = Σ_g scale * (step * Σ_k code q  +  least * Σ_k q)
//
// Where `least` is a whole multiple of `step` for the entire weight, `least = -zero * step`, its term is a start value of
// the integer sum and costs nothing: the symmetric kinds. Scales belong to a row and a group, never to a batch, groups
// are added in order, and integer sums are exact: a row's result does not depend on the other rows.
//
// A packed weight is a stream of records, (panel of 32 outputs, group): the codes in the order in which they are used,
// then 32 steps and, if there are any, 32 leasts, in float16. Of 4-bit codes, byte i of quad s holds that of input
// 4 s + i % 4 in its low half and of input 16 + 4 s + i % 4 in its high one.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "int8.h"
#include "matrix.h"
#include "tiles.h"

namespace quire {
namespace {

#if defined(__AVX512VNNI__)
constexpr int TILE = 12;  // terms that are multiplied together: 24 sums of int32
#else
constexpr int TILE = 2;
#endif

template <int BITS, bool LEAST>
struct Kind {
    static constexpr int codes = PANEL * GROUP * BITS / 8;
    static constexpr int record = codes + PANEL * 2 * (LEAST ? 2 : 1);
};

// Calls f(left, right, k) for each quad of inputs k..k+3, with the codes of the panel's halves. Unrolled by name, since
// sums that f keeps in an array are only kept in registers when the compiler sees each of their uses.
template <int BITS, class F>
[[gnu::always_inline]] inline void over_quads(const uint8_t* codes, F&& f) {
    if constexpr (BITS == 8) {
#pragma GCC unroll 8
        for (int s = 0; s < 8; s++) f(U8x64::load(codes + s * 128), U8x64::load(codes + s * 128 + 64), 4 * s);
    } else {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            U8x64 left = U8x64::load(codes + s * 128), right = U8x64::load(codes + s * 128 + 64);
            f(left.low_nibbles(), right.low_nibbles(), 4 * s);
            f(left.high_nibbles(), right.high_nibbles(), 16 + 4 * s);
        }
    }
}

void widen_codes(const uint8_t* codes, uint8_t* wide) {
    over_quads<4>(codes, [&](U8x64 left, U8x64 right, int k) {
        left.store(wide + k * 32);
        right.store(wide + k * 32 + 64);
    });
}

// sums[row] (32 outputs) += N terms times the codes of one group.
template <int N, int BITS, bool LEAST>
void multiply_tile(const uint8_t* codes, const fp16* steps, int zero, const int8_t* q, const Term* term, float* sums) {
    I32x16 left[N], right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) left[n] = right[n] = I32x16::set(LEAST ? 0 : -zero * term[n].total);
    over_quads<BITS>(codes, [&](U8x64 l, U8x64 r, int k) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            left[n].add_dot(l, q + n * GROUP + k);
            right[n].add_dot(r, q + n * GROUP + k);
        }
    });
    F32x16 step[2] = {F32x16::load(steps), F32x16::load(steps + 16)}, least[2];
    if (LEAST)
        for (int half = 0; half < 2; half++) least[half] = F32x16::load(steps + PANEL + half * 16);
    auto add = [&](const I32x16& dot, const Term& t, int half) __attribute__((always_inline)) {
        float* to = sums + t.row * PANEL + half * 16;
        F32x16 sum = fma(dot.to_float(), step[half] * F32x16::set(t.scale), F32x16::load(to));
        if (LEAST) sum = fma(least[half], F32x16::set(t.shift), sum);
        sum.store(to);
    };
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
        add(left[n], term[n], 0);
        add(right[n], term[n], 1);
    }
}

template <int BITS, bool LEAST>
void multiply_group(const uint8_t* record, int zero, const Terms& terms, float* sums) {
    const fp16* steps = reinterpret_cast<const fp16*>(record + Kind<BITS, LEAST>::codes);
    auto go = [&](auto bits, const uint8_t* codes) {
        in_even_groups<TILE>(terms.count, [&](auto n, int64_t at) {
            multiply_tile<n, bits, LEAST>(codes, steps, zero, terms.q + at * GROUP, terms.term + at, sums);
        });
    };
    fetch_ahead(record, Kind<BITS, LEAST>::record);
    if (BITS == 8 || terms.count <= TILE) return go(std::integral_constant<int, BITS>{}, record);
    alignas(64) uint8_t wide[PANEL * GROUP];  // made once for all terms
    widen_codes(record, wide);
    go(std::integral_constant<int, 8>{}, wide);
}

template <int BITS, bool LEAST>
void sums_of(const Matrix& w, const QuantizedRows& rows, int64_t panel, float* sums) {
    constexpr int record = Kind<BITS, LEAST>::record;
    int64_t groups = w.inputs / GROUP;
    const uint8_t* records = static_cast<const uint8_t*>(w.data) + panel * groups * record;
    for (int64_t g = 0; g < groups; g++)
        multiply_group<BITS, LEAST>(records + g * record, w.zero, rows.terms(g), sums);
}

// The byte of a record that has an output's code for input k of the group, and by how many bits it is shifted.
struct Place {
    int byte, shift;
};

template <int BITS>
Place place_of(int lane, int k) {
    int column = lane / 16 * 64 + lane % 16 * 4 + k % 4;
    return BITS == 8 ? Place{k / 4 * 128 + column, 0} : Place{k % 16 / 4 * 128 + column, k / 16 * 4};
}

template <int BITS, bool LEAST>
at::Tensor pack(const at::Tensor& codes, const at::Tensor& steps, const at::Tensor* least) {
    int64_t outputs = codes.size(0), inputs = codes.size(1), groups = inputs / GROUP;
    int64_t panels = (outputs + PANEL - 1) / PANEL;
    using K = Kind<BITS, LEAST>;
    at::Tensor packed = at::zeros({panels, groups, K::record}, at::kByte);
    uint8_t* records = packed.mutable_data_ptr<uint8_t>();
    const uint8_t* code = codes.const_data_ptr<uint8_t>();
    const fp16* step = static_cast<const fp16*>(steps.const_data_ptr());
    const fp16* low = LEAST ? static_cast<const fp16*>(least->const_data_ptr()) : nullptr;
    at::parallel_for(0, outputs, 16, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++)
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* record = records + ((n / PANEL) * groups + g) * K::record;
                int lane = n % PANEL;
                for (int k = 0; k < GROUP; k++) {
                    auto [byte, shift] = place_of<BITS>(lane, k);
                    record[byte] |= code[n * inputs + g * GROUP + k] << shift;
                }
                fp16* tail = reinterpret_cast<fp16*>(record + K::codes);
                tail[lane] = step[n * groups + g];
                if (LEAST) tail[PANEL + lane] = low[n * groups + g];
            }
    });
    return packed;
}

at::Tensor pack_quantized(const at::Tensor& codes, const at::Tensor& steps, const std::optional<at::Tensor>& least,
                          int64_t bits) {
    TORCH_CHECK(codes.scalar_type() == at::kByte && codes.is_contiguous(), "codes must be uint8 and contiguous");
    TORCH_CHECK(codes.size(1) % GROUP == 0, "inputs must be a multiple of ", GROUP);
    TORCH_CHECK(steps.scalar_type() == at::kHalf && steps.is_contiguous(), "steps must be float16 and contiguous");
    TORCH_CHECK(steps.size(0) == codes.size(0) && steps.size(1) * GROUP == codes.size(1), "a step for each group");
    TORCH_CHECK(!least || (least->scalar_type() == at::kHalf && least->is_contiguous() && least->sizes() == steps.sizes()),
                "leasts must be like the steps");
    if (bits == 8) return least ? pack<8, true>(codes, steps, &*least) : pack<8, false>(codes, steps, nullptr);
    TORCH_CHECK(bits == 4, "8 or 4 bits");
    return least ? pack<4, true>(codes, steps, &*least) : pack<4, false>(codes, steps, nullptr);
}

void quantized_linear(const at::Tensor& x, const at::Tensor& packed, int64_t bits, bool least, int64_t zero,
                      const std::optional<at::Tensor>& bias, at::Tensor& y) {
    multiply(quantized_matrix(packed, y.size(1), bits, least, zero), x, bias, y);
}

template <int BITS, bool LEAST>
void rows(const at::Tensor& packed, int zero, const at::Tensor& ids, at::Tensor& y) {
    using K = Kind<BITS, LEAST>;
    int64_t groups = packed.size(1);
    const uint8_t* records = packed.const_data_ptr<uint8_t>();
    const int64_t* id = ids.const_data_ptr<int64_t>();
    float* to = y.mutable_data_ptr<float>();
    at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t last) {
        for (int64_t t = from; t < last; t++) {
            int lane = id[t] % PANEL;
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t* record = records + (id[t] / PANEL * groups + g) * K::record;
                const fp16* tail = reinterpret_cast<const fp16*>(record + K::codes);
                float step = widen(tail[lane]), least = LEAST ? widen(tail[PANEL + lane]) : 0;
                for (int k = 0; k < GROUP; k++) {
                    auto [byte, shift] = place_of<BITS>(lane, k);
                    int code = record[byte] >> shift & ((1 << BITS) - 1);
                    to[(t * groups + g) * GROUP + k] = LEAST ? std::fma(float(code), step, least) : (code - zero) * step;
                }
            }
        }
    });
}

// y[t] = the weight's row ids[t], dequantised.
void quantized_rows(const at::Tensor& packed, int64_t bits, bool least, int64_t zero, const at::Tensor& ids,
                    at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    if (bits == 8) return least ? rows<8, true>(packed, zero, ids, y) : rows<8, false>(packed, zero, ids, y);
    return least ? rows<4, true>(packed, zero, ids, y) : rows<4, false>(packed, zero, ids, y);
}

}  // namespace

Matrix quantized_matrix(const at::Tensor& packed, int64_t outputs, int64_t bits, bool least, int64_t zero) {
    TORCH_CHECK(packed.is_contiguous() && packed.dim() == 3 && packed.scalar_type() == at::kByte, "bytes, contiguous");
    TORCH_CHECK(bits == 8 || bits == 4, "8 or 4 bits");
    TORCH_CHECK(packed.size(2) == PANEL * (GROUP * bits / 8 + (least ? 4 : 2)), "the weight is of another kind");
    TORCH_CHECK((outputs + PANEL - 1) / PANEL == packed.size(0), "the weight has other outputs");
    return {packed.const_data_ptr(), outputs, packed.size(1) * GROUP, at::kByte, int(bits), least, int(zero)};
}

void quantized_panel_sums(const Matrix& w, const QuantizedRows& rows, int64_t panel, int64_t count, float* sums) {
    std::fill_n(sums, count * PANEL, 0.0f);
    if (w.bits == 8) return (w.least ? sums_of<8, true> : sums_of<8, false>)(w, rows, panel, sums);
    return (w.least ? sums_of<4, true> : sums_of<4, false>)(w, rows, panel, sums);
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("pack_quantized(Tensor codes, Tensor steps, Tensor? least, int bits) -> Tensor");
    m.def("quantized_rows(Tensor packed, int bits, bool least, int zero, Tensor ids, Tensor(a!) y) -> ()");
    m.def(
        "quantized_linear(Tensor x, Tensor packed, int bits, bool least, int zero, Tensor? bias, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("pack_quantized", pack_quantized);
    m.impl("quantized_rows", quantized_rows);
    m.impl("quantized_linear", quantized_linear);
}

}  // namespace quire
