// Vectors of sixteen float32 lanes: one register of AVX-512, or two of AVX2.
//
// Kernels are written once against this type, and data is laid out in sixteens for both. The compiler must not choose
// the order of operations: multiplications are fused with additions by name only (`fma`), and sums over lanes are one
// fixed tree, so that the same numbers give the same bits in every kernel that uses them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quire {

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(fp16 x) { return _cvtsh_ss(x.bits); }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// Round to nearest, ties to even. NaN stays NaN.
inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, fp16& y) { y.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline void narrow(float x, bf16& y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    y.bits = nan ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct F32x16 {
    __m512 v;

    static F32x16 zero() { return {_mm512_setzero_ps()}; }
    static F32x16 set(float x) { return {_mm512_set1_ps(x)}; }
    static F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F32x16 load(const bf16* p) {
        __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
    }
    // Load the even, or the odd ones of 32 numbers.
    static F32x16 load_even(const bf16* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
    }
    static F32x16 load_odd(const bf16* p) {
        return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
    }
    static F32x16 load(const fp16* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static F32x16 load(const int8_t* p) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    // Rounds as `narrow` does.
    void store(bf16* p) const {
        __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), __mmask16(nan_lanes()), nan);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
    }
    void store(fp16* p) const {
        __m128i* q = reinterpret_cast<__m128i*>(p);
        _mm_storeu_si128(q, _mm256_cvtps_ph(_mm512_castps512_ps256(v), _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128(q + 1, _mm256_cvtps_ph(_mm512_extractf32x8_ps(v, 1), _MM_FROUND_TO_NEAREST_INT));
    }
    // Rounds to nearest even; lanes must lie within a signed byte.
    void store(int8_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
    }
    F32x16 operator+(F32x16 o) const { return {_mm512_add_ps(v, o.v)}; }
    F32x16 operator-(F32x16 o) const { return {_mm512_sub_ps(v, o.v)}; }
    F32x16 operator*(F32x16 o) const { return {_mm512_mul_ps(v, o.v)}; }
    F32x16 operator/(F32x16 o) const { return {_mm512_div_ps(v, o.v)}; }
    F32x16 abs() const { return {_mm512_abs_ps(v)}; }
    F32x16 round() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    F32x16 floor() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }

    // Sets the lanes in which `x` is below `bound` to 0.
    F32x16 zero_where_below(F32x16 x, float bound) const {
        return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), v)};
    }
    // Sets the lanes outside of [from, to) to `value`.
    F32x16 keep_lanes(int from, int to, float value) const {
        uint32_t upto = to >= 16 ? 0xffff : to <= 0 ? 0 : (1u << to) - 1;
        uint32_t before = from <= 0 ? 0 : from >= 16 ? 0xffff : (1u << from) - 1;
        return {_mm512_mask_mov_ps(_mm512_set1_ps(value), __mmask16(upto & ~before), v)};
    }
    // Sets the lanes whose bit is 0 to `value`.
    F32x16 keep_bits(uint32_t bits, float value) const {
        return {_mm512_mask_mov_ps(_mm512_set1_ps(value), __mmask16(bits), v)};
    }
    // Sets the lanes in which `x` is greater than `y` to those of `other`.
    F32x16 replace_where_greater(F32x16 x, F32x16 y, F32x16 other) const {
        return {_mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ), other.v)};
    }
    // Returns v * 2^n, for whole n.
    F32x16 ldexp(F32x16 n) const { return {_mm512_scalef_ps(v, n.v)}; }
    // Adds the integers of `bits`, shifted to the place of a float's exponent.
    F32x16 add_to_exponent(F32x16 bits) const {
        __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(bits.v), 23);
        return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), shifted))};
    }
    // Return a bit for each lane, the lowest for the first.
    uint32_t lanes_at_least(float x) const { return _mm512_cmp_ps_mask(v, _mm512_set1_ps(x), _CMP_GE_OQ); }
    uint32_t lanes_equal(float x) const { return _mm512_cmp_ps_mask(v, _mm512_set1_ps(x), _CMP_EQ_OQ); }
    uint32_t nan_lanes() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
};

inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }

inline __m256 fold(F32x16 x, __m256 (*join)(__m256, __m256)) {
    return join(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
}

#else

struct F32x16 {
    __m256 lo, hi;

    static F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F32x16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F32x16 load(const bf16* p) {
        auto half = [](const bf16* q) {
            __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
        };
        return {half(p), half(p + 8)};
    }
    static F32x16 load_even(const bf16* p) {
        auto half = [](const bf16* q) {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), 16));
        };
        return {half(p), half(p + 16)};
    }
    static F32x16 load_odd(const bf16* p) {
        auto half = [](const bf16* q) {
            __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
            return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
        };
        return {half(p), half(p + 16)};
    }
    static F32x16 load(const fp16* p) {
        const __m128i* q = reinterpret_cast<const __m128i*>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
    }
    static F32x16 load(const int8_t* p) {
        auto half = [](const int8_t* q) {
            return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
        };
        return {half(p), half(p + 8)};
    }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    void store(bf16* p) const {
        auto narrow = [](__m256 x) {
            __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
            __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
            __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
            __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
            return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, is_nan);
        };
        __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(lo), narrow(hi)), 0b11011000);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    }
    void store(fp16* p) const {
        __m128i* q = reinterpret_cast<__m128i*>(p);
        _mm_storeu_si128(q, _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128(q + 1, _mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT));
    }
    void store(int8_t* p) const {
        __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(lo), _mm256_cvtps_epi32(hi));
        __m256i words = _mm256_permute4x64_epi64(pairs, 0b11011000);
        __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    }
    F32x16 operator+(F32x16 o) const { return {_mm256_add_ps(lo, o.lo), _mm256_add_ps(hi, o.hi)}; }
    F32x16 operator-(F32x16 o) const { return {_mm256_sub_ps(lo, o.lo), _mm256_sub_ps(hi, o.hi)}; }
    F32x16 operator*(F32x16 o) const { return {_mm256_mul_ps(lo, o.lo), _mm256_mul_ps(hi, o.hi)}; }
    F32x16 operator/(F32x16 o) const { return {_mm256_div_ps(lo, o.lo), _mm256_div_ps(hi, o.hi)}; }
    F32x16 abs() const {
        __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, lo), _mm256_andnot_ps(sign, hi)};
    }
    F32x16 round() const {
        constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(lo, mode), _mm256_round_ps(hi, mode)};
    }
    F32x16 floor() const { return {_mm256_floor_ps(lo), _mm256_floor_ps(hi)}; }
    F32x16 zero_where_below(F32x16 x, float bound) const {
        __m256 b = _mm256_set1_ps(bound);
        return {_mm256_and_ps(lo, _mm256_cmp_ps(x.lo, b, _CMP_NLT_UQ)),
                _mm256_and_ps(hi, _mm256_cmp_ps(x.hi, b, _CMP_NLT_UQ))};
    }
    F32x16 keep_lanes(int from, int to, float value) const {
        float lanes[16];
        store(lanes);
        for (int i = 0; i < 16; i++)
            if (i < from || i >= to) lanes[i] = value;
        return load(lanes);
    }
    F32x16 keep_bits(uint32_t bits, float value) const {
        auto keep = [value](__m256 x, uint32_t lanes) {
            __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(lanes)), bit), bit);
            return _mm256_blendv_ps(_mm256_set1_ps(value), x, _mm256_castsi256_ps(kept));
        };
        return {keep(lo, bits), keep(hi, bits >> 8)};
    }
    F32x16 replace_where_greater(F32x16 x, F32x16 y, F32x16 other) const {
        return {_mm256_blendv_ps(lo, other.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_GT_OQ)),
                _mm256_blendv_ps(hi, other.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_GT_OQ))};
    }
    F32x16 ldexp(F32x16 n) const {
        auto power = [](__m256 x) {
            __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
            return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
        };
        return {_mm256_mul_ps(lo, power(n.lo)), _mm256_mul_ps(hi, power(n.hi))};
    }
    F32x16 add_to_exponent(F32x16 bits) const {
        auto add = [](__m256 x, __m256 y) {
            __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(y), 23);
            return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted));
        };
        return {add(lo, bits.lo), add(hi, bits.hi)};
    }
    template <int relation>
    static uint32_t lanes(F32x16 a, F32x16 b) {
        uint32_t low = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, relation));
        return low | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, relation))) << 8;
    }
    uint32_t lanes_at_least(float x) const { return lanes<_CMP_GE_OQ>(*this, set(x)); }
    uint32_t lanes_equal(float x) const { return lanes<_CMP_EQ_OQ>(*this, set(x)); }
    uint32_t nan_lanes() const { return lanes<_CMP_UNORD_Q>(*this, *this); }
};

inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline __m256 fold(F32x16 x, __m256 (*join)(__m256, __m256)) { return join(x.lo, x.hi); }

#endif

// Reduces all lanes to one: joins halves, then quarters, and so on.
inline float reduce(F32x16 x, __m256 (*join)(__m256, __m256)) {
    __m256 eight = fold(x, join);
    __m256 four = join(eight, _mm256_permute2f128_ps(eight, eight, 1));
    __m256 two = join(four, _mm256_permute_ps(four, 0b01001110));
    return _mm256_cvtss_f32(join(two, _mm256_permute_ps(two, 0b10110001)));
}
inline float reduce_sum(F32x16 x) {
    return reduce(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
inline float reduce_min(F32x16 x) {
    return reduce(x, [](__m256 a, __m256 b) { return _mm256_min_ps(a, b); });
}
inline float reduce_max(F32x16 x) {
    return reduce(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}

// Returns e^x for x <= 88, off by about one unit in the last place. Below -87, and for -inf, it is exactly 0; e^0 is
// exactly 1. It is 2^n times a polynomial on [-ln2/2, ln2/2], Taylor's to the sixth power.
inline F32x16 exp(F32x16 x) {
    F32x16 bounded = max(F32x16::set(-87.0f), x);  // in this order of arguments NaN stays
    F32x16 n = (bounded * F32x16::set(1.44269504088896341f)).round();
    F32x16 r = fma(n, F32x16::set(-0.693145751953125f), bounded);
    r = fma(n, F32x16::set(-1.42860682030941723e-6f), r);
    F32x16 y = F32x16::set(1.0f / 720);
    for (float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        y = fma(y, r, F32x16::set(coefficient));
    return y.ldexp(n).zero_where_below(x, -87.0f);
}

// Returns 2^x for x <= 127, off by about one unit in the last place, or by less than 2^-126 below -126. At -127 and below, and for -inf, it is exactly 0;
// 2^0 is exactly 1, and NaN stays. It is 2^n times a polynomial on [-0.5, 0.5], whose largest relative error is least.
// Adding 1.5 * 2^23 rounds to the whole number n, and leaves it in the sum's low bits.
inline F32x16 exp2(F32x16 x) {
    const F32x16 rounder = F32x16::set(12582912.0f);
    x = max(F32x16::set(-127.0f), x);  // in this order of arguments NaN stays
    F32x16 rounded = x + rounder;
    F32x16 r = x - (rounded - rounder);
    F32x16 y = F32x16::set(1.326472731307149e-3f);
    for (float coefficient :
         {9.671512991189957e-3f, 5.550733581185341e-2f, 0.24022242426872253f, 0.6931470036506653f, 1.0f})
        y = fma(y, r, F32x16::set(coefficient));
    return y.add_to_exponent(rounded);
}

}  // namespace quire
