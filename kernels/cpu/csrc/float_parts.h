// A weight that is packed as floats, or is rounded: tensors of floats, or blocks of a GGUF file that are dequantised, whose
// outputs follow one another. They are read from where they lie, often in a mapped file.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dtypes.h"
#include "gguf_types.h"
#include "matrix.h"
#include "parts.h"

namespace quire {

constexpr int64_t NO_BLOCKS = -1;  // a tensor of floats, where other numbers are GGML's for a type of blocks

// Outputs of one tensor.
struct FloatPart {
    const char* data;
    int64_t pitch;   // bytes from an output to the next
    int64_t stride;  // numbers from an input to the next, or bytes from a block to the next
    int64_t first;   // the number of a block that is the first input
    // Reads inputs of an output, from `first` on, into x (count) in float32.
    void (*read)(const char* output, int64_t stride, int64_t first, int64_t count, float* x);
};

template <class T>
void read_floats(const char* output, int64_t stride, int64_t first, int64_t count, float* x) {
    const T* numbers = reinterpret_cast<const T*>(output) + first * stride;
    int64_t k = 0;
    for (; stride == 1 && k + 16 <= count; k += 16) F32x16::load(numbers + k).store(x + k);
    for (; k < count; k++) x[k] = widen(numbers[k * stride]);
}

// `first` and `count` are multiples of 32.
template <class Type>
void read_blocks(const char* output, int64_t stride, int64_t first, int64_t count, float* x) {
    constexpr int GROUPS = Type::VALUES / QUANT_GROUP_SIZE;  // of a block
    const uint8_t* blocks = reinterpret_cast<const uint8_t*>(output);
    int64_t group = first / QUANT_GROUP_SIZE;
    for (int64_t k = 0; k < count; k += QUANT_GROUP_SIZE, group++)
        dequantize_group<Type>(blocks + group / GROUPS * stride, int(group % GROUPS), x + k);
}

struct FloatOutput {
    const FloatPart* part;
    const char* data;

    // Reads inputs from `first` on. Of blocks, `first` and `count` are multiples of 32.
    void read(int64_t first, int64_t count, float* x) const {
        part->read(data, part->stride, part->first + first, count, x);
    }
};

// The outputs of a panel, in order.
struct FloatPanel {
    FloatOutput output[PANEL];
    int count = 0;
};

class FloatParts {
public:
    // `types` says of each tensor that it is floats (out, in), or blocks (out, n, bytes) of which type; blocks begin with
    // the group first_groups[i] of the first one. Raises c10::Error for what does not fit.
    FloatParts(at::TensorList tensors, at::IntArrayRef types, at::IntArrayRef first_groups, int64_t inputs)
        : tensors_(tensors) {
        TORCH_CHECK(!tensors.empty() && types.size() == tensors.size() && first_groups.size() == tensors.size(),
                    "a type and a first group for each part");
        for (size_t i = 0; i < tensors.size(); i++) {
            const at::Tensor& own = tensors[i];
            outputs_ += own.size(0);
            FloatPart part{static_cast<const char*>(own.const_data_ptr()),
                           own.stride(0) * int64_t(own.element_size()), own.stride(1), 0, nullptr};
            if (types[i] == NO_BLOCKS) {
                TORCH_CHECK(own.dim() == 2 && own.size(1) == inputs, "parts must have equally many inputs");
                for_dtype(own.scalar_type(), [&](auto tag) { part.read = read_floats<decltype(tag)>; });
            } else {
                with_gguf_type(types[i], [&](auto type) {
                    check_blocks<decltype(type)>(own, first_groups[i], inputs);
                    part.read = read_blocks<decltype(type)>;
                });
                part.first = first_groups[i] * QUANT_GROUP_SIZE;
            }
            parts_.push_back(part);
        }
    }

    int64_t outputs() const { return outputs_; }

    FloatPanel panel(int64_t number) const {
        FloatPanel panel;
        for_each_part(tensors_, number, [&](size_t i, int64_t first, int, int count) {
            const FloatPart& part = parts_[i];
            for (int n = 0; n < count; n++) panel.output[panel.count++] = {&part, part.data + (first + n) * part.pitch};
        });
        return panel;
    }

private:
    at::TensorList tensors_;
    std::vector<FloatPart> parts_;  // of each tensor
    int64_t outputs_ = 0;
};

}  // namespace quire
