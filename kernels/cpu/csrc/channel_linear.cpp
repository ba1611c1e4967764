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
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "int8.h"
#include "int8_tiles.h"
#include "matrix.h"
#include "panel_memory.h"
#include "parts.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int ZERO_POINT = 128;
constexpr int RECORD_INPUTS = PART;                       // of 4 bits
constexpr int RECORD_QUANTS = PANEL * RECORD_INPUTS / 2;  // bytes
constexpr int RECORD_BYTES = RECORD_QUANTS + 2 * PANEL;   // with group scales and mins
constexpr int SCALE_BYTES = PANEL * int(sizeof(float));

#if defined(__AVX512VNNI__)
constexpr int TERM_TILE = 8;  // terms: their sums, 16 vectors of int32, and what is loaded fit into the registers
constexpr int RECORD_TILE = 4;   // terms that are multiplied by a record together
constexpr int DIRECT_TERMS = 4;  // with more of them, 4 bits are unpacked once for all
#elif defined(__AVXVNNI__)
constexpr int TERM_TILE = 2;
constexpr int RECORD_TILE = 1;
constexpr int DIRECT_TERMS = 1;
#else
constexpr int TERM_TILE = 2;
constexpr int RECORD_TILE = 2;
constexpr int DIRECT_TERMS = std::numeric_limits<int>::max();  // products of 4 bits need half the time
#endif

// Bytes of a panel before its scales.
int64_t panel_quant_bytes(int bits, int64_t inputs) {
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

// sums[row] (32 outputs) += N terms times the `size` inputs of a group. With PREFETCH, u is that of the packed weight,
// and what follows is fetched.
template <int N, bool PREFETCH>
void multiply_tile(const uint8_t* u, int size, const int8_t* q, const Term* term, float* sums) {
    I32x16 left[N], right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) left[n] = right[n] = I32x16::set(-ZERO_POINT * term[n].total);
    for (int k = 0; k < size; k += 4) {
        if (PREFETCH) prefetch_ahead(u + k * PANEL, 4 * PANEL);
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
    prefetch_ahead(record, RECORD_BYTES);
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

// Adds all terms times a group, whose u are those of the packed weight if it has 8 bits.
template <int BITS>
void multiply_group(const uint8_t* u, const Terms& terms, Int8Tiles& tiles, float* sums) {
    if (tiles.fit(terms)) {  // the integers, and so the sums, are those of `multiply_tile`
        if (BITS == 8) prefetch_ahead(u, terms.size * PANEL);
        return tiles.for_each_dots(u, terms, [&](const Term& term, const int32_t* dots) {
            I32x16 zero = I32x16::set(-ZERO_POINT * term.total);
            add_term(I32x16::load(dots) + zero, I32x16::load(dots + 16) + zero, term, sums);
        });
    }
    for_even_tiles<TERM_TILE>(terms.count, [&](auto n, int64_t first) {
        const int8_t* q = terms.q + first * terms.size;
        if (BITS == 8 && first == 0)
            multiply_tile<n, true>(u, terms.size, q, terms.term, sums);
        else
            multiply_tile<n, false>(u, terms.size, q, terms.term + first, sums);
    });
}

template <int BITS>
void panel_sums(const Matrix& w, const QuantizedRows& rows, int64_t panel, float* sums) {
    Int8Tiles tiles;
    const uint8_t* u = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(BITS, w.inputs);
    for (int64_t g = 0; g < rows.groups(); g++) {
        Terms terms = rows.terms(g);
        if (BITS == 8) {
            multiply_group<8>(u, terms, tiles, sums);
        } else if (terms.count <= DIRECT_TERMS) {
            for_even_tiles<RECORD_TILE>(terms.count, [&](auto n, int64_t first) {
                multiply_records<n>(u, terms, first, sums);
            });
        } else {
            alignas(64) uint8_t unpacked[MAX_ACTIVATION_GROUP * PANEL];
            for (int k = 0; k < terms.size; k += RECORD_INPUTS)
                unpack_record(u + panel_quant_bytes(4, k), unpacked + k * PANEL);
            multiply_group<4>(unpacked, terms, tiles, sums);
        }
        u += panel_quant_bytes(BITS, terms.size);
    }
}

// The byte of a panel of 8 bits that holds an output's u of input k.
int64_t byte_of(int lane, int64_t k) { return k / 4 * (4 * PANEL) + lane * 4 + k % 4; }

// 32 numbers of an output, as two vectors.
using Numbers32 = std::array<F32x16, 2>;

// A scale and a min, both whole, for 32 numbers v in 1..255.
struct GroupScale {
    float scale, min;

    // Returns the quants of 4 bits that are nearest to v, of those that give a byte.
    Numbers32 quants(const Numbers32& v) const {
        F32x16 largest = F32x16::set(std::min(15.0f, std::floor((255 - min) / scale))), factor = F32x16::set(1 / scale);
        Numbers32 result;
        for (int half = 0; half < 2; half++) {
            F32x16 nearest = ((v[half] - F32x16::set(min)) * factor).round();
            result[half] = quire::min(max(nearest, F32x16::zero()), largest);
        }
        return result;
    }

    float error(const Numbers32& v) const {
        Numbers32 rounded = quants(v);
        F32x16 squares = F32x16::zero();
        for (int half = 0; half < 2; half++) {
            F32x16 difference = v[half] - fma(rounded[half], F32x16::set(scale), F32x16::set(min));
            squares = fma(difference, difference, squares);
        }
        return reduce_sum(squares);
    }
};

// Returns the better of the two whole scales next to the range of v over 15. The smaller one cannot reach both ends, and
// leaves out as much at each.
GroupScale best_group_scale(const Numbers32& v) {
    float greatest = reduce_max(max(v[0], v[1])), least = reduce_min(quire::min(v[0], v[1])), range = greatest - least;
    auto centered = [&](float scale) {
        float min = std::nearbyint(least + (range - 15 * scale) / 2);
        return GroupScale{scale, std::clamp(min, 0.0f, 255.0f)};
    };
    float floor = std::max(1.0f, std::floor(range / 15));
    GroupScale small = centered(floor), large = centered(std::min(floor + 1, 17.0f));
    return small.error(v) <= large.error(v) ? small : large;
}

// Packs the inputs of an output that lie in one record of 4 bits, as the given lane of the panel.
void pack_record(const Numbers32& v, int lane, uint8_t* record) {
    GroupScale group_scale = best_group_scale(v);
    record[RECORD_QUANTS + lane] = uint8_t(group_scale.scale);
    record[RECORD_QUANTS + PANEL + lane] = uint8_t(group_scale.min);
    alignas(16) int8_t quants[RECORD_INPUTS];
    Numbers32 rounded = group_scale.quants(v);
    rounded[0].store(quants);
    rounded[1].store(quants + 16);
    for (int s = 0; s < 4; s++) {
        uint32_t low, high;
        std::memcpy(&low, quants + 4 * s, 4);
        std::memcpy(&high, quants + 16 + 4 * s, 4);
        low |= high << 4;
        std::memcpy(record + s * 4 * PANEL + lane * 4, &low, 4);
    }
}

// The scale of an output x (inputs), and the factor by which its numbers are multiplied before they are rounded.
struct OutputScale {
    float scale;
    F32x16 factor;

    OutputScale(const float* x, int64_t inputs)
        : scale(magnitude_of(x, inputs).max_abs / 127),
          factor(F32x16::set(scale >= 1e-30f ? 1 / scale : 0)) {}  // the inverse of less might overflow

    // If not, all products are infinite or NaN, whatever the bytes.
    bool finite() const { return std::isfinite(scale); }
};

// Rounds x (inputs) to bytes of 1..255.
void round_output(const float* x, int64_t inputs, const OutputScale& scale, uint8_t* u) {
    if (!scale.finite()) return void(std::fill_n(u, inputs, 0));
    for (int64_t k = 0; k < inputs; k += 16) {
        alignas(16) int8_t bytes[16];
        (F32x16::load(x + k) * scale.factor).store(bytes);
        __m128i signed_bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
        __m128i flipped = _mm_xor_si128(signed_bytes, _mm_set1_epi8(char(ZERO_POINT)));  // adds the zero point
        _mm_storeu_si128(reinterpret_cast<__m128i*>(u + k), flipped);
    }
}

// Packs x (inputs) as the given lane of a panel of 4 bits.
void pack_output(const float* x, int64_t inputs, const OutputScale& scale, int lane, uint8_t* panel) {
    if (!scale.finite()) return;
    for (int64_t k = 0; k < inputs; k += RECORD_INPUTS) {
        Numbers32 v{F32x16::load(x + k) * scale.factor, F32x16::load(x + k + 16) * scale.factor};
        for (F32x16& half : v) half = half + F32x16::set(ZERO_POINT);
        pack_record(v, lane, panel + panel_quant_bytes(4, k));
    }
}

// Packs panels of a weight. Each thread has one.
class ChannelPacker {
public:
    ChannelPacker(at::TensorList parts, int bits)
        : parts_(parts), bits_(bits), inputs_(parts[0].size(1)), stride_(inputs_ + 64), x_(inputs_) {
        if (bits == 8) rows_.resize(PANEL * stride_);
    }

    void pack(int64_t panel, uint8_t* data) {
        float* scales = reinterpret_cast<float*>(data + panel_quant_bytes(bits_, inputs_));
        int count = 0;
        for_each_output(parts_, panel, [&](const auto* row, int64_t stride, int lane) {
            read_inputs(row, stride, inputs_, x_.data());
            OutputScale scale(x_.data(), inputs_);
            scales[lane] = scale.scale;
            if (bits_ == 8)
                round_output(x_.data(), inputs_, scale, rows_.data() + lane * stride_);
            else
                pack_output(x_.data(), inputs_, scale, lane, data);
            count++;
        });
        if (bits_ == 4) return;
        std::fill(rows_.begin() + count * stride_, rows_.end(), 0);  // of outputs that the last panel lacks
        interleave(data);
    }

private:
    at::TensorList parts_;
    int bits_;
    int64_t inputs_, stride_;  // bytes of a row, more than inputs: rows a power of two apart would share sets of a cache
    std::vector<float> x_;
    std::vector<uint8_t> rows_;  // the bytes of a panel's outputs

    // Writes four bytes of each output after the other.
    void interleave(uint8_t* panel) {
        for (int64_t k = 0; k < inputs_; k += 32)
            for (int lane = 0; lane < PANEL; lane += 8) {
                const auto* x = reinterpret_cast<const float*>(rows_.data() + lane * stride_ + k);
                transpose(x, stride_ / 4, reinterpret_cast<float*>(panel + k * PANEL) + lane, PANEL);
            }
    }
};

// Returns panels of zeros, for `round_and_pack` to fill.
at::Tensor channel_panels(int64_t outputs, int64_t inputs, int64_t bits) {
    return zero_panels({(outputs + PANEL - 1) / PANEL, panel_bytes(int(bits), inputs)}, at::kByte);
}

// Rounds and packs the outputs of all parts into panels of zeros, one after another.
void round_and_pack(at::TensorList parts, int64_t bits, at::Tensor& packed) {
    int64_t inputs = parts[0].size(1);
    TORCH_CHECK(channel_matrix(packed, count_outputs(parts), bits).inputs == inputs, "the panels are of another weight");
    uint8_t* data = packed.mutable_data_ptr<uint8_t>();
    at::parallel_for(0, packed.size(0), 1, [&](int64_t from, int64_t to) {
        ChannelPacker packer(parts, int(bits));
        for (int64_t panel = from; panel < to; panel++) packer.pack(panel, data + panel * packed.size(1));
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
    m.def("round_and_pack(Tensor[] parts, int bits, Tensor(a!) packed) -> ()");
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
