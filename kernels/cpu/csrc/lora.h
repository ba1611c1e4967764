// Adapters (LoRA) of a linear operation: y += B A x, for rows that use one. lora.cpp has the kernels.
//
// Each slot of a stack holds one adapter. The outputs are in parts (of queries, keys and values, say), each with an A
// and a B of its own, whose ranks may differ.
//
//     a (slot, panel, inputs, 16)     the parts * rank outputs of A, in panels of 16
//     b (slot, panel, rank, 32)       the outputs of B in the panels of the operation's own weight
//     ranks (slot, part)              the numbers of a part that are used; 0: the adapter leaves the part alone
//
// A row's result is one chain of fused multiply-adds for each output of A, then one for each output of B; it does not
// depend on the other rows, on the number of threads, or on the rank of the stack.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace quire {

// Consecutive rows that use the adapter in `slot`.
struct LoraSegment {
    int64_t slot, first, count;
};

struct LoraStack {
    at::Tensor a, b, ranks;
    std::vector<int64_t> part_ends;  // the outputs up to the end of each part
    int64_t rank;

    // Raises c10::Error for tensors that don't fit each other.
    LoraStack(at::Tensor a, at::Tensor b, at::Tensor ranks, at::IntArrayRef part_outputs);

    int64_t parts() const { return int64_t(part_ends.size()); }
    int64_t inputs() const { return a.size(2); }
    int64_t outputs() const { return part_ends.back(); }
    const int32_t* ranks_of(int64_t slot) const { return ranks.const_data_ptr<int32_t>() + slot * parts(); }
};

// Returns the segments of `slots` (N) and `offsets` (N + 1) within the rows first..first+count-1, counted from `first`.
// Raises c10::Error for slots that the `num_slots` of a stack lack.
std::vector<LoraSegment> segments_within(const at::Tensor& slots, const at::Tensor& offsets, int64_t num_slots,
                                         int64_t first, int64_t count);

// Computes shrunk (rows, parts * rank) = x Aᵀ for the rows of `segments`, and leaves the others alone.
void lora_shrink(const LoraStack& stack, const std::vector<LoraSegment>& segments, const float* x, int64_t stride,
                 float* shrunk);

// Adds shrunk Bᵀ to the outputs of one panel, for the rows of `segments`, in the calling thread. `y` is the panel's
// first output in row 0, and `stride` the distance between rows.
void lora_expand_panel(const LoraStack& stack, const std::vector<LoraSegment>& segments, const float* shrunk,
                       int64_t panel, float* y, int64_t stride);

// The rows of a block that use adapters, between the two halves of an operation.
class LoraRows {
  public:
    std::vector<LoraSegment> segments;

    // Computes the first half for x (rows, inputs), of `rows` rows.
    void shrink(const LoraStack& stack, const float* x, int64_t stride, int64_t rows);

    void expand(int64_t panel, float* y, int64_t stride) const {
        lora_expand_panel(*stack_, segments, shrunk_.data(), panel, y, stride);
    }

  private:
    const LoraStack* stack_ = nullptr;
    std::vector<float> shrunk_;
};

}  // namespace quire
