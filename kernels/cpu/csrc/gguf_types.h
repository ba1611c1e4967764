// The types of GGUF's blocks that become groups of 32 inputs, as quantized_linear.cpp multiplies them.
//
// Each type says GGML's number for it, the values and the bytes of a block, the bits of its quants, whether groups have
// mins, and how to unpack one group of a block, to quants or to the values themselves:
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
// - Q6_K and Q3_K: the scale is a 4th (Q6_K) or a 32nd (Q3_K) of that of the coarser half. Its quants, from -32 or -4
//   on, times 4 or 32, reach exactly as far as 8 bits. So the coarser half stays as it is, and the other is off by at
//   most an 8th or a 64th of the coarser step. The largest value / 127 would move both halves.
// - Q2_K: the range of the group is divided into 255 steps, so an error is at most a 510th of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "matrix.h"
#include "simd.h"

namespace quire {

template <int BITS>
constexpr int ZERO_POINT = 1 << (BITS - 1);

struct GgufGroup {
    __m256i quants;    // a byte each
    float scale, min;  // min: of types that have mins
};

// A group whose halves have scales and mins of their own.
struct GgufHalves {
    __m256i numbers;           // signed bytes: what the scales are multiplied with
    float scales[2], mins[2];  // mins: of types that have mins
};

template <class Type>
constexpr bool HAS_HALVES = requires(const GgufHalves& halves, GgufGroup& group) { Type::round(halves, group); };

inline float half_at(const uint8_t* bytes) {
    fp16 x;
    std::memcpy(&x.bits, bytes, 2);
    return widen(x);
}

inline __m128i load_16(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }
inline __m256i load_32(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }

// Returns the low halves of 16 bytes, and then the high halves.
inline __m256i unpack_halves(const uint8_t* bytes) {
    __m128i low = load_16(bytes), high = _mm_srli_epi16(low, 4);
    return _mm256_and_si256(_mm256_set_m128i(high, low), _mm256_set1_epi8(15));
}

// Returns the BITS bits of each of 32 bytes that are above the lowest `shift`, shifted to the left by UP.
template <int BITS, int UP = 0>
__m256i unpack_bits(const uint8_t* bytes, int shift) {
    __m256i shifted = _mm256_srl_epi16(load_32(bytes), _mm_cvtsi32_si128(shift));
    return _mm256_slli_epi16(_mm256_and_si256(shifted, _mm256_set1_epi8((1 << BITS) - 1)), UP);
}

struct Q4_0 {
    static constexpr int TYPE = 2, VALUES = 32, BYTES = 18, BITS = 4;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        group.quants = unpack_halves(block + 2);
        group.scale = half_at(block);
    }
};

struct Q4_1 {
    static constexpr int TYPE = 3, VALUES = 32, BYTES = 20, BITS = 4;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        group.quants = unpack_halves(block + 4);
        group.scale = half_at(block);
        group.min = half_at(block + 2);
    }
};

// Returns 16 times each of 32 bits, the lowest first.
inline __m256i fifth_bits(const uint8_t* bits) {
    int32_t word;
    std::memcpy(&word, bits, 4);
    const __m256i bytes = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                           2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i masks = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), bytes), masks);
    return _mm256_and_si256(_mm256_cmpeq_epi8(own, masks), _mm256_set1_epi8(16));
}

struct Q5_0 {
    static constexpr int TYPE = 6, VALUES = 32, BYTES = 22, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        __m256i quants = _mm256_or_si256(unpack_halves(block + 6), fifth_bits(block + 2));
        group.quants = _mm256_add_epi8(quants, _mm256_set1_epi8(ZERO_POINT<8> - ZERO_POINT<5>));
        group.scale = half_at(block);
    }
};

struct Q5_1 {
    static constexpr int TYPE = 7, VALUES = 32, BYTES = 24, BITS = 8;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        group.quants = _mm256_or_si256(unpack_halves(block + 8), fifth_bits(block + 4));
        group.scale = half_at(block);
        group.min = half_at(block + 2);
    }
};

// Makes signed bytes unsigned ones, with the zero point of 8 bits.
inline __m256i flip_signs(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(int8_t(0x80))); }

struct Q8_0 {
    static constexpr int TYPE = 8, VALUES = 32, BYTES = 34, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        group.quants = flip_signs(load_32(block + 2));
        group.scale = half_at(block);
    }
};

// Returns numbers * factors[half] + offsets[half], rounded, for both halves of signed bytes, as unsigned ones.
inline __m256i rounded_halves(__m256i numbers, const float (&factors)[2], const float (&offsets)[2]) {
    alignas(32) int8_t bytes[QUANT_GROUP_SIZE];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), numbers);
    for (int half = 0; half < 2; half++) {
        int8_t* own = bytes + half * 16;
        fma(F32x16::load(own), F32x16::set(factors[half]), F32x16::set(offsets[half])).store(own);
    }
    return flip_signs(_mm256_set_m128i(load_16(bytes + 16), load_16(bytes)));
}

// Sets a group to one of two bits whose halves have scales and mins of their own.
inline void round_to_range(const GgufHalves& halves, GgufGroup& group) {
    auto& [numbers, scales, mins] = halves;
    float low = std::min(mins[0], mins[1]), high = std::max(mins[0], mins[1]), all = 0, factors[2], offsets[2];
    for (int half = 0; half < 2; half++) {
        float end = mins[half] + 3 * scales[half];
        low = std::min(low, end);
        high = std::max(high, end);
        all += end;  // `min` and `max` may lose a NaN
    }
    group.scale = (high - low) / 255 + 0 * all;
    group.min = low;
    float inverse = group.scale > 0 ? 1 / group.scale : 0;
    for (int half = 0; half < 2; half++) {
        factors[half] = scales[half] * inverse;
        offsets[half] = (mins[half] - low) * inverse - ZERO_POINT<8>;
    }
    group.quants = rounded_halves(numbers, factors, offsets);
}

// Sets a group to one whose halves have scales of their own; FACTOR times its numbers are signed bytes.
template <int FACTOR>
void round_to_coarser(const GgufHalves& halves, GgufGroup& group) {
    auto& [numbers, scales, mins] = halves;
    bool equal = std::abs(scales[0]) == std::abs(scales[1]);
    float coarser = std::abs(scales[0]) > std::abs(scales[1]) ? scales[0] : scales[1];
    int factor = equal ? 1 : FACTOR;
    float factors[2];
    for (int half = 0; half < 2; half++) {
        float ratio = scales[half] / coarser;
        factors[half] = std::abs(ratio) <= 1 ? ratio * factor : 0;  // 0: of 0 / 0, or of no finite numbers
    }
    group.scale = coarser / factor;
    group.quants = rounded_halves(numbers, factors, {0, 0});
}

struct Q2_K {
    static constexpr int TYPE = 10, VALUES = 256, BYTES = 84, BITS = 8;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int g, GgufHalves& halves) {
        float d = half_at(block + 80), dmin = half_at(block + 82);
        for (int half = 0; half < 2; half++) {
            uint8_t packed = block[2 * g + half];
            halves.scales[half] = d * (packed & 15);
            halves.mins[half] = -dmin * (packed >> 4);
        }
        halves.numbers = unpack_bits<2>(block + 16 + g / 4 * 32, g % 4 * 2);
    }
    static void round(const GgufHalves& halves, GgufGroup& group) { round_to_range(halves, group); }
};

struct Q3_K {
    static constexpr int TYPE = 11, VALUES = 256, BYTES = 110, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int g, GgufHalves& halves) {
        __m256i low = unpack_bits<2>(block + 32 + g / 4 * 32, g % 4 * 2);
        __m256i quants = _mm256_or_si256(low, unpack_bits<1, 2>(block, g));
        float d = half_at(block + 108);
        for (int half = 0; half < 2; half++) halves.scales[half] = d * (scale_bits(block + 96, 2 * g + half) - 32);
        halves.numbers = _mm256_sub_epi8(quants, _mm256_set1_epi8(4));
    }
    static void round(const GgufHalves& halves, GgufGroup& group) { round_to_coarser<32>(halves, group); }

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
        group.quants = unpack_bits<4>(block + 16 + g / 2 * 32, g % 2 * 4);
        unpack_scale_and_min(block, g, group);
    }
};

struct Q5_K {
    static constexpr int TYPE = 13, VALUES = 256, BYTES = 176, BITS = 8;
    static constexpr bool HAS_MINS = true;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        __m256i low = unpack_bits<4>(block + 48 + g / 2 * 32, g % 2 * 4);
        group.quants = _mm256_or_si256(low, unpack_bits<1, 4>(block + 16, g));
        unpack_scale_and_min(block, g, group);
    }
};

struct Q6_K {
    static constexpr int TYPE = 14, VALUES = 256, BYTES = 210, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int g, GgufHalves& halves) {
        __m256i low = unpack_bits<4>(block + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4);
        __m256i quants = _mm256_or_si256(low, unpack_bits<2, 4>(block + 128 + g / 4 * 32, g % 4 * 2));
        float d = half_at(block + 208);
        for (int half = 0; half < 2; half++) halves.scales[half] = d * int8_t(block[192 + 2 * g + half]);
        halves.numbers = _mm256_sub_epi8(quants, _mm256_set1_epi8(32));
    }
    static void round(const GgufHalves& halves, GgufGroup& group) { round_to_coarser<4>(halves, group); }
};

// Returns the values of IQ4_NL and IQ4_XS that quants of 4 bits stand for, as unsigned bytes.
inline __m256i look_up(__m256i quants) {
    const __m128i values = _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    return flip_signs(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), quants));
}

struct IQ4_NL {
    static constexpr int TYPE = 20, VALUES = 32, BYTES = 18, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int, GgufGroup& group) {
        group.quants = look_up(unpack_halves(block + 2));
        group.scale = half_at(block);
    }
};

struct IQ4_XS {
    static constexpr int TYPE = 23, VALUES = 256, BYTES = 136, BITS = 8;
    static constexpr bool HAS_MINS = false;

    static void unpack(const uint8_t* block, int g, GgufGroup& group) {
        group.quants = look_up(unpack_halves(block + 8 + g * 16));
        int high = block[2 + g / 4] >> (g % 4 * 2) & 3, low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        group.scale = half_at(block) * ((low | high << 4) - 32);
    }
};

// Unpacks a group. Types whose halves have scales of their own are rounded.
template <class Type>
void unpack_group(const uint8_t* block, int g, GgufGroup& group) {
    if constexpr (HAS_HALVES<Type>) {
        GgufHalves halves;
        Type::unpack(block, g, halves);
        Type::round(halves, group);
    } else {
        Type::unpack(block, g, group);
    }
}

// Writes the values of a group to x. They are those of the `gguf` package, to the bit.
template <class Type>
void dequantize_group(const uint8_t* block, int g, float* x) {
    GgufHalves halves;
    if constexpr (HAS_HALVES<Type>) {
        Type::unpack(block, g, halves);
    } else {
        GgufGroup group{};
        Type::unpack(block, g, group);
        int zero_point = Type::HAS_MINS ? 0 : ZERO_POINT<Type::BITS>;
        halves = {_mm256_sub_epi8(group.quants, _mm256_set1_epi8(char(zero_point))),
                  {group.scale, group.scale},
                  {group.min, group.min}};
    }
    alignas(32) int8_t numbers[QUANT_GROUP_SIZE];
    _mm256_store_si256(reinterpret_cast<__m256i*>(numbers), halves.numbers);
    for (int half = 0; half < 2; half++) {
        F32x16 values = F32x16::load(numbers + half * 16) * F32x16::set(halves.scales[half]);
        if (Type::HAS_MINS) values = values + F32x16::set(halves.mins[half]);
        values.store(x + half * 16);
    }
}

// Raises c10::Error unless `blocks` (out, n, bytes) are of the type, with so many inputs from a group of them on.
template <class Type>
void check_blocks(const at::Tensor& blocks, int64_t first_group, int64_t inputs) {
    TORCH_CHECK(blocks.scalar_type() == at::kByte && blocks.dim() == 3 && blocks.size(2) == Type::BYTES &&
                    blocks.stride(2) == 1,
                "blocks must be (out, n, ", Type::BYTES, ") bytes");
    TORCH_CHECK(inputs > 0 && inputs % QUANT_GROUP_SIZE == 0, "inputs must be a multiple of ", QUANT_GROUP_SIZE);
    TORCH_CHECK(first_group >= 0 && first_group * QUANT_GROUP_SIZE + inputs <= blocks.size(1) * Type::VALUES,
                "blocks of all inputs");
}

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
