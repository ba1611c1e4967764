// Rows of activations quantised to eight bits, for GEMMs with quantised weights.
//
//     x[m, k] ≈ scale[m, g] * q[m, k]          q in -127..127, scale = max |x[m, group]| / 127, g = k / group size
//
// If one number of a group is far larger than the others, eight bits represent the others badly. Such a group has a
// second term, the remainder of the first, with a scale that is 128 times smaller.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace quire {

constexpr int MAX_ACTIVATION_GROUP = 128;  // inputs
constexpr int PART = 32;                   // inputs whose quants are summed up; sizes of groups are multiples of it

// A row's term of one group, like a block of GGML's Q8_1. A GEMM multiplies `shift` by the weight's min, or `total` by
// its zero point.
struct Term {
    float scale, shift;  // shift = scale * total
    int32_t total, row;  // total = Σ q
};

// The terms of one group, contiguous: the first terms of all rows in order, then the second terms in any order.
struct Terms {
    const int8_t* q;              // `size` for each term
    const int32_t* part_totals;   // Σ q of each part of 32 inputs, size / 32 for each term
    const Term* term;
    int count, size;
};

// How large the numbers of a vector are.
struct Magnitude {
    float max_abs, square_sum;  // both are NaN if a number is
};

// The magnitude of a vector that is read in pieces.
class MagnitudeSum {
public:
    // Adds x (count), a multiple of 16.
    void add(const float* x, int64_t count) {
        F32x16 maxima = maxima_, squares = squares_;
        for (int64_t i = 0; i < count; i += 16) {
            F32x16 v = F32x16::load(x + i);
            maxima = max(v.abs(), maxima);
            squares = fma(v, v, squares);
        }
        maxima_ = maxima;
        squares_ = squares;
    }

    Magnitude total() const {
        float square_sum = reduce_sum(squares_);
        return {std::isnan(square_sum) ? square_sum : reduce_max(maxima_), square_sum};  // `max` may have lost a NaN
    }

private:
    F32x16 maxima_ = F32x16::zero(), squares_ = F32x16::zero();
};

// Returns the magnitude of x (count), a multiple of 16.
inline Magnitude magnitude_of(const float* x, int64_t count) {
    MagnitudeSum sum;
    sum.add(x, count);
    return sum.total();
}

class QuantizedRows {
public:
    // Drops all terms, and allocates memory for x (rows, inputs). `group_size` is a multiple of 32, as `inputs` is; the
    // last group may be smaller.
    void reset(int64_t rows, int64_t inputs, int group_size) {
        inputs_ = inputs;
        group_size_ = group_size;
        // for even numbers of rows no power of two, which would map groups to the same lines of a cache
        capacity_ = 2 * rows + 2;
        if (q_.size() < size_t(inputs * capacity_)) q_.resize(inputs * capacity_);
        if (part_totals_.size() < size_t(inputs / PART * capacity_)) part_totals_.resize(inputs / PART * capacity_);
        if (terms_.size() < size_t(groups() * capacity_)) terms_.resize(groups() * capacity_);
        counts_.assign(groups(), int32_t(rows));
    }

    int64_t groups() const { return (inputs_ + group_size_ - 1) / group_size_; }
    int size(int64_t group) const { return int(std::min<int64_t>(group_size_, inputs_ - group * group_size_)); }

    // Sets the numbers x (size(group)) of a group. Each (row, group) is set once; threads may set different ones at the
    // same time.
    void set(int64_t row, int64_t group, const float* x) {
        int size = this->size(group);
        int8_t* q = &q_[group * group_size_ * capacity_];
        int32_t* part_totals = &part_totals_[group * group_size_ / PART * capacity_];
        Term* term = &terms_[group * capacity_];
        auto [max_abs, square_sum] = magnitude_of(x, size);
        float ratio = outlier_ratio(group_size_);
        auto quantize = [&](const Remainder* remainder, float scale, int64_t index) {
            float total = round(x, remainder, size, scale, q + index * size, part_totals + index * size / PART);
            term[index] = {scale, total * scale, int32_t(total), int32_t(row)};
        };
        quantize(nullptr, max_abs / 127, row);
        // a NaN needs no second term
        if (!(max_abs * max_abs * size > ratio * ratio * square_sum)) return;
        int second = std::atomic_ref<int32_t>(counts_[group]).fetch_add(1, std::memory_order_relaxed);
        Remainder first{q + row * size, term[row].scale};
        quantize(&first, term[row].scale / 128, second);
    }

    void set(int64_t row, const float* x) {
        for (int64_t g = 0; g < groups(); g++) set(row, g, x + g * group_size_);
    }

    // Returns a group's terms. Call it after all threads have set theirs.
    Terms terms(int64_t group) const {
        int64_t first = group * group_size_ * capacity_;
        return {&q_[first], &part_totals_[first / PART], &terms_[group * capacity_], counts_[group], size(group)};
    }

private:
    // The remainder of a number x after its first term, x - scale * q.
    struct Remainder {
        const int8_t* q;
        float scale;
    };

    int64_t inputs_ = 0, capacity_ = 0;  // capacity: terms for each group
    int group_size_ = 0;
    std::vector<int8_t> q_;
    std::vector<Term> terms_;
    std::vector<int32_t> part_totals_, counts_;

    // The largest number over the root mean square of a group, above which it has a second term.
    static float outlier_ratio(int group_size) { return group_size == 32 ? 5.0f : 7.0f; }

    // Sets the quants of x, or of its remainder, and their totals. Returns the total of all.
    static float round(const float* x, const Remainder* remainder, int size, float scale, int8_t* out,
                       int32_t* part_totals) {
        F32x16 factor = F32x16::set(scale >= 1e-30f ? 1 / scale : 0);  // the inverse of less might overflow
        float total = 0;
        for (int part = 0; part < size; part += PART) {
            F32x16 sum = F32x16::zero();
            for (int i = part; i < part + PART; i += 16) {
                F32x16 v = F32x16::load(x + i);
                if (remainder) v = fma(F32x16::load(remainder->q + i), F32x16::set(-remainder->scale), v);
                F32x16 rounded = (v * factor).round();
                rounded.store(out + i);
                sum = sum + rounded;
            }
            float part_total = reduce_sum(sum);  // of whole numbers, so exact
            if (!std::isfinite(part_total)) part_total = 0;  // then the scale is not finite either
            part_totals[part / PART] = int32_t(part_total);
            total += part_total;
        }
        return total;
    }
};

}  // namespace quire
