// Rows of activations in eight bits, as products with weights of few bits want them.
//
//     x[m, k] ≈ scale[m, g] * q[m, k]          q in -127..127, scale = max |x[m, group]| / 127, g = k / 32
//
// Where one number of a group is far larger than the others, eight bits say little of these: such a group has a second
// term, what the first leaves over in steps that are 128 times finer.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace quire {

constexpr int GROUP = 32;
constexpr float OUTLIER = 5.0;  // a group's largest number over its root mean square, from which it has a second term

// A group of one row. The product needs Σ q times the scale, or times minus the weight's zero.
struct Term {
    float scale, shift;  // shift = scale * total
    int32_t total, row;  // total = Σ q
};

// Those of one group: first of all rows in order, then second ones in no order. They lie together.
struct Terms {
    const int8_t* q;  // 32 a term
    const Term* term;
    int count;
};

class QuantizedRows {
public:
    // Forget what is there, and be ready for (rows, inputs).
    void reset(int64_t rows, int64_t inputs) {
        places_ = 2 * rows + 2;  // no power of two: groups shall not share the same lines of a cache
        int64_t groups = inputs / GROUP;
        if (q_.size() < size_t(groups * places_ * GROUP)) q_.resize(groups * places_ * GROUP);
        if (terms_.size() < size_t(groups * places_)) terms_.resize(groups * places_);
        counts_.assign(groups, int32_t(rows));
    }

    // 32 numbers. Each (row, group) once; threads may do different ones at the same time.
    void set(int64_t row, int64_t group, F32x16 left, F32x16 right) {
        int8_t* q = &q_[group * places_ * GROUP];
        Term* term = &terms_[group * places_];
        float most = largest(max(left.abs(), right.abs())), squares = sum(fma(left, left, right * right));
        term[row] = round(left, right, most / 127, q + row * GROUP, row);
        if (!(most * most * GROUP > OUTLIER * OUTLIER * squares)) return;
        int at = std::atomic_ref<int32_t>(counts_[group]).fetch_add(1, std::memory_order_relaxed);
        F32x16 scale = F32x16::set(-term[row].scale);
        left = fma(F32x16::load(q + row * GROUP), scale, left);
        right = fma(F32x16::load(q + row * GROUP + 16), scale, right);
        term[at] = round(left, right, term[row].scale / 128, q + at * GROUP, row);
    }

    void set(int64_t row, const float* x, int64_t inputs) {
        for (int64_t g = 0; g < inputs / GROUP; g++)
            set(row, g, F32x16::load(x + g * GROUP), F32x16::load(x + g * GROUP + 16));
    }

    // To be asked for when all threads are done.
    Terms terms(int64_t group) const {
        return {&q_[group * places_ * GROUP], &terms_[group * places_], counts_[group]};
    }

private:
    int64_t places_ = 0;  // terms of a group that there is room for
    std::vector<int8_t> q_;
    std::vector<Term> terms_;
    std::vector<int32_t> counts_;

    static Term round(F32x16 left, F32x16 right, float scale, int8_t* to, int64_t row) {
        F32x16 factor = F32x16::set(scale > 0 ? 1 / scale : 0);
        left = (left * factor).round();
        right = (right * factor).round();
        left.store(to);
        right.store(to + 16);
        float total = sum(left + right);  // of whole numbers: exact
        return {scale, total * scale, int32_t(total), int32_t(row)};
    }
};

}  // namespace quire
