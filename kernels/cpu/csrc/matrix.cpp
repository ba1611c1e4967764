// Which product a packed matrix needs, and how rows and panels are divided.
#include "matrix.h"

#include <ATen/Parallel.h>

#include "tiles.h"

namespace quire {

void quantized_panel_sums(const Matrix& w, const QuantizedRows& rows, int64_t panel, int64_t count, float* sums);
void float_panel_sums(const Matrix& w, const float* x, int64_t stride, int64_t count, int64_t panel, float* sums);

void panel_sums(const Matrix& w, const Input& input, int64_t panel, float* sums) {
    if (w.quantized()) return quantized_panel_sums(w, *input.quantized, panel, input.rows, sums);
    float_panel_sums(w, input.x, input.stride, input.rows, panel, sums);
}

void multiply(const Matrix& w, const Input& input, const float* bias, float* y) {
    over_panels(w.panels(), [&](int64_t panel) {
        alignas(64) float sums[BLOCK * PANEL];
        panel_sums(w, input, panel, sums);
        const float* b = bias ? bias + panel * PANEL : nullptr;
        for (int64_t row = 0; row < input.rows; row++)
            write_outputs(sums + row * PANEL, y + row * w.outputs + panel * PANEL, b, w.width(panel));
    });
}

void quantize_for(const Matrix& w, const float* x, int64_t stride, int64_t rows, QuantizedRows& to) {
    if (!w.quantized()) return;
    to.reset(rows, w.inputs);
    at::parallel_for(0, rows, FEW, [&](int64_t from, int64_t last) {
        for (int64_t row = from; row < last; row++) to.set(row, x + row * stride, w.inputs);
    });
}

void multiply(const Matrix& w, const at::Tensor& x, const std::optional<at::Tensor>& bias, at::Tensor& y) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(1) == 1 && y.is_contiguous(), "x must be float32, y contiguous");
    TORCH_CHECK(w.inputs == x.size(1), "the weight is for ", w.inputs, " inputs");
    static thread_local QuantizedRows quantized;  // keeps its memory
    const float *from = x.const_data_ptr<float>(), *b = bias ? bias->const_data_ptr<float>() : nullptr;
    float* to = y.mutable_data_ptr<float>();
    over_blocks(x.size(0), BLOCK, [&](int64_t first, int64_t count) {
        const float* block = from + first * x.stride(0);
        quantize_for(w, block, x.stride(0), count, quantized);
        multiply(w, {block, x.stride(0), count, &quantized}, b, to + first * w.outputs);
    });
}

}  // namespace quire
