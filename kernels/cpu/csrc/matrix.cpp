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

void multiply(const Matrix& w, const float* x, int64_t stride, int64_t rows, const float* bias, float* y) {
    static thread_local QuantizedRows quantized;  // keeps its memory
    QuantizedRows& mine = quantized;
    over_blocks(rows, BLOCK, [&](int64_t first, int64_t count) {
        const float* block = x + first * stride;
        if (w.quantized()) {
            mine.reset(count, w.inputs);
            at::parallel_for(0, count, 4, [&](int64_t from, int64_t to) {
                for (int64_t row = from; row < to; row++) mine.set(row, block + row * stride, w.inputs);
            });
        }
        multiply(w, {block, stride, count, &mine}, bias, y + first * w.outputs);
    });
}

}  // namespace quire
