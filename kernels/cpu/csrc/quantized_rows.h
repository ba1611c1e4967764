// Rows of activations quantised to eight bits, for GEMMs with quantised weights.
//
//     x[m, k] ≈ scale[m, g] * q[m, k]          q in -127..127, scale = max |x[m, group]| / 127, g = k / 32
//
// If one number of a group is far larger than the others, eight bits represent the others badly. Such a group has a
// second term, the remainder of the first, with a scale that is 128 times smaller.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace quire {

constexpr int QUANT_GROUP_SIZE = 32;  // inputs that share a scale
constexpr float OUTLIER_RATIO = 5.0;  // largest number / root mean square of a group; above it, a second term

// A row's term of one group, like a block of GGML's Q8_1. A GEMM multiplies `shift` by the weight's min, or `total` by its zero point.
struct Term {
    float scale, shift;  // shift = scale * total
    int32_t total, row;  // total = Σ q
};

// The terms of one group, contiguous: the first terms of all rows in order, then the second terms in any order.
struct Terms {
    const int8_t* q;  // 32 for each term
    const Term* term;
    int count;
};

class QuantizedRows {
public:
    // Drops all terms, and allocates memory for x (rows, inputs).
    void reset(int64_t rows, int64_t inputs) {
        capacity_ = 2 * rows + 2;  // for even numbers of rows no power of two, which would map groups to the same lines of a cache
        int64_t groups = inputs / QUANT_GROUP_SIZE;
        if (q_.size() < size_t(groups * capacity_ * QUANT_GROUP_SIZE)) q_.resize(groups * capacity_ * QUANT_GROUP_SIZE);
        if (terms_.size() < size_t(groups * capacity_)) terms_.resize(groups * capacity_);
        counts_.assign(groups, int32_t(rows));
    }

    // Sets the 32 numbers of a group, `left` and `right` being its halves. Each (row, group) is set once; threads may set different ones at the same time.
    void set(int64_t row, int64_t group, F32x16 left, F32x16 right) {
        int8_t* q = &q_[group * capacity_ * QUANT_GROUP_SIZE];
        Term* term = &terms_[group * capacity_];
        float max_abs = reduce_max(max(left.abs(), right.abs())), squares = reduce_sum(fma(left, left, right * right));
        term[row] = quantize(left, right, max_abs / 127, q + row * QUANT_GROUP_SIZE, row);
        // a NaN needs no second term
        if (!(max_abs * max_abs * QUANT_GROUP_SIZE > OUTLIER_RATIO * OUTLIER_RATIO * squares)) return;
        int second = std::atomic_ref<int32_t>(counts_[group]).fetch_add(1, std::memory_order_relaxed);
        F32x16 scale = F32x16::set(-term[row].scale);
        left = fma(F32x16::load(q + row * QUANT_GROUP_SIZE), scale, left);
        right = fma(F32x16::load(q + row * QUANT_GROUP_SIZE + 16), scale, right);
        term[second] = quantize(left, right, term[row].scale / 128, q + second * QUANT_GROUP_SIZE, row);
    }

    void set(int64_t row, const float* x, int64_t inputs) {
        for (int64_t g = 0; g < inputs / QUANT_GROUP_SIZE; g++)
            set(row, g, F32x16::load(x + g * QUANT_GROUP_SIZE), F32x16::load(x + g * QUANT_GROUP_SIZE + 16));
    }

    // Returns a group's terms. Call it after all threads have set theirs.
    Terms terms(int64_t group) const {
        return {&q_[group * capacity_ * QUANT_GROUP_SIZE], &terms_[group * capacity_], counts_[group]};
    }

private:
    int64_t capacity_ = 0;  // terms for each group
    std::vector<int8_t> q_;
    std::vector<Term> terms_;
    std::vector<int32_t> counts_;

    static Term quantize(F32x16 left, F32x16 right, float scale, int8_t* out, int64_t row) {
        F32x16 factor = F32x16::set(scale > 0 ? 1 / scale : 0);
        left = (left * factor).round();
        right = (right * factor).round();
        left.store(out);
        right.store(out + 16);
        float total = reduce_sum(left + right);  // of whole numbers, so exact
        return {scale, total * scale, int32_t(total), int32_t(row)};
    }
};

}  // namespace quire
