// The quants of a group and a panel, on their way from a checkpoint into a record of quantized_linear.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "matrix.h"

namespace quire {

constexpr int QUADS = QUANT_GROUP_SIZE / 4;

// The quants of a group and a panel, a byte each: word (s, lane) has those of the inputs 4 s .. 4 s + 3.
using Tile = uint32_t[QUADS][PANEL];

// Outputs of a part which lie in one panel: `count` of them, from `first` on, in the lanes from `lane` on.
struct Lanes {
    int64_t first;
    int lane, count;
};

inline uint32_t word_at(const uint8_t* bytes) {
    uint32_t word;
    std::memcpy(&word, bytes, 4);
    return word;
}

// Returns the bytes that the quants of a record take, and those of all of it.
constexpr int quant_bytes(int64_t bits) { return PANEL * QUANT_GROUP_SIZE * int(bits) / 8; }
constexpr int record_bytes(int64_t bits, bool has_mins) { return quant_bytes(bits) + PANEL * (has_mins ? 4 : 2); }

inline void store(const Tile& tile, int bits, const Lanes& lanes, uint8_t* record) {
    for (int s = 0; s < QUADS * bits / 8; s++)
        for (int lane = lanes.lane; lane < lanes.lane + lanes.count; lane++) {
            uint32_t word = bits == 8 ? tile[s][lane] : tile[s][lane] | tile[s + QUADS / 2][lane] << 4;
            std::memcpy(record + (s * PANEL + lane) * 4, &word, 4);
        }
}

}  // namespace quire
