// Packed matrices, and y = x Wᵀ + b with them. How they are packed stands where they are multiplied: linear.cpp for
// those of floats, quantized_linear.cpp for those of few bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "quantized_rows.h"

namespace quire {

constexpr int PANEL = 32;      // outputs that lie, and are computed, together
constexpr int64_t FEW = 4;     // rows that are not worth waking another thread for
constexpr int64_t BLOCK = 96;  // rows at most that are multiplied together: they, and their sums, stay in a core's caches

struct Matrix {
    const void* data;
    int64_t outputs, inputs;
    at::ScalarType dtype;  // of floats; bytes where there are few bits
    int bits;              // 8 or 4; 0: floats
    bool least;
    int zero;

    bool quantized() const { return bits != 0; }
    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int width(int64_t panel) const { return int(std::min<int64_t>(PANEL, outputs - panel * PANEL)); }
};

// Of what `pack_linear` and `pack_quantized` made. Raises c10::Error for anything else.
Matrix float_matrix(const at::Tensor& packed, int64_t outputs);
Matrix quantized_matrix(const at::Tensor& packed, int64_t outputs, int64_t bits, bool least, int64_t zero);

// A block of rows as a matrix wants them: floats for floats, quantised for few bits.
struct Input {
    const float* x;
    int64_t stride, rows;
    const QuantizedRows* quantized;
};

// sums (rows, 32): one panel's products, without bias. Runs in the calling thread.
void panel_sums(const Matrix& w, const Input& input, int64_t panel, float* sums);

// A block's x (rows, inputs) into `to`, if `w` wants it quantised.
void quantize_for(const Matrix& w, const float* x, int64_t stride, int64_t rows, QuantizedRows& to);

// One block to y (rows, outputs).
void multiply(const Matrix& w, const Input& input, const float* bias, float* y);

// x (rows, inputs) of any number of rows to y (rows, outputs). Raises c10::Error for tensors of another kind.
void multiply(const Matrix& w, const at::Tensor& x, const std::optional<at::Tensor>& bias, at::Tensor& y);

}  // namespace quire
