// Operations on one row of logits: its maximum, its likeliest tokens, and sampling one token. kernels/reference defines
// the order of the filters, the rules for ties (sampling.py) and the noise (gumbel.py).
//
// A row is read once or twice, sixteen logits at a time, to collect candidates: the few hundred tokens within 8 nats of
// the likeliest. All other work is on candidates. If they are not enough, a lower threshold collects more.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace quire {

inline constexpr float INF = std::numeric_limits<float>::infinity();
inline constexpr float REACH = 8;           // nats below the likeliest within which each token has its own noise
inline constexpr int64_t TAIL = 1LL << 31;  // the token id whose noise all other tokens share, at level 0
// Thresholds, relative to the likeliest token, that are tried if the candidates above -REACH are not enough.
inline constexpr std::array<float, 8> THRESHOLDS = {-9, -10, -11, -12, -14, -16, -24, -INF};

struct Candidate {
    float z;
    int32_t id;
};

// Orders candidates: the likelier first; of equal ones, the one with the lower id.
inline bool is_likelier(const Candidate& a, const Candidate& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

// A row of `count` logits. Those whose bit in `mask` is 0 read as -inf; without a mask all are as they are.
struct Logits {
    const float* x;
    int64_t count;
    const int32_t* mask = nullptr;  // bit i of word w belongs to token 32 w + i

    float operator[](int64_t id) const { return !mask || (mask[id / 32] >> (id % 32) & 1) ? x[id] : -INF; }
    // Returns sixteen logits. The first id is a multiple of sixteen.
    F32x16 load(int64_t first) const {
        F32x16 values = F32x16::load(x + first);
        return mask ? values.keep_bits(uint32_t(mask[first / 32]) >> (first % 32), -INF) : values;
    }
};

// Calls f(first id, sixteen values) for each vector of a row. The last one is padded with -inf.
template <class F>
void for_each_logits(Logits row, F&& f) {
    int64_t i = 0;
    for (; i + 16 <= row.count; i += 16) f(i, row.load(i));
    if (i == row.count) return;
    float lanes[16];
    std::fill(lanes, lanes + 16, -INF);
    for (int64_t id = i; id < row.count; id++) lanes[id - i] = row[id];
    f(i, F32x16::load(lanes));
}

// A float64 sum of float32 vectors. Each lane has its own sum, so that the order is fixed.
struct DoubleSum {
    std::array<double, 16> lanes{};
    void add(F32x16 x) {
        float values[16];
        x.store(values);
        for (int i = 0; i < 16; i++) lanes[i] += values[i];
    }
    double value() const {
        double sum = 0;
        for (double lane : lanes) sum += lane;
        return sum;
    }
};

// Returns the maximum of a row, or NaN if it has one.
inline float row_max(Logits row) {
    F32x16 max_lanes = F32x16::set(-INF);
    uint32_t nan = 0;
    for_each_logits(row, [&](int64_t, F32x16 value) {
        nan |= value.nan_lanes();
        max_lanes = max(value, max_lanes);  // in this order of arguments NaN is ignored
    });
    return nan ? std::nanf("") : reduce_max(max_lanes);
}

// Returns the lowest id of the maximum. NaN counts as the maximum.
inline int64_t argmax(Logits row) {
    float maximum = row_max(row);
    bool is_nan = std::isnan(maximum);
    int64_t i = 0;
    for (; i + 16 <= row.count; i += 16)
        if (uint32_t lanes = is_nan ? row.load(i).nan_lanes() : row.load(i).lanes_equal(maximum))
            return i + __builtin_ctz(lanes);
    while (is_nan ? !std::isnan(row[i]) : row[i] != maximum) i++;
    return i;
}

// The noise of a row's tokens: the first word of Philox4x32-10 with the counter (token, position, sample, 0).
struct Noise {
    uint32_t key0, key1, sample, position;

    Noise(int64_t seed, int64_t sample, int64_t position)
        : key0(uint32_t(seed)), key1(uint32_t(uint64_t(seed) >> 32)), sample(uint32_t(sample)),
          position(uint32_t(position)) {}

    uint32_t word(uint32_t token) const {
        uint32_t c0 = token, c1 = position, c2 = sample, c3 = 0, k0 = key0, k1 = key1;
        for (int round = 0; round < 10; round++) {
            uint64_t even = uint64_t(c0) * 0xD2511F53u, odd = uint64_t(c2) * 0xCD9E8D57u;
            c0 = uint32_t(odd >> 32) ^ c1 ^ k0, c1 = uint32_t(odd);
            c2 = uint32_t(even >> 32) ^ c3 ^ k1, c3 = uint32_t(even);
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        return c0;
    }
    static double gumbel(uint32_t word) { return -std::log(-std::log((double(word >> 9) + 0.5) * 0x1p-23)); }
    double token_noise(int64_t token) const { return gumbel(word(uint32_t(token))); }
};

// Upper bounds of the noise, by the first six bits of its word: most tokens cannot win, and need no logarithm.
inline const std::array<double, 64> MAX_NOISE = [] {
    std::array<double, 64> bounds;
    for (uint32_t i = 0; i < 64; i++) bounds[i] = Noise::gumbel((i << 26) | 0x3ffffff) + 1e-9;
    return bounds;
}();

// Samples tokens from one row after the other. Each thread has one, and reuses its memory.
class RowSampler {
  public:
    explicit RowSampler(int64_t vocab) : vocab_(vocab) {}

    int64_t draw(Logits row, float temperature, int64_t top_k, float top_p, float min_p, const Noise& noise) {
        float maximum = row_max(row);
        if (!std::isfinite(maximum)) return vocab_ - 1;  // without a distribution, any id will do
        min_z_ = float(std::log(double(min_p)));
        scale(row, maximum, temperature);
        bool has_top_k = top_k > 0 && top_k < vocab_, has_top_p = top_p < 1;
        if (has_top_k || has_top_p) {
            Threshold too_high = collect_enough(has_top_k ? top_k : 0, has_top_p ? double(top_p) * total_mass_ : 0);
            if (has_top_k) {
                keep_count(top_k);
                if (has_top_p) keep_mass(top_p * mass(0, candidates_.size()), {INF, 0, 0});
            } else {
                keep_mass(top_p * total_mass_, too_high);
            }
            return draw_candidate(noise, 0, 0);
        }
        collect(-REACH);
        return draw_candidate(noise, 0, tail_mass_);
    }

    // Returns the k largest logits of a row, best first. `maximum` is the row's.
    const std::vector<Candidate>& top_k(Logits row, float maximum, int64_t k) {
        for (float threshold : {-REACH, -2 * REACH, -INF}) {
            if (!std::isfinite(maximum)) threshold = -INF;
            float min_logit = threshold == -INF ? -INF : maximum + threshold;
            candidates_.clear();
            for_each_logits(row, [&](int64_t first, F32x16 value) {
                uint32_t lanes = threshold == -INF ? 0xffff : value.lanes_at_least(min_logit);
                for (; lanes; lanes &= lanes - 1) {
                    int64_t id = first + __builtin_ctz(lanes);
                    if (id < vocab_) candidates_.push_back({std::isnan(row[id]) ? INF : row[id], int32_t(id)});
                }
            });
            if (int64_t(candidates_.size()) >= k) break;
        }
        keep_count(k);
        std::sort(candidates_.begin(), candidates_.end(), is_likelier);
        return candidates_;
    }

  private:
    // Sets z = (x - maximum) / temperature. Sums e^z over all tokens that min_p leaves, and over those below -REACH.
    void scale(Logits row, float maximum, float temperature) {
        z_.resize(vocab_ + 16);
        F32x16 shift = F32x16::set(maximum), divisor = F32x16::set(temperature);
        DoubleSum total, tail;
        for_each_logits(row, [&](int64_t first, F32x16 value) {
            if (value.lanes_equal(-INF) == 0xffff) return value.store(&z_[first]);  // most vectors of a narrow mask
            F32x16 z = (value - shift) / divisor;
            z.store(&z_[first]);
            F32x16 weight = exp(z).zero_where_below(z, min_z_);
            total.add(weight);
            tail.add(weight - weight.zero_where_below(z, -REACH));
        });
        total_mass_ = total.value(), tail_mass_ = tail.value();
    }

    // Replaces the candidates by the tokens with z >= threshold.
    void collect(float threshold) {
        float min_z = std::max({threshold, min_z_, std::numeric_limits<float>::lowest()});
        candidates_.clear();
        for_each_logits({z_.data(), vocab_}, [&](int64_t first, F32x16 z) {
            for (uint32_t lanes = z.lanes_at_least(min_z); lanes; lanes &= lanes - 1) {
                int64_t id = first + __builtin_ctz(lanes);
                candidates_.push_back({z_[id], int32_t(id)});
            }
        });
    }

    struct Threshold {
        float z;
        int64_t count;  // tokens at or above z
        double mass;    // their Σ e^z, with float32 exponentials
    };

    // Collects candidates that include the `count` likeliest tokens or, if that is 0, the likeliest tokens with the
    // mass `min_mass`, and not many more. Returns the lowest threshold that is too high.
    Threshold collect_enough(int64_t count, double min_mass) {
        auto is_enough = [&](const Threshold& threshold) {
            return count ? threshold.count >= count : threshold.mass * (1 - 1e-6) >= min_mass;
        };
        collect(-REACH);
        Threshold current{-REACH, int64_t(candidates_.size()), total_mass_ - tail_mass_}, too_high{INF, 0, 0};
        if (is_enough(current)) return too_high;
        for (const Threshold& threshold : count_candidates()) {
            too_high = current, current = threshold;
            if (is_enough(threshold)) break;
        }
        collect(current.z);
        return too_high;
    }

    std::array<Threshold, THRESHOLDS.size()> count_candidates() const {
        std::array<Threshold, THRESHOLDS.size()> thresholds;
        std::array<DoubleSum, THRESHOLDS.size()> masses;
        for (size_t i = 0; i < THRESHOLDS.size(); i++) thresholds[i] = {THRESHOLDS[i], 0, 0};
        for_each_logits({z_.data(), vocab_}, [&](int64_t, F32x16 z) {
            F32x16 weight = exp(z).zero_where_below(z, min_z_);
            for (size_t i = 0; i < THRESHOLDS.size(); i++) {
                thresholds[i].count += __builtin_popcount(z.lanes_at_least(std::max(THRESHOLDS[i], min_z_)));
                masses[i].add(weight.zero_where_below(z, THRESHOLDS[i]));
            }
        });
        for (size_t i = 0; i < THRESHOLDS.size(); i++) thresholds[i].mass = masses[i].value();
        return thresholds;
    }

    // Returns Σ e^z over the candidates [from, to).
    double mass(size_t from, size_t to) const {
        double sum = 0;
        for (size_t i = from; i < to; i++) sum += std::exp(double(candidates_[i].z));
        return sum;
    }

    void keep_count(size_t count) {
        if (count >= candidates_.size()) return;
        std::nth_element(candidates_.begin(), candidates_.begin() + count, candidates_.end(), is_likelier);
        candidates_.resize(count);
    }

    // Keeps the smallest set of the likeliest candidates with the mass `min_mass`, at least one. Those above `too_high`
    // are not enough; bisection finds which others are needed.
    void keep_mass(double min_mass, const Threshold& too_high) {
        auto first = std::partition(candidates_.begin(), candidates_.end(),
                                    [&](const Candidate& candidate) { return candidate.z >= too_high.z; });
        size_t from = first - candidates_.begin(), to = candidates_.size();
        double kept = too_high.mass;
        while (to - from > 16) {
            size_t middle = from + (to - from) / 2;
            auto begin = candidates_.begin();
            std::nth_element(begin + from, begin + middle, begin + to, is_likelier);
            double upper = mass(from, middle);
            if (kept + upper >= min_mass)
                to = middle;
            else
                from = middle, kept += upper;
        }
        std::sort(candidates_.begin() + from, candidates_.begin() + to, is_likelier);
        for (; from < to && (from == 0 || kept < min_mass); from++) kept += std::exp(double(candidates_[from].z));
        candidates_.resize(from);
    }

    // Returns the best candidate after noise is added. The candidates below -REACH, and all tokens that are not
    // candidates (of mass `other_mass`), compete as one token, the tail. If the tail wins, one of its tokens is drawn
    // in the same way.
    int64_t draw_candidate(const Noise& noise, int64_t level, double other_mass) {
        bool has_all = other_mass == 0;
        while (true) {
            double best = -std::numeric_limits<double>::infinity(), tail = other_mass;
            int64_t winner = vocab_ - 1;
            for (const Candidate& candidate : candidates_) {
                if (candidate.z < -REACH) {
                    tail += std::exp(candidate.z);
                    continue;
                }
                uint32_t word = noise.word(uint32_t(candidate.id));
                if (candidate.z + MAX_NOISE[word >> 26] < best) continue;
                double score = candidate.z + Noise::gumbel(word);
                if (score > best || (score == best && candidate.id < winner)) best = score, winner = candidate.id;
            }
            if (!(tail > 0) || !(std::log(tail) + noise.token_noise(TAIL + level) > best)) return winner;
            if (!has_all) collect(-INF);
            has_all = true, other_mass = 0, level++;
            keep_tail();
        }
    }

    // Keeps the candidates below -REACH, shifted so that the likeliest is at 0.
    void keep_tail() {
        std::erase_if(candidates_, [](const Candidate& candidate) { return candidate.z >= -REACH; });
        float maximum = -INF;
        for (const Candidate& candidate : candidates_) maximum = std::max(maximum, candidate.z);
        for (Candidate& candidate : candidates_) candidate.z -= maximum;
    }

    int64_t vocab_;
    float min_z_ = -INF;  // log(min_p)
    double total_mass_ = 0, tail_mass_ = 0;
    std::vector<float> z_;
    std::vector<Candidate> candidates_;
};

}  // namespace quire
