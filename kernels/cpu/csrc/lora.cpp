// The kernels of adapters; lora.h has their layout.
#include "lora.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "dtypes.h"
#include "matrix.h"
#include "simd.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int LANES = 16;             // outputs of A that are computed together
constexpr int64_t INPUT_TILE = 256;   // inputs of a panel that stay in the L1 cache while the rows of a task use them
constexpr int64_t ROWS_PER_TASK = 16;

#if defined(__AVX512F__)
constexpr int SHRINK_ROWS = 12, EXPAND_ROWS = 8;
#else
constexpr int SHRINK_ROWS = 4, EXPAND_ROWS = 2;
#endif

// Rows of one segment, and a panel of A.
struct ShrinkTask {
    int64_t slot, panel, first, count;
};

// sums (N, 16), of rows `sum_stride` apart, += x (N, inputs) times a tile of a panel.
template <int N, class W>
void shrink_tile(const float* x, int64_t stride, const W* panel, int64_t inputs, float* sums, int64_t sum_stride) {
    F32x16 acc[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) acc[n] = F32x16::load(sums + n * sum_stride);
    for (int64_t k = 0; k < inputs; k++) {
        F32x16 weights = F32x16::load(panel + k * LANES);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) acc[n] = fma(F32x16::set(x[n * stride + k]), weights, acc[n]);
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) acc[n].store(sums + n * sum_stride);
}

template <class W>
void shrink_rows(const W* panel, int64_t inputs, const float* x, int64_t stride, int64_t rows, float* out,
                 int64_t out_stride) {
    for (int64_t row = 0; row < rows; row++) F32x16::zero().store(out + row * out_stride);
    for (int64_t first = 0; first < inputs; first += INPUT_TILE) {
        int64_t count = std::min(INPUT_TILE, inputs - first);
        for_even_tiles<SHRINK_ROWS>(rows, [&](auto n, int64_t row) {
            shrink_tile<n>(x + row * stride + first, stride, panel + first * LANES, count, out + row * out_stride,
                           out_stride);
        });
    }
}

// y (N) += shrunk (N, rank) times the lanes from..to-1 of a panel of B.
template <int N, class W>
void expand_tile(const float* shrunk, int64_t shrunk_stride, const W* panel, int64_t rank, int from, int to, float* y,
                 int64_t stride) {
    F32x16 left[N], right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) left[n] = right[n] = F32x16::zero();
    for (int64_t r = 0; r < rank; r++) {
        F32x16 left_weights = F32x16::load(panel + r * PANEL), right_weights = F32x16::load(panel + r * PANEL + 16);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            F32x16 value = F32x16::set(shrunk[n * shrunk_stride + r]);
            left[n] = fma(value, left_weights, left[n]);
            right[n] = fma(value, right_weights, right[n]);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
        float* out = y + n * stride;
        if (from == 0 && to == PANEL) {
            (F32x16::load(out) + left[n]).store(out);
            (F32x16::load(out + 16) + right[n]).store(out + 16);
            continue;
        }
        alignas(64) float sums[PANEL];
        left[n].store(sums);
        right[n].store(sums + 16);
        for (int lane = from; lane < to; lane++) out[lane] += sums[lane];
    }
}

// Returns whether an adapter uses any of the 16 outputs of a panel of A.
bool is_used(const LoraStack& stack, int64_t slot, int64_t panel) {
    const int32_t* ranks = stack.ranks_of(slot);
    for (int64_t part = panel * LANES / stack.rank; part < stack.parts(); part++) {
        int64_t first = part * stack.rank;
        if (first >= (panel + 1) * LANES) break;
        if (first + ranks[part] > panel * LANES) return true;
    }
    return false;
}

}  // namespace

LoraStack::LoraStack(at::Tensor a_panels, at::Tensor b_panels, at::Tensor slot_ranks, at::IntArrayRef part_outputs)
    : a(std::move(a_panels)), b(std::move(b_panels)), ranks(std::move(slot_ranks)) {
    TORCH_CHECK(a.dim() == 4 && a.size(3) == LANES && a.is_contiguous(), "a (slot, panel, in, 16), contiguous");
    TORCH_CHECK(b.dim() == 4 && b.size(3) == PANEL && b.is_contiguous(), "b (slot, panel, rank, 32), contiguous");
    TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.size(0) == b.size(0), "a and b have one type and equal slots");
    int64_t outputs = 0;
    for (int64_t part : part_outputs) part_ends.push_back(outputs += part);
    rank = b.size(2);
    TORCH_CHECK(!part_ends.empty() && b.size(1) == (outputs + PANEL - 1) / PANEL, "b has the outputs of all parts");
    TORCH_CHECK(a.size(1) == (parts() * rank + LANES - 1) / LANES, "a has the outputs of all parts");
    TORCH_CHECK(ranks.scalar_type() == at::kInt && ranks.is_contiguous() && ranks.dim() == 2 &&
                    ranks.size(0) == a.size(0) && ranks.size(1) == parts(),
                "ranks (slot, part) are int32 and contiguous");
}

std::vector<LoraSegment> segments_within(const at::Tensor& slots, const at::Tensor& offsets, int64_t num_slots,
                                         int64_t first, int64_t count) {
    TORCH_CHECK(slots.scalar_type() == at::kLong && offsets.scalar_type() == at::kLong && slots.is_contiguous() &&
                    offsets.is_contiguous() && offsets.numel() == slots.numel() + 1,
                "a slot for each segment, and where they begin, in int64");
    const int64_t *slot = slots.const_data_ptr<int64_t>(), *offset = offsets.const_data_ptr<int64_t>();
    std::vector<LoraSegment> segments;
    for (int64_t n = 0; n < slots.numel(); n++) {
        TORCH_CHECK(slot[n] >= 0 && slot[n] < num_slots, "there is no adapter slot ", slot[n]);
        int64_t from = std::max(offset[n], first), to = std::min(offset[n + 1], first + count);
        if (from < to) segments.push_back({slot[n], from - first, to - from});
    }
    return segments;
}

void lora_shrink(const LoraStack& stack, const std::vector<LoraSegment>& segments, const float* x, int64_t stride,
                 float* shrunk) {
    int64_t inputs = stack.inputs(), panels = stack.a.size(1), width = panels * LANES;
    std::vector<ShrinkTask> tasks;
    for (const LoraSegment& segment : segments)
        for (int64_t panel = 0; panel < panels; panel++)
            if (is_used(stack, segment.slot, panel))
                for_even_blocks(segment.count, ROWS_PER_TASK, [&](int64_t first, int64_t count) {
                    tasks.push_back({segment.slot, panel, segment.first + first, count});
                });
    for_dtype(stack.a.scalar_type(), [&](auto tag) {
        const auto* a = static_cast<const decltype(tag)*>(stack.a.const_data_ptr());
        parallel_for_panels(int64_t(tasks.size()), [&](int64_t index) {
            const ShrinkTask& task = tasks[index];
            shrink_rows(a + (task.slot * panels + task.panel) * inputs * LANES, inputs, x + task.first * stride, stride,
                        task.count, shrunk + task.first * width + task.panel * LANES, width);
        });
    });
}

void lora_expand_panel(const LoraStack& stack, const std::vector<LoraSegment>& segments, const float* shrunk,
                       int64_t panel, float* y, int64_t stride) {
    int64_t rank = stack.rank, panels = stack.b.size(1), width = stack.a.size(1) * LANES;
    int64_t panel_end = std::min((panel + 1) * PANEL, stack.outputs());
    for_dtype(stack.b.scalar_type(), [&](auto tag) {
        const auto* b = static_cast<const decltype(tag)*>(stack.b.const_data_ptr());
        for (const LoraSegment& segment : segments) {
            const auto* weights = b + (segment.slot * panels + panel) * rank * PANEL;
            const int32_t* ranks = stack.ranks_of(segment.slot);
            int64_t part_first = 0;
            for (int64_t part = 0; part < stack.parts(); part_first = stack.part_ends[part++]) {
                int from = int(std::max(part_first, panel * PANEL) - panel * PANEL);
                int to = int(std::min(stack.part_ends[part], panel_end) - panel * PANEL);
                if (from >= to || ranks[part] == 0) continue;
                for_even_tiles<EXPAND_ROWS>(segment.count, [&](auto n, int64_t row) {
                    row += segment.first;
                    expand_tile<n>(shrunk + row * width + part * rank, width, weights, ranks[part], from, to,
                                   y + row * stride, stride);
                });
            }
        }
    });
}

void LoraRows::shrink(const LoraStack& stack, const float* x, int64_t stride, int64_t rows) {
    stack_ = &stack;
    shrunk_.resize(std::max<size_t>(shrunk_.size(), rows * stack.a.size(1) * LANES));
    lora_shrink(stack, segments, x, stride, shrunk_.data());
}

namespace {

void shrink_op(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b, const at::Tensor& ranks,
               at::IntArrayRef part_outputs, const at::Tensor& slots, const at::Tensor& offsets, at::Tensor& shrunk) {
    LoraStack stack(a, b, ranks, part_outputs);
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(1) == 1 && x.size(1) == stack.inputs(), "x (T, in) float32");
    TORCH_CHECK(shrunk.is_contiguous() && shrunk.size(0) == x.size(0) && shrunk.size(1) == a.size(1) * LANES,
                "shrunk (T, outputs of A), contiguous");
    lora_shrink(stack, segments_within(slots, offsets, a.size(0), 0, x.size(0)), x.const_data_ptr<float>(), x.stride(0),
                shrunk.mutable_data_ptr<float>());
}

void expand_op(const at::Tensor& shrunk, const at::Tensor& a, const at::Tensor& b, const at::Tensor& ranks,
               at::IntArrayRef part_outputs, const at::Tensor& slots, const at::Tensor& offsets, at::Tensor& y) {
    LoraStack stack(a, b, ranks, part_outputs);
    TORCH_CHECK(y.scalar_type() == at::kFloat && y.is_contiguous() && y.size(1) == stack.outputs(),
                "y (T, out) float32, contiguous");
    TORCH_CHECK(shrunk.scalar_type() == at::kFloat && shrunk.is_contiguous() && shrunk.size(0) == y.size(0) &&
                    shrunk.size(1) == a.size(1) * LANES,
                "shrunk (T, outputs of A), contiguous");
    std::vector<LoraSegment> segments = segments_within(slots, offsets, a.size(0), 0, y.size(0));
    float* out = y.mutable_data_ptr<float>();
    parallel_for_panels(b.size(1), [&](int64_t panel) {
        lora_expand_panel(stack, segments, shrunk.const_data_ptr<float>(), panel, out + panel * PANEL, y.size(1));
    });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "lora_shrink(Tensor x, Tensor a, Tensor b, Tensor ranks, int[] part_outputs, Tensor slots, Tensor offsets, "
        "Tensor(a!) shrunk) -> ()");
    m.def(
        "lora_expand(Tensor shrunk, Tensor a, Tensor b, Tensor ranks, int[] part_outputs, Tensor slots, Tensor offsets, "
        "Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("lora_shrink", shrink_op);
    m.impl("lora_expand", expand_op);
}

}  // namespace quire
