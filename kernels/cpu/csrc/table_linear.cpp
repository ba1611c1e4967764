// y = x Wᵀ + b for weights of 4 bits that are looked up in a table for each output (SqueezeLLM), and a few outliers beside
// them. x is quantised to 8 bits first.
//
//     w[n, k] = scale[n] * (u[n, code[n, k]] - 4096) + outlier[n, k]    u in 1..8191, scale[n] = max |table[n]| / 4095
//     x[m, k] ≈ x_scale[m, g] * q[m, k]                                 g = k / 32, or the sum of two: quantized_rows.h
//     y[m, n] = scale[n] * Σ_g x_scale * Σ_k (u - 4096) q  +  Σ_k outlier x
//
// Thirteen bits of a table lose little beside the eight of x: an entry is off by at most a 8,190th of the largest one. u
// is two numbers, 64 high + low, of seven and six bits, whose products with q fit all instructions for bytes. So sums are
// exact integers, and quick.
//
// A byte can only be looked up among sixteen bytes of the same 128 bits. So these belong to one output, where other
// formats have the outputs side by side, and four partial sums of each output are added at the end of a group.
//
// A row's result does not depend on the other rows: activations have a scale for each row and group, groups are added
// in order, integer sums are exact, and an output's outliers are added in their order.
//
// A packed panel of 32 outputs has a record of 512 bytes for each 32 inputs, then its tables, then 32 scales in float32.
// A record is eight vectors of 64 bytes. A lane of 16 bytes belongs to one output (`lane_of`); byte i of it holds the
// code of input i in its low half and that of input 16 + i in its high half. Tables are two such vectors, low and high,
// for each vector of a record.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "int8.h"
#include "matrix.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int TABLE = 16;                  // entries
constexpr int ZERO_POINT = 4096;           // u of a weight of 0
constexpr int VECTOR = 64;                 // bytes
constexpr int VECTORS = PANEL / 4;         // of a record
constexpr int RECORD_INPUTS = 32;
constexpr int RECORD_BYTES = VECTORS * VECTOR;
constexpr int TAIL_BYTES = 2 * RECORD_BYTES + PANEL * int(sizeof(float));  // tables and scales

#if defined(__AVX512VNNI__)
constexpr int TERM_TILE = 4;
#else
constexpr int TERM_TILE = 2;
#endif

int64_t panel_bytes(int64_t inputs) { return inputs / RECORD_INPUTS * RECORD_BYTES + TAIL_BYTES; }

// The lane of an output: its vector, and its first byte within that. `add_within_lanes` returns sixteen outputs in order.
struct Lane {
    int vector, byte;
};

constexpr Lane lane_of(int output) { return {output / 16 * 4 + output % 4, output % 16 / 4 * 16}; }

// A panel's tail.
struct Tail {
    const uint8_t* tables;
    const float* scales;

    U8x64 low(int vector) const { return U8x64::load(tables + 2 * vector * VECTOR); }
    U8x64 high(int vector) const { return U8x64::load(tables + (2 * vector + 1) * VECTOR); }
    int u(int output, int code) const {
        auto [vector, byte] = lane_of(output);
        const uint8_t* entry = tables + 2 * vector * VECTOR + byte + code;
        return entry[VECTOR] * 64 + entry[0];
    }
};

Tail tail_of(const uint8_t* panel, int64_t inputs) {
    const uint8_t* tables = panel + inputs / RECORD_INPUTS * RECORD_BYTES;
    return {tables, reinterpret_cast<const float*>(tables + 2 * RECORD_BYTES)};
}

// Adds N terms to the sums of their rows. multiply(vector, totals) sets N integer sums for the vector's four outputs.
template <int N, class F>
[[gnu::always_inline]] inline void add_terms(const Term* term, float* sums, F&& multiply) {
    for (int half = 0; half < 2; half++) {
        I32x16 totals[4][N];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) multiply(half * 4 + v, totals[v]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            I32x16 dot = add_within_lanes(totals[0][n], totals[1][n], totals[2][n], totals[3][n]);
            float* row_sums = sums + term[n].row * PANEL + half * 16;
            F32x16 exact = (dot + I32x16::set(-ZERO_POINT * term[n].total)).to_float();
            fma(exact, F32x16::set(term[n].scale), F32x16::load(row_sums)).store(row_sums);
        }
    }
}

// sums[row] (32 outputs) += N terms times the inputs of a group, whose records begin at `records`.
template <int N>
void multiply_tile(const uint8_t* records, const Tail& tail, int size, const int8_t* q, const Term* term, float* sums) {
    add_terms<N>(term, sums, [&](int vector, I32x16* totals) __attribute__((always_inline)) {
        U8x64 low = tail.low(vector), high = tail.high(vector);
        const uint8_t* codes = records + vector * VECTOR;
        SplitSum sum[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[n] = SplitSum::zero();
        for (int k = 0; k < size; k += RECORD_INPUTS, codes += RECORD_BYTES) {
            U8x64 both = U8x64::load(codes), left = both.low_nibbles(), right = both.high_nibbles();
            U8x64 left_low = low.lookup(left), left_high = high.lookup(left);
            U8x64 right_low = low.lookup(right), right_high = high.lookup(right);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                sum[n].add_products(left_low, left_high, q + n * size + k);
                sum[n].add_products(right_low, right_high, q + n * size + k + 16);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) totals[n] = sum[n].total();
    });
}

void multiply_directly(const uint8_t* records, const Tail& tail, const Terms& terms, float* sums) {
    for_even_tiles<TERM_TILE>(terms.count, [&](auto n, int64_t first) {
        multiply_tile<n>(records, tail, terms.size, terms.q + first * terms.size, terms.term + first, sums);
    });
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

void multiply_group(const uint8_t* records, const Tail& tail, const Terms& terms, float* sums) {
    multiply_directly(records, tail, terms, sums);
}

#else

// Without VNNI, numbers of sixteen bits need half as many instructions as two halves. Many terms use what is looked up
// once. The integers, and so the sums, are the same.
void multiply_group(const uint8_t* records, const Tail& tail, const Terms& terms, float* sums) {
    if (terms.count <= TERM_TILE) return multiply_directly(records, tail, terms, sums);
    alignas(64) int16_t numbers[QUANT_GROUP_SIZE * PANEL];
    int parts = terms.size / 16;  // of sixteen inputs; vector v has its numbers of part p at (v * parts + p) * VECTOR
    for (int vector = 0; vector < VECTORS; vector++) {
        U8x64 low = tail.low(vector), high = tail.high(vector);
        int16_t* target = numbers + vector * parts * VECTOR;
        for (int part = 0; part < parts; part += 2, target += 2 * VECTOR) {
            U8x64 both = U8x64::load(records + part / 2 * RECORD_BYTES + vector * VECTOR);
            U8x64 left = both.low_nibbles(), right = both.high_nibbles();
            join_halves(low.lookup(left), high.lookup(left), target);
            join_halves(low.lookup(right), high.lookup(right), target + VECTOR);
        }
    }
    for (int t = 0; t < terms.count; t++) {
        alignas(64) int16_t q[QUANT_GROUP_SIZE];
        for (int k = 0; k < terms.size; k++) q[k] = terms.q[t * terms.size + k];
        add_terms<1>(terms.term + t, sums, [&](int vector, I32x16* totals) __attribute__((always_inline)) {
            I32x16 sum = I32x16::set(0);
            const int16_t* vector_numbers = numbers + vector * parts * VECTOR;
            for (int part = 0; part < parts; part++)
                add_wide_products(sum, vector_numbers + part * VECTOR, q + part * 16);
            totals[0] = sum;
        });
    }
}

#endif

// sums (rows, 32) += x times the outliers of a panel's outputs. Several rows hide the latency of additions.
void add_outliers(const Matrix& w, const InputRows& input, int64_t panel, float* sums) {
    for (int lane = 0; lane < w.width(panel); lane++)
        for_even_tiles<4>(input.rows, [&](auto n, int64_t first) {
            const float* x = input.x + first * input.stride;
            float* row_sums = sums + first * PANEL + lane;
            float sum[n];
            for (int i = 0; i < n; i++) sum[i] = row_sums[i * PANEL];
            w.outliers.for_each(panel * PANEL + lane, [&](int64_t k, float value) {
#pragma GCC unroll 4
                for (int i = 0; i < n; i++) sum[i] = std::fma(value, x[i * input.stride + k], sum[i]);
            });
            for (int i = 0; i < n; i++) row_sums[i * PANEL] = sum[i];
        });
}

// Packs a table (16) of an output, and its scale.
template <class T>
void pack_table(const T* table, int output, uint8_t* tables, float* scales) {
    float largest = 0;
    for (int i = 0; i < TABLE; i++) largest = std::max(largest, std::fabs(widen(table[i])));
    float scale = largest / (ZERO_POINT - 1), factor = scale >= 1e-30f ? 1 / scale : 0;  // of less, it might overflow
    scales[output] = scale;
    auto [vector, byte] = lane_of(output);
    uint8_t* entry = tables + 2 * vector * VECTOR + byte;
    for (int i = 0; i < TABLE; i++) {
        int u = int(std::nearbyint(widen(table[i]) * factor)) + ZERO_POINT;
        entry[i] = uint8_t(u % 64);
        entry[VECTOR + i] = uint8_t(u / 64);
    }
}

// Packs the codes of an output: words[i * stride] has those of inputs 8 i to 8 i + 7, the first one in the lowest bits.
void pack_codes(const int32_t* words, int64_t stride, int64_t inputs, int output, uint8_t* panel) {
    auto [vector, byte] = lane_of(output);
    for (int64_t k = 0; k < inputs; k += RECORD_INPUTS) {
        uint8_t* lane = panel + k / RECORD_INPUTS * RECORD_BYTES + vector * VECTOR + byte;
        for (int i = 0; i < 16; i++) {
            auto code = [&](int64_t input) { return uint32_t(words[input / 8 * stride]) >> input % 8 * 4 & 15; };
            lane[i] = uint8_t(code(k + i) | code(k + 16 + i) << 4);
        }
    }
}

// Returns the panels of the outputs of all parts, one after another. A part has codes (in / 8, out) and tables (out, 16).
at::Tensor pack_tables(at::TensorList codes, at::TensorList tables) {
    TORCH_CHECK(!codes.empty() && codes.size() == tables.size(), "there must be tables for the codes of each part");
    int64_t inputs = codes[0].size(0) * 8, outputs = 0;
    TORCH_CHECK(inputs % RECORD_INPUTS == 0, "inputs must be a multiple of ", RECORD_INPUTS);
    for (size_t i = 0; i < codes.size(); i++) {
        TORCH_CHECK(codes[i].scalar_type() == at::kInt && codes[i].is_contiguous() && codes[i].size(0) * 8 == inputs,
                    "codes must be int32 and contiguous, of equally many inputs in all parts");
        TORCH_CHECK(tables[i].is_contiguous() && tables[i].size(0) == codes[i].size(1) && tables[i].size(1) == TABLE,
                    "tables must be contiguous, with 16 entries for each output");
        outputs += codes[i].size(1);
    }
    int64_t panels = (outputs + PANEL - 1) / PANEL, bytes = panel_bytes(inputs);
    at::Tensor packed = at::empty({panels, bytes}, at::kByte);
    uint8_t* data = packed.mutable_data_ptr<uint8_t>();
    if (outputs % PANEL) std::fill_n(data + (panels - 1) * bytes, bytes, 0);
    at::parallel_for(0, panels, 1, [&](int64_t from, int64_t to) {
        int64_t first = 0;
        for (size_t i = 0; i < codes.size(); i++) {
            int64_t part_outputs = codes[i].size(1), end = std::min(to * PANEL, first + part_outputs);
            const int32_t* words = codes[i].const_data_ptr<int32_t>();
            for_dtype(tables[i].scalar_type(), [&](auto tag) {
                const auto* table = static_cast<const decltype(tag)*>(tables[i].const_data_ptr());
                for (int64_t n = std::max(from * PANEL, first); n < end; n++) {
                    uint8_t* panel = data + n / PANEL * bytes;
                    Tail tail = tail_of(panel, inputs);
                    pack_codes(words + n - first, part_outputs, inputs, int(n % PANEL), panel);
                    pack_table(table + (n - first) * TABLE, int(n % PANEL), const_cast<uint8_t*>(tail.tables),
                               const_cast<float*>(tail.scales));
                }
            });
            first += part_outputs;
        }
    });
    return packed;
}

void table_linear(const at::Tensor& x, const at::Tensor& packed, at::TensorList outliers,
                  const std::optional<at::Tensor>& bias, at::Tensor& y) {
    matmul(table_matrix(packed, y.size(1), outliers), x, bias, y);
}

// y[t] = the weight's row ids[t], dequantised.
void table_rows(const at::Tensor& packed, at::TensorList outliers, const at::Tensor& ids, at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    int64_t inputs = y.size(1), bytes = panel_bytes(inputs);
    TORCH_CHECK(packed.dim() == 2 && packed.size(1) == bytes, "y must have the weight's number of inputs");
    Matrix w = table_matrix(packed, outliers.empty() ? packed.size(0) * PANEL : outliers[0].size(0) - 1, outliers);
    const uint8_t* data = packed.const_data_ptr<uint8_t>();
    const int64_t* id_data = ids.const_data_ptr<int64_t>();
    float* y_data = y.mutable_data_ptr<float>();
    at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            int output = int(id_data[t] % PANEL);
            const uint8_t* panel = data + id_data[t] / PANEL * bytes;
            Tail tail = tail_of(panel, inputs);
            auto [vector, byte] = lane_of(output);
            float* row = y_data + t * inputs;
            for (int64_t k = 0; k < inputs; k++) {
                int pair = panel[k / RECORD_INPUTS * RECORD_BYTES + vector * VECTOR + byte + k % 16];
                int code = k % RECORD_INPUTS < 16 ? pair & 15 : pair >> 4;
                row[k] = tail.scales[output] * float(tail.u(output, code) - ZERO_POINT);
            }
            w.outliers.for_each(id_data[t], [&](int64_t k, float value) { row[k] += value; });
        }
    });
}

}  // namespace

Matrix table_matrix(const at::Tensor& packed, int64_t outputs, at::TensorList outliers) {
    TORCH_CHECK(packed.is_contiguous() && packed.dim() == 2 && packed.scalar_type() == at::kByte, "bytes, contiguous");
    TORCH_CHECK((outputs + PANEL - 1) / PANEL == packed.size(0), "the weight has another number of outputs");
    int64_t records = packed.size(1) - TAIL_BYTES;
    TORCH_CHECK(records > 0 && records % RECORD_BYTES == 0, "the weight has another format");
    Matrix w{packed.const_data_ptr(), outputs, records / RECORD_BYTES * RECORD_INPUTS, WeightFormat::table, at::kByte,
             4,                       false,   0};
    if (outliers.empty()) return w;
    TORCH_CHECK(outliers.size() == 3 && outliers[0].scalar_type() == at::kLong && outliers[1].scalar_type() == at::kInt &&
                    outliers[2].scalar_type() == at::kFloat && outliers[0].numel() == outputs + 1,
                "outliers must be offsets (int64, one more than outputs), inputs (int32) and values (float32)");
    for (const at::Tensor& tensor : outliers) TORCH_CHECK(tensor.is_contiguous(), "outliers must be contiguous");
    w.outliers = {outliers[0].const_data_ptr<int64_t>(), outliers[1].const_data_ptr<int32_t>(),
                  outliers[2].const_data_ptr<float>()};
    return w;
}

void table_panel_matmul(const Matrix& w, const InputRows& input, int64_t panel, float* sums) {
    std::fill_n(sums, input.rows * PANEL, 0.0f);
    const QuantizedRows& rows = *input.quantized;
    const uint8_t* records = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w.inputs);
    Tail tail = tail_of(records, w.inputs);
    for (int64_t g = 0; g < rows.groups(); g++) {
        Terms terms = rows.terms(g);
        int bytes = terms.size / RECORD_INPUTS * RECORD_BYTES;
        prefetch_ahead(records, bytes);
        multiply_group(records, tail, terms, sums);
        records += bytes;
    }
    F32x16 left = F32x16::load(tail.scales), right = F32x16::load(tail.scales + 16);
    for (int64_t row = 0; row < input.rows; row++) {
        float* row_sums = sums + row * PANEL;
        (F32x16::load(row_sums) * left).store(row_sums);
        (F32x16::load(row_sums + 16) * right).store(row_sums + 16);
    }
    if (w.outliers.offsets) add_outliers(w, input, panel, sums);
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("pack_tables(Tensor[] codes, Tensor[] tables) -> Tensor");
    m.def("table_rows(Tensor packed, Tensor[] outliers, Tensor ids, Tensor(a!) y) -> ()");
    m.def("table_linear(Tensor x, Tensor packed, Tensor[] outliers, Tensor? bias, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("pack_tables", pack_tables);
    m.impl("table_rows", table_rows);
    m.impl("table_linear", table_linear);
}

}  // namespace quire
