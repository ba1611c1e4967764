// Packed matrices, and the GEMM y = x Wᵀ + b with them. linear.cpp defines how matrices of floats are packed,
// quantized_linear.cpp those with a scale for each group of inputs, channel_linear.cpp those with one for each output,
// table_linear.cpp those with a table for each output.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "lora.h"
#include "quantized_rows.h"

namespace quire {

constexpr int PANEL = 32;               // outputs that are stored and computed together
constexpr int QUANT_GROUP_SIZE = 32;    // inputs of a weight that share a scale, where groups have scales
constexpr int64_t ROWS_PER_THREAD = 4;  // fewer are not worth waking another thread
constexpr int64_t MAX_BLOCK_ROWS = 96;  // of one pass over the weights; they and their sums fit into a core's caches

enum class WeightFormat { floats, group, channel, table };  // all but floats are quantised

// What is added to single weights of a matrix, with the outputs of a compressed sparse matrix as its rows.
struct Outliers {
    const int64_t* offsets = nullptr;  // (outputs + 1,) of an output's first outlier; nullptr: there are none
    const int32_t* inputs = nullptr;   // of each outlier
    const float* values = nullptr;

    // Calls f(input, value) for all outliers of an output.
    template <class F>
    void for_each(int64_t output, F&& f) const {
        if (!offsets) return;
        for (int64_t i = offsets[output]; i < offsets[output + 1]; i++) f(inputs[i], values[i]);
    }
};

struct Matrix {
    const void* data;
    int64_t outputs, inputs;
    WeightFormat format;
    at::ScalarType dtype;  // kByte if quantised
    int bits;              // 8 or 4 if quantised
    bool has_mins;         // of groups
    int zero_point;        // of groups without mins
    Outliers outliers{};   // of tables

    bool quantized() const { return format != WeightFormat::floats; }
    bool reads_floats() const { return !quantized() || outliers.offsets; }
    // Inputs of x that share a scale, if the matrix is quantised.
    int activation_group() const { return format == WeightFormat::channel ? MAX_ACTIVATION_GROUP : QUANT_GROUP_SIZE; }
    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int width(int64_t panel) const { return int(std::min<int64_t>(PANEL, outputs - panel * PANEL)); }
};

// Matrices of tensors that `pack_linear`, `pack_quantized` and `round_and_pack` filled, or `pack_tables` returned. Raise
// c10::Error for any others. `outliers` are offsets, inputs and values, or empty; only their types and sizes are checked.
Matrix float_matrix(const at::Tensor& packed, int64_t outputs);
Matrix group_matrix(const at::Tensor& packed, int64_t outputs, int64_t bits, bool has_mins, int64_t zero_point);
Matrix channel_matrix(const at::Tensor& packed, int64_t outputs, int64_t bits);
Matrix table_matrix(const at::Tensor& packed, int64_t outputs, at::TensorList outliers);

// A block of rows (rows, inputs). A matrix of floats reads it from `x`, a quantised one from `quantized`, and one with
// outliers from both. `adapters` has those of the rows for which `shrink` was called; nullptr: none.
struct InputRows {
    const float* x;
    int64_t stride, rows;
    const QuantizedRows* quantized;
    const LoraRows* adapters = nullptr;
};

// Computes sums (rows, 32) = x Wᵀ of one panel, without bias and adapters, in the calling thread.
void panel_matmul(const Matrix& w, const InputRows& input, int64_t panel, float* sums);

// Quantises a block's x (rows, inputs) into `quantized`, if `w` is quantised.
void quantize_rows_for(const Matrix& w, const float* x, int64_t stride, int64_t rows, QuantizedRows& quantized);

// Computes y (rows, outputs) of one block.
void matmul(const Matrix& w, const InputRows& input, const float* bias, float* y);

// Computes y (rows, outputs) of x (rows, inputs), for any number of rows. Raises c10::Error for tensors that don't fit.
void matmul(const Matrix& w, const at::Tensor& x, const std::optional<at::Tensor>& bias, at::Tensor& y);

}  // namespace quire
