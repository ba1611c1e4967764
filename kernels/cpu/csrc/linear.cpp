// y = x Wᵀ + b for weights in float32, bfloat16 or float16, and x, b, y in float32.
//
// Weights are packed into panels of 32 outputs, (panel, in, 32); the last one is padded with zeros. An output is one
// chain of fused multiply-adds over the inputs in order, whatever the number of rows: threads and tiles divide outputs
// and rows only.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "dtypes.h"
#include "float_parts.h"
#include "matrix.h"
#include "panel_memory.h"
#include "simd.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int PREFETCH_ROWS = 4;     // with more rows, multiplying takes longer than reading the weights
constexpr int64_t INPUT_TILE = 128;  // inputs of a panel that stay in the L1 cache while all rows use them

#if defined(__AVX512F__)
constexpr int ROW_TILE = 12;          // 24 accumulators of 32 registers
constexpr int WHOLE_ROWS = ROW_TILE;  // at most so many rows are multiplied by both halves of a panel at once
constexpr bool WIDENS_ONCE = true;    // weights of 16 bits, for all tiles of rows; else for each of them
#else
constexpr int ROW_TILE = 6;           // 12 accumulators of 16 registers, for half a panel
constexpr int WHOLE_ROWS = 2;         // with so few, reading takes longest: a line of a panel is used at once
constexpr bool WIDENS_ONCE = false;   // AMD's Zen 2 widens beside multiplications, in time that costs nothing
#endif

// sums (N, 32) += x (N, inputs) times a tile of a panel, for 16 * VECTORS outputs. `stride` is in floats. With
// `next_tile`, half a panel prefetches its part of the next tile.
template <int N, int VECTORS, class W>
void multiply_tile(const float* x, int64_t stride, const W* panel, int64_t inputs, float* sums, bool next_tile) {
    F32x16 sum[N][VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[n][v] = F32x16::load(sums + n * PANEL + 16 * v);
    for (int64_t k = 0; k < inputs; k++) {
        if (N <= PREFETCH_ROWS && VECTORS == 2) prefetch_ahead(panel + k * PANEL, PANEL * sizeof(W));
        if (VECTORS == 1 && next_tile) _mm_prefetch(panel + (k + INPUT_TILE) * PANEL, _MM_HINT_T0);
        F32x16 weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) weights[v] = F32x16::load(panel + k * PANEL + 16 * v);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            F32x16 value = F32x16::set(x[n * stride + k]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[n][v] = fma(value, weights[v], sum[n][v]);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[n][v].store(sums + n * PANEL + 16 * v);
}

template <class W>
void panel_sums(const W* panel, int64_t inputs, const float* x, int64_t stride, int64_t rows, float* sums) {
    std::fill_n(sums, rows * PANEL, 0.0f);
    for (int64_t first = 0; first < inputs; first += INPUT_TILE) {
        int64_t tile_inputs = std::min(INPUT_TILE, inputs - first);
        const W* part = panel + first * PANEL;
        auto multiply_rows = [&](const auto* weights) {
            for_even_tiles<ROW_TILE>(rows, [&](auto n, int64_t row) {
                constexpr int VECTORS = n <= WHOLE_ROWS ? 2 : 1;
                for (int output = 0; output < PANEL; output += 16 * VECTORS) {
                    const float* tile = x + row * stride + first;
                    float* target = sums + row * PANEL + output;
                    multiply_tile<n, VECTORS>(tile, stride, weights + output, tile_inputs, target, row == 0);
                }
            });
        };
        if (std::is_same_v<W, float> || rows <= ROW_TILE || !WIDENS_ONCE) {
            multiply_rows(part);
            continue;
        }
        alignas(64) float wide[INPUT_TILE * PANEL];  // widened once for all rows
        prefetch_ahead(part, tile_inputs * PANEL * sizeof(W));
        for (int64_t i = 0; i < tile_inputs * PANEL; i += 16) F32x16::load(part + i).store(wide + i);
        multiply_rows(static_cast<const float*>(wide));
    }
}

// Packs a panel by way of float32 in registers, which is faster than moving numbers one by one, even of the same type.
template <class W>
void pack_panel(const FloatPanel& panel, int64_t inputs, W* packed) {
    constexpr int64_t TILE = 64;  // inputs of a panel that stay in the L1 cache with their copy
    alignas(64) float x[PANEL * TILE] = {}, columns[8 * PANEL];
    for (int64_t first = 0; first < inputs; first += TILE) {
        int64_t count = std::min(TILE, inputs - first);
        for (int lane = 0; lane < panel.count; lane++) panel.output[lane].read(first, count, x + lane * TILE);
        for (int64_t k = 0; k < count; k += 8) {
            for (int lane = 0; lane < PANEL; lane += 8) transpose(x + lane * TILE + k, TILE, columns + lane, PANEL);
            W* target = packed + (first + k) * PANEL;
            for (int64_t i = 0; i < std::min<int64_t>(8, count - k) * PANEL; i += 16)
                F32x16::load(columns + i).store(target + i);
        }
    }
}

// Returns panels of zeros, for `pack_linear` to fill.
at::Tensor float_panels(int64_t outputs, int64_t inputs, at::ScalarType dtype) {
    return zero_panels({(outputs + PANEL - 1) / PANEL, inputs, PANEL}, dtype);
}

// Packs the outputs of all parts into panels of zeros, one after another. `FloatParts` says what the parts are.
void pack_linear(at::TensorList tensors, at::IntArrayRef types, at::IntArrayRef first_groups, at::Tensor& packed) {
    int64_t inputs = packed.size(1);
    FloatParts parts(tensors, types, first_groups, inputs);
    float_matrix(packed, parts.outputs());  // checks the panels
    for_dtype(packed.scalar_type(), [&](auto tag) {
        auto* data = static_cast<decltype(tag)*>(packed.mutable_data_ptr());
        parallel_for_panels(packed.size(0), [&](int64_t panel) {
            pack_panel(parts.panel(panel), inputs, data + panel * inputs * PANEL);
        });
    });
}

void linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, at::Tensor& y) {
    matmul(float_matrix(packed, y.size(1)), x, bias, y);
}

// y[t] = the weight's row ids[t]. With it, a model with tied embeddings keeps one copy of them.
void packed_rows(const at::Tensor& packed, const at::Tensor& ids, at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    int64_t inputs = packed.size(1);
    const int64_t* id_data = ids.const_data_ptr<int64_t>();
    float* y_data = y.mutable_data_ptr<float>();
    for_dtype(packed.scalar_type(), [&](auto tag) {
        const auto* weights = static_cast<const decltype(tag)*>(packed.const_data_ptr());
        at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t to) {
            for (int64_t t = from; t < to; t++)
                for (int64_t id = id_data[t], k = 0; k < inputs; k++)
                    y_data[t * inputs + k] = widen(weights[(id / PANEL * inputs + k) * PANEL + id % PANEL]);
        });
    });
}

}  // namespace

Matrix float_matrix(const at::Tensor& packed, int64_t outputs) {
    TORCH_CHECK(packed.is_contiguous() && packed.dim() == 3 && packed.size(2) == PANEL, "(panel, in, 32), contiguous");
    TORCH_CHECK((outputs + PANEL - 1) / PANEL == packed.size(0), "the weight has not y's number of outputs");
    return {packed.const_data_ptr(), outputs, packed.size(1), WeightFormat::floats, packed.scalar_type(), 0, false, 0};
}

void float_panel_matmul(const Matrix& w, const float* x, int64_t stride, int64_t rows, int64_t panel, float* sums) {
    for_dtype(w.dtype, [&](auto tag) {
        const auto* weights = static_cast<const decltype(tag)*>(w.data) + panel * w.inputs * PANEL;
        panel_sums(weights, w.inputs, x, stride, rows, sums);
    });
}

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("float_panels(int outputs, int inputs, ScalarType dtype) -> Tensor");
    m.def("pack_linear(Tensor[] parts, int[] types, int[] first_groups, Tensor(a!) packed) -> ()");
    m.def("packed_rows(Tensor packed, Tensor ids, Tensor(a!) y) -> ()");
    m.def("linear(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) { m.impl("float_panels", float_panels); }
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("pack_linear", pack_linear);
    m.impl("packed_rows", packed_rows);
    m.impl("linear", linear);
}

}  // namespace quire
