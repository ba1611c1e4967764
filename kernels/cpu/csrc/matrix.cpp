// Divides a GEMM into blocks of rows and panels, and calls the kernel for the matrix's format.
#include "matrix.h"

#include <ATen/Parallel.h>

#include "tiles.h"

namespace quire {

void float_panel_matmul(const Matrix& w, const float* x, int64_t stride, int64_t count, int64_t panel, float* sums);
void group_panel_matmul(const Matrix& w, const QuantizedRows& rows, int64_t panel, int64_t count, float* sums);
void channel_panel_matmul(const Matrix& w, const QuantizedRows& rows, int64_t panel, int64_t count, float* sums);
void table_panel_matmul(const Matrix& w, const InputRows& input, int64_t panel, float* sums);

void panel_matmul(const Matrix& w, const InputRows& input, int64_t panel, float* sums) {
    switch (w.format) {
        case WeightFormat::floats: return float_panel_matmul(w, input.x, input.stride, input.rows, panel, sums);
        case WeightFormat::group: return group_panel_matmul(w, *input.quantized, panel, input.rows, sums);
        case WeightFormat::channel: return channel_panel_matmul(w, *input.quantized, panel, input.rows, sums);
        case WeightFormat::table: return table_panel_matmul(w, input, panel, sums);
    }
}

void matmul(const Matrix& w, const InputRows& input, const float* bias, float* y) {
    parallel_for_panels(w.panels(), [&](int64_t panel) {
        alignas(64) float sums[MAX_BLOCK_ROWS * PANEL];
        panel_matmul(w, input, panel, sums);
        const float* panel_bias = bias ? bias + panel * PANEL : nullptr;
        for (int64_t row = 0; row < input.rows; row++)
            write_outputs(sums + row * PANEL, y + row * w.outputs + panel * PANEL, panel_bias, w.width(panel));
        if (input.adapters) input.adapters->expand(panel, y + panel * PANEL, w.outputs);
    });
}

void quantize_rows_for(const Matrix& w, const float* x, int64_t stride, int64_t rows, QuantizedRows& quantized) {
    if (!w.quantized()) return;
    quantized.reset(rows, w.inputs, w.activation_group());
    at::parallel_for(0, rows, ROWS_PER_THREAD, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) quantized.set(row, x + row * stride);
    });
}

void matmul(const Matrix& w, const at::Tensor& x, const std::optional<at::Tensor>& bias, at::Tensor& y) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(1) == 1 && y.is_contiguous(),
                "x must be float32, y contiguous");
    TORCH_CHECK(w.inputs == x.size(1), "the weight is for ", w.inputs, " inputs");
    TORCH_CHECK(y.size(0) == x.size(0), "y must have a row for each row of x");
    TORCH_CHECK(!bias || (bias->numel() == w.outputs && bias->is_contiguous()), "a number for each output");
    static thread_local QuantizedRows quantized;  // keeps its memory
    const float *x_data = x.const_data_ptr<float>(), *bias_data = bias ? bias->const_data_ptr<float>() : nullptr;
    float* y_data = y.mutable_data_ptr<float>();
    for_even_blocks(x.size(0), MAX_BLOCK_ROWS, [&](int64_t first, int64_t count) {
        const float* block = x_data + first * x.stride(0);
        quantize_rows_for(w, block, x.stride(0), count, quantized);
        matmul(w, {block, x.stride(0), count, &quantized}, bias_data, y_data + first * w.outputs);
    });
}

}  // namespace quire
