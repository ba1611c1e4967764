// One row of logits: its largest, its candidates, its draw. The order of the filters and the rules for ties stand with
// the references in kernels/reference (sample, gumbel, top_k, top_p, min_p, philox).
//
// Nothing is sorted but what decides: a row is read once or twice in vectors, which leaves the few hundred tokens that
// are within e^-8 of the likeliest, and the rest happens among those. Where they do not suffice, the net is cast wider.
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
inline constexpr float REACH = 8;            // nats below the likeliest, within which each token has noise of its own
inline constexpr int64_t TAIL = 1LL << 31;   // the token whose noise all others of level 0 have together
inline constexpr std::array<float, 8> NETS = {-9, -10, -11, -12, -14, -16, -24, -INF};  // how far below the likeliest
                                                                                        // one looks if that is not enough

struct Entry {
    float z;
    int32_t id;
};

// The likelier first, of equals the one with the lower id.
inline bool before(const Entry& a, const Entry& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

// Calls f(first id, sixteen values); what the last vector lacks is -inf.
template <class F>
void over(const float* x, int64_t count, F&& f) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) f(i, F32x16::load(x + i));
    if (i == count) return;
    float lanes[16];
    std::fill(std::copy(x + i, x + count, lanes), lanes + 16, -INF);
    f(i, F32x16::load(lanes));
}

// A float64 sum of float32 lanes; each lane has its own, so that the order is fixed.
struct Total {
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

// The largest of a row. NaN, if there is one.
inline float peak(const float* x, int64_t count) {
    F32x16 largest_lanes = F32x16::set(-INF);
    uint32_t nan = 0;
    over(x, count, [&](int64_t, F32x16 value) {
        nan |= value.nan_lanes();
        largest_lanes = max(value, largest_lanes);  // in this order NaN is passed over
    });
    return nan ? std::nanf("") : largest(largest_lanes);
}

// The lowest id of the largest; NaN counts as the largest.
inline int64_t argmax(const float* x, int64_t count) {
    float most = peak(x, count);
    if (std::isnan(most)) return std::find_if(x, x + count, [](float v) { return std::isnan(v); }) - x;
    for (int64_t i = 0; i + 16 <= count; i += 16)
        if (uint32_t found = F32x16::load(x + i).lanes_equal(most)) return i + __builtin_ctz(found);
    return std::find(x + count / 16 * 16, x + count, most) - x;
}

// Philox4x32-10 with the counter (token, position, sample, 0); the first word.
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
    double of(int64_t token) const { return gumbel(word(uint32_t(token))); }
};

// The noise of a word is at most that of the last word with the same six bits in front: most tokens are seen to have
// lost without a logarithm.
inline const std::array<double, 64> MOST = [] {
    std::array<double, 64> most;
    for (uint32_t i = 0; i < 64; i++) most[i] = Noise::gumbel((i << 26) | 0x3ffffff) + 1e-9;
    return most;
}();

// One row's way from logits to a token. Made once a thread, for its memory.
class Row {
  public:
    explicit Row(int64_t vocab) : vocab_(vocab) {}

    int64_t draw(const float* x, float temperature, int64_t top_k, float top_p, float min_p, const Noise& noise) {
        float most = peak(x, vocab_);
        if (!std::isfinite(most)) return vocab_ - 1;  // no distribution; what is given must still be an id
        floor_ = float(std::log(double(min_p)));
        scale(x, most, temperature);
        bool by_count = top_k > 0 && top_k < vocab_, by_mass = top_p < 1;
        if (by_count || by_mass) {
            Net above = cast_for(by_count ? top_k : 0, by_mass ? double(top_p) * total_ : 0);
            if (by_count) {
                keep_count(top_k);
                if (by_mass) keep_mass(top_p * mass(0, list_.size()), {INF, 0, 0});
            } else {
                keep_mass(top_p * total_, above);
            }
            return among(noise, 0, 0);
        }
        cast(-REACH);
        return among(noise, 0, tail_);
    }

    // The k best of x itself, best first.
    const std::vector<Entry>& best(const float* x, float most, int64_t k) {
        for (float net : {-REACH, -2 * REACH, -INF}) {
            if (!std::isfinite(most)) net = -INF;
            float least = net == -INF ? -INF : most + net;
            list_.clear();
            over(x, vocab_, [&](int64_t first, F32x16 value) {
                uint32_t lanes = net == -INF ? 0xffff : value.lanes_at_least(least);
                for (; lanes; lanes &= lanes - 1) {
                    int64_t id = first + __builtin_ctz(lanes);
                    if (id < vocab_) list_.push_back({std::isnan(x[id]) ? INF : x[id], int32_t(id)});
                }
            });
            if (int64_t(list_.size()) >= k) break;
        }
        keep_count(k);
        std::sort(list_.begin(), list_.end(), before);
        return list_;
    }

  private:
    // z = (x - most) / temperature, and the sums of e^z: of all that min_p leaves, and of those beyond the reach.
    void scale(const float* x, float most, float temperature) {
        z_.resize(vocab_ + 16);
        F32x16 shift = F32x16::set(most), divisor = F32x16::set(temperature);
        Total all, near;
        over(x, vocab_, [&](int64_t first, F32x16 value) {
            F32x16 z = (value - shift) / divisor;
            z.store(&z_[first]);
            F32x16 weight = exp(z).zero_where_below(z, floor_);
            F32x16 close = weight.zero_where_below(z, -REACH);
            all.add(weight);
            near.add(weight - close);
        });
        total_ = all.value(), tail_ = near.value();
    }

    // Makes a list of the tokens down to `net`.
    void cast(float net) {
        float least = std::max({net, floor_, std::numeric_limits<float>::lowest()});
        list_.clear();
        over(z_.data(), vocab_, [&](int64_t first, F32x16 z) {
            for (uint32_t lanes = z.lanes_at_least(least); lanes; lanes &= lanes - 1) {
                int64_t id = first + __builtin_ctz(lanes);
                list_.push_back({z_[id], int32_t(id)});
            }
        });
    }

    // The tokens from some z upwards.
    struct Net {
        float least;
        int64_t count;
        double mass;  // with float32 exponentials
    };

    // Makes a list that has the `count` likeliest tokens, or if that is 0 those that weigh `wanted`, and not many more.
    // Returns the widest net that has too few of them.
    Net cast_for(int64_t count, double wanted) {
        auto enough = [&](const Net& net) { return count ? net.count >= count : net.mass * (1 - 1e-6) >= wanted; };
        cast(-REACH);
        Net below{-REACH, int64_t(list_.size()), total_ - tail_}, above{INF, 0, 0};
        if (enough(below)) return above;
        for (const Net& net : weigh()) {
            above = below, below = net;
            if (enough(net)) break;
        }
        cast(below.least);
        return above;
    }

    std::array<Net, NETS.size()> weigh() const {
        std::array<Net, NETS.size()> nets;
        std::array<Total, NETS.size()> masses;
        for (size_t i = 0; i < NETS.size(); i++) nets[i] = {NETS[i], 0, 0};
        over(z_.data(), vocab_, [&](int64_t, F32x16 z) {
            F32x16 weight = exp(z).zero_where_below(z, floor_);
            for (size_t i = 0; i < NETS.size(); i++) {
                nets[i].count += __builtin_popcount(z.lanes_at_least(std::max(NETS[i], floor_)));
                masses[i].add(weight.zero_where_below(z, NETS[i]));
            }
        });
        for (size_t i = 0; i < NETS.size(); i++) nets[i].mass = masses[i].value();
        return nets;
    }

    double mass(size_t from, size_t to) const {
        double sum = 0;
        for (size_t i = from; i < to; i++) sum += std::exp(double(list_[i].z));
        return sum;
    }

    void keep_count(size_t count) {
        if (count >= list_.size()) return;
        std::nth_element(list_.begin(), list_.begin() + count, list_.end(), before);
        list_.resize(count);
    }

    // Keeps the fewest of the likeliest that weigh `wanted`, and one at least. Those of `above` do not suffice; in which
    // half of the rest the last one is, is found again and again.
    void keep_mass(double wanted, const Net& above) {
        auto first = std::partition(list_.begin(), list_.end(), [&](const Entry& e) { return e.z >= above.least; });
        size_t from = first - list_.begin(), to = list_.size();
        double kept = above.mass;
        while (to - from > 16) {
            size_t middle = from + (to - from) / 2;
            std::nth_element(list_.begin() + from, list_.begin() + middle, list_.begin() + to, before);
            double upper = mass(from, middle);
            if (kept + upper >= wanted)
                to = middle;
            else
                from = middle, kept += upper;
        }
        std::sort(list_.begin() + from, list_.begin() + to, before);
        for (; from < to && (from == 0 || kept < wanted); from++) kept += std::exp(double(list_[from].z));
        list_.resize(from);
    }

    // The best of the list after noise. Those beyond the reach, and `beyond`, the weight of what is not in the list,
    // take part as one; if that wins, one of them is drawn in the same way.
    int64_t among(const Noise& noise, int64_t level, double beyond) {
        bool listed = beyond == 0;
        while (true) {
            double best = -std::numeric_limits<double>::infinity(), tail = beyond;
            int64_t winner = vocab_ - 1;
            for (const Entry& entry : list_) {
                if (entry.z < -REACH) {
                    tail += std::exp(entry.z);
                    continue;
                }
                uint32_t word = noise.word(uint32_t(entry.id));
                if (entry.z + MOST[word >> 26] < best) continue;
                double score = entry.z + Noise::gumbel(word);
                if (score > best || (score == best && entry.id < winner)) best = score, winner = entry.id;
            }
            if (!(tail > 0) || !(std::log(tail) + noise.of(TAIL + level) > best)) return winner;
            if (!listed) cast(-INF);
            listed = true, beyond = 0, level++;
            descend();
        }
    }

    // Leaves what lies beyond the reach, its likeliest moved to 0.
    void descend() {
        std::erase_if(list_, [](const Entry& entry) { return entry.z >= -REACH; });
        float most = -INF;
        for (const Entry& entry : list_) most = std::max(most, entry.z);
        for (Entry& entry : list_) entry.z -= most;
    }

    int64_t vocab_;
    float floor_ = -INF;  // min_p's
    double total_ = 0, tail_ = 0;
    std::vector<float> z_;
    std::vector<Entry> list_;
};

}  // namespace quire
