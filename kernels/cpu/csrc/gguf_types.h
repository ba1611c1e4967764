// The types of GGUF's blocks that become groups of 32 inputs, as quantized_linear.cpp multiplies them.
//
// Each type says GGML's number for it, the values and the bytes of a block, the bits of its quants, whether groups have
// mins, and how to unpack one group of a block:
//
//     value = scale * (quant - ZERO_POINT<BITS>), or scale * quant + min
//
// Scales and mins are rounded to float16 later. Where the file has such a number, nothing is lost. Where it has a
// product of one and a small integer (the K types, IQ4_XS), the error is at most 2^-11 of the number, or 2^-25 if it is
// subnormal: with quants of 4 bits, a 128th of a step.
//
// Types of more than 4 bits get 8. Q5_0, Q5_1, Q5_K, IQ4_NL and IQ4_XS keep their grid in them. Types with numbers for
// each 16 inputs do where both halves of a group have the same ones, up to the sign; otherwise:
//
// - Q6_K and Q3_K: the scale is a 4th (Q6_K) or a 32nd (Q3_K) of that of the coarser half. Its quants, from -32 or -4 on,
//   times that, are exactly as far as 8 bits reach. So the coarser half stays as it is, and the other is off by at most
//   an 8th or a 64th of the coarser step. The largest value / 127 would have put the coarser half off its grid too.
// - Q2_K: the range of the group is divided into 255 steps, so an error is at most a 510th of it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "matrix.h"
#include "simd.h"

namespace quire {

template <int BITS>
constexpr int ZERO_POINT = 1 << (BITS - 1);

struct GgufGroup {
    alignas(32) uint8_t quants[QUANT_GROUP_SIZE];
    float scale, min;  // min: of types that have mins
};

inline float half_at(const uint8_t* bytes) {
    fp16 x;
    std::memcpy(&x.bits, bytes, 2);
    return widen(x);
}

// Sets quant i to the low half of byte i, and quant 16 + i to its high half.
inline void unpack_halves(const uint8_t* bytes, uint8_t* quants) {
    for (int i = 0; i < 16; i++) {
        quants[i] = bytes[i] & 15;
        quants[16 + i] = bytes[i] >> 4;
    }
}

// Sets quant i to the `bits` bits of byte i that are above the lowest `shift`.
inline void unpack_bits(const uint8_t* bytes, int shift, int bits, uint8_t* quants) {
    for (int i = 0; i < QUANT_GROUP_SIZE; i++) quants[i] = bytes[i] >> shift & ((1 << bits) - 1);
}

struct Q4_0 {
    static constexpr int TYPE = 2, VALUES = 32, BYTES = 18, BITS = 4;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        unpack_halves(block + 2, group.quants);
        group.scale = half_at(block);
    }
};

struct Q4_1 {
    static constexpr int TYPE = 3, VALUES = 32, BYTES = 20, BITS = 4;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        unpack_halves(block + 4, group.quants);
        group.scale = half_at(block);
        group.min = half_at(block + 2);
    }
};

// Adds 16 times bit i of `bits` to quant i.
inline void add_fifth_bits(const uint8_t* bits, uint8_t* quants) {
    for (int i = 0; i < QUANT_GROUP_SIZE; i++) quants[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}

struct Q5_0 {
    static constexpr int TYPE = 6, VALUES = 32, BYTES = 22, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        unpack_halves(block + 6, group.quants);
        add_fifth_bits(block + 2, group.quants);
        for (uint8_t& quant : group.quants) quant += ZERO_POINT<8> - ZERO_POINT<5>;
        group.scale = half_at(block);
    }
};

struct Q5_1 {
    static constexpr int TYPE = 7, VALUES = 32, BYTES = 24, BITS = 8;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        unpack_halves(block + 8, group.quants);
        add_fifth_bits(block + 4, group.quants);
        group.scale = half_at(block);
        group.min = half_at(block + 2);
    }
};

struct Q8_0 {
    static constexpr int TYPE = 8, VALUES = 32, BYTES = 34, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        for (int i = 0; i < QUANT_GROUP_SIZE; i++) group.quants[i] = block[2 + i] ^ 0x80;
        group.scale = half_at(block);
    }
};

// Sets the quants, scale and min of a group whose halves have scales and mins of their own; the quants have 2 bits.
inline void round_halves(const uint8_t* quants, const float (&scales)[2], const float (&mins)[2], GgufGroup& group) {
    float low = mins[0], high = mins[0];
    for (int half = 0; half < 2; half++)
        for (float end : {mins[half], mins[half] + 3 * scales[half]}) {
            low = std::min(low, end);
            high = std::max(high, end);
        }
    float all = scales[0] + scales[1] + mins[0] + mins[1];  // `min` and `max` may have lost a NaN
    group.scale = (high - low) / 255 + 0 * all;
    group.min = low;
    float inverse = group.scale > 0 ? 1 / group.scale : 0;
    alignas(16) int8_t numbers[QUANT_GROUP_SIZE];
    for (int half = 0; half < 2; half++) {
        F32x16 first = F32x16::set((mins[half] - low) * inverse - ZERO_POINT<8>);
        std::memcpy(numbers + half * 16, quants + half * 16, 16);
        fma(F32x16::load(numbers + half * 16), F32x16::set(scales[half] * inverse), first).store(numbers + half * 16);
    }
    for (int i = 0; i < QUANT_GROUP_SIZE; i++) group.quants[i] = uint8_t(numbers[i]) ^ 0x80;
}

// Sets the quants and the scale of a group whose halves have scales of their own. `numbers` times FACTOR are signed bytes.
template <int FACTOR>
void round_halves(int8_t (&numbers)[QUANT_GROUP_SIZE], const float (&scales)[2], GgufGroup& group) {
    bool equal = std::abs(scales[0]) == std::abs(scales[1]);
    float coarser = std::abs(scales[0]) > std::abs(scales[1]) ? scales[0] : scales[1];
    int factor = equal ? 1 : FACTOR;
    group.scale = coarser / factor;
    for (int half = 0; half < 2; half++) {
        float ratio = scales[half] / coarser;
        if (!(std::abs(ratio) <= 1)) ratio = 0;  // 0 / 0, or of no finite numbers
        (F32x16::load(numbers + half * 16) * F32x16::set(ratio * factor)).store(numbers + half * 16);
    }
    for (int i = 0; i < QUANT_GROUP_SIZE; i++) group.quants[i] = uint8_t(numbers[i]) ^ 0x80;
}

struct Q2_K {
    static constexpr int TYPE = 10, VALUES = 256, BYTES = 84, BITS = 8;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        uint8_t quants[QUANT_GROUP_SIZE];
        unpack_bits(block + 16 + g / 4 * 32, g % 4 * 2, 2, quants);
        float d = half_at(block + 80), dmin = half_at(block + 82), scales[2], mins[2];
        for (int half = 0; half < 2; half++) {
            uint8_t packed = block[2 * g + half];
            scales[half] = d * (packed & 15);
            mins[half] = -dmin * (packed >> 4);
        }
        round_halves(quants, scales, mins, group);
    }
};

struct Q3_K {
    static constexpr int TYPE = 11, VALUES = 256, BYTES = 110, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        uint8_t low[QUANT_GROUP_SIZE], high[QUANT_GROUP_SIZE];
        alignas(16) int8_t numbers[QUANT_GROUP_SIZE];
        unpack_bits(block + 32 + g / 4 * 32, g % 4 * 2, 2, low);
        unpack_bits(block, g, 1, high);
        for (int i = 0; i < QUANT_GROUP_SIZE; i++) numbers[i] = int8_t(low[i] + 4 * high[i] - 4);
        float d = half_at(block + 108), scales[2];
        for (int half = 0; half < 2; half++) scales[half] = d * (scale_bits(block + 96, 2 * g + half) - 32);
        round_halves<32>(numbers, scales, group);
    }

private:
    // Returns the six bits of scale j of sixteen.
    static int scale_bits(const uint8_t* scales, int j) {
        return (scales[j % 8] >> (j / 8 * 4) & 15) | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4;
    }
};

// Sets the scale and the min of a group of Q4_K or Q5_K: d, dmin, and then six bits for each, of eight groups.
inline void unpack_scale_and_min(const uint8_t* block, int g, GgufGroup& group) {
    const uint8_t* packed = block + 4;
    int scale, min;
    if (g < 4) {
        scale = packed[g] & 63;
        min = packed[g + 4] & 63;
    } else {
        scale = (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
        min = packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    }
    group.scale = half_at(block) * scale;
    group.min = -half_at(block + 2) * min;
}

struct Q4_K {
    static constexpr int TYPE = 12, VALUES = 256, BYTES = 144, BITS = 4;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        unpack_bits(block + 16 + g / 2 * 32, g % 2 * 4, 4, group.quants);
        unpack_scale_and_min(block, g, group);
    }
};

struct Q5_K {
    static constexpr int TYPE = 13, VALUES = 256, BYTES = 176, BITS = 8;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        uint8_t high[QUANT_GROUP_SIZE];
        unpack_bits(block + 48 + g / 2 * 32, g % 2 * 4, 4, group.quants);
        unpack_bits(block + 16, g, 1, high);
        for (int i = 0; i < QUANT_GROUP_SIZE; i++) group.quants[i] |= high[i] << 4;
        unpack_scale_and_min(block, g, group);
    }
};

struct Q6_K {
    static constexpr int TYPE = 14, VALUES = 256, BYTES = 210, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        uint8_t low[QUANT_GROUP_SIZE], high[QUANT_GROUP_SIZE];
        alignas(16) int8_t numbers[QUANT_GROUP_SIZE];
        unpack_bits(block + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4, 4, low);
        unpack_bits(block + 128 + g / 4 * 32, g % 4 * 2, 2, high);
        for (int i = 0; i < QUANT_GROUP_SIZE; i++) numbers[i] = int8_t((low[i] | high[i] << 4) - 32);
        float d = half_at(block + 208), scales[2];
        for (int half = 0; half < 2; half++) scales[half] = d * int8_t(block[192 + 2 * g + half]);
        round_halves<4>(numbers, scales, group);
    }
};

// Replaces quants of 4 bits by the values of IQ4_NL and IQ4_XS that they stand for.
inline void look_up(uint8_t* quants) {
    static constexpr std::array<int, 16> VALUES{-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};
    alignas(16) static constexpr auto TABLE = [] {
        std::array<uint8_t, 16> table{};
        for (int i = 0; i < 16; i++) table[i] = uint8_t(VALUES[i] + ZERO_POINT<8>);
        return table;
    }();
    __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(TABLE.data()));
    for (int half = 0; half < 2; half++) {
        auto* place = reinterpret_cast<__m128i*>(quants + half * 16);
        _mm_storeu_si128(place, _mm_shuffle_epi8(table, _mm_loadu_si128(place)));
    }
}

struct IQ4_NL {
    static constexpr int TYPE = 20, VALUES = 32, BYTES = 18, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        unpack_halves(block + 2, group.quants);
        look_up(group.quants);
        group.scale = half_at(block);
    }
};

struct IQ4_XS {
    static constexpr int TYPE = 23, VALUES = 256, BYTES = 136, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        unpack_halves(block + 8 + g * 16, group.quants);
        look_up(group.quants);
        int high = block[2 + g / 4] >> (g % 4 * 2) & 3, low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        group.scale = half_at(block) * ((low | high << 4) - 32);
    }
};

// Calls f(type) with the type of GGML's number `number`.
template <class F>
auto with_gguf_type(int64_t number, F&& f) {
    switch (number) {
        case Q4_0::TYPE: return f(Q4_0{});
        case Q4_1::TYPE: return f(Q4_1{});
        case Q5_0::TYPE: return f(Q5_0{});
        case Q5_1::TYPE: return f(Q5_1{});
        case Q8_0::TYPE: return f(Q8_0{});
        case Q2_K::TYPE: return f(Q2_K{});
        case Q3_K::TYPE: return f(Q3_K{});
        case Q4_K::TYPE: return f(Q4_K{});
        case Q5_K::TYPE: return f(Q5_K{});
        case Q6_K::TYPE: return f(Q6_K{});
        case IQ4_NL::TYPE: return f(IQ4_NL{});
        case IQ4_XS::TYPE: return f(IQ4_XS{});
        default: TORCH_CHECK(false, "blocks of GGML's type ", number, " are not packed");
    }
}

}  // namespace quire
