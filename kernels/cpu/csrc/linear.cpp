// y = x Wᵀ + b for weights in float32, bfloat16 or float16, and x, b, y in float32.
//
// Weights are packed into panels of 32 outputs, (panel, in, 32), zero-filled at the end. An output is one chain of fused
// multiply-adds over the inputs in order, whatever the number of rows: threads and tiles divide outputs and rows only.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "dtypes.h"
#include "simd.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int PANEL = 32;

#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 24 accumulators of 32 registers
#else
constexpr int ROWS = 2;
#endif

struct Rows {
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
};

// N rows times one panel, of which `width` outputs are real.
template <int N, class W>
void multiply(const Rows& rows, const W* panel, int64_t inputs, const float* bias, int width) {
    F32x16 sums[N][2];
    for (auto& s : sums) s[0] = s[1] = F32x16::zero();
    for (int64_t k = 0; k < inputs; k++) {
        F32x16 left = F32x16::load(panel + k * PANEL), right = F32x16::load(panel + k * PANEL + 16);
        for (int n = 0; n < N; n++) {
            F32x16 x = F32x16::set(rows.x[n * rows.x_stride + k]);
            sums[n][0] = fma(x, left, sums[n][0]);
            sums[n][1] = fma(x, right, sums[n][1]);
        }
    }
    for (int n = 0; n < N; n++) write_outputs(sums[n], rows.y + n * rows.y_stride, bias, width);
}

template <class W>
void run(const at::Tensor& x, const W* packed, const float* bias, at::Tensor& y) {
    int64_t count = x.size(0), inputs = x.size(1), outputs = y.size(1);
    const float* from = x.const_data_ptr<float>();
    float* to = y.mutable_data_ptr<float>();
    over_panels(count, (outputs + PANEL - 1) / PANEL, [&](int64_t panel, int64_t first, int64_t last) {
        const W* weights = packed + panel * inputs * PANEL;
        const float* b = bias ? bias + panel * PANEL : nullptr;
        int width = std::min<int64_t>(PANEL, outputs - panel * PANEL);
        in_even_groups<ROWS>(last - first, [&](auto n, int64_t at) {
            Rows rows{from + (first + at) * x.stride(0), x.stride(0), to + (first + at) * outputs + panel * PANEL, outputs};
            multiply<decltype(n)::value>(rows, weights, inputs, b, width);
        });
    });
}

at::Tensor pack_linear(const at::Tensor& weight) {
    int64_t outputs = weight.size(0), inputs = weight.size(1), panels = (outputs + PANEL - 1) / PANEL;
    at::Tensor padded = weight;
    if (panels * PANEL != outputs) {
        padded = weight.new_zeros({panels * PANEL, inputs});
        padded.narrow(0, 0, outputs).copy_(weight);
    }
    return padded.view({panels, PANEL, inputs}).transpose(1, 2).contiguous();
}

void linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, at::Tensor& y) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(1) == 1 && y.is_contiguous(), "x must be float32, y contiguous");
    TORCH_CHECK(packed.is_contiguous() && packed.size(1) == x.size(1), "the weight is for ", packed.size(1), " inputs");
    const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
    for_dtype(packed, [&](auto one) { run(x, data<decltype(one)>(packed), b, y); });
}

// y[t] = the weight's row ids[t], so that a token table that is also the output layer need not be there twice.
void packed_rows(const at::Tensor& packed, const at::Tensor& ids, at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    int64_t inputs = packed.size(1);
    const int64_t* id = ids.const_data_ptr<int64_t>();
    float* to = y.mutable_data_ptr<float>();
    for_dtype(packed, [&](auto one) {
        const auto* weights = data<decltype(one)>(packed);
        at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t last) {
            for (int64_t t = from; t < last; t++)
                for (int64_t k = 0; k < inputs; k++)
                    to[t * inputs + k] = widen(weights[(id[t] / PANEL * inputs + k) * PANEL + id[t] % PANEL]);
        });
    });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("pack_linear(Tensor weight) -> Tensor");
    m.def("packed_rows(Tensor packed, Tensor ids, Tensor(a!) y) -> ()");
    m.def("linear(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("pack_linear", pack_linear);
    m.impl("packed_rows", packed_rows);
    m.impl("linear", linear);
}

}  // namespace quire
