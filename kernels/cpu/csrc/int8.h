// Dot products of bytes, unsigned times signed, four for each of sixteen int32 lanes. Integer sums are exact, so their
// order does not matter.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace quire {

#if defined(__AVX512VNNI__)

// Lane i of `sum` adds unsigned[4i..4i+3] times signed[4i..4i+3]. In assembly, because GCC 12 keeps an array of sums in
// memory if a loop adds to them by the intrinsic, or if they are the operand.
[[gnu::always_inline]] inline void add_byte_products(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    __m512i in_register = sum;
    asm("vpdpbusd %2, %1, %0" : "+v"(in_register) : "v"(unsigned_bytes), "v"(signed_bytes));
    sum = in_register;
}

struct U8x64 {
    __m512i v;
    static U8x64 load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
    U8x64 low_nibbles() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
    U8x64 high_nibbles() const { return {_mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))}; }
    // Looks each byte of `indices`, 0..15, up among the sixteen bytes of its 128 bits.
    U8x64 lookup(U8x64 indices) const { return {_mm512_shuffle_epi8(v, indices.v)}; }
    // Returns the sixteen bytes at p four times.
    static U8x64 repeat_sixteen(const int8_t* p) {
        return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    // Returns each of 16 bytes four times, one after another.
    static U8x64 repeat_four(const uint8_t* p) {
        __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return {_mm512_mullo_epi32(wide, _mm512_set1_epi32(0x01010101))};
    }
    // Returns the four bytes at `quad` sixteen times.
    static U8x64 repeat_quad(const int8_t* quad) {
        int32_t four;
        std::memcpy(&four, quad, 4);
        return {_mm512_set1_epi32(four)};
    }
};

// Returns a * b + c for each byte. b has the same byte in both halves of each pair; no product exceeds 255.
inline U8x64 multiply_add_bytes(U8x64 a, U8x64 b, U8x64 c) {
    __m512i factor = _mm512_and_si512(b.v, _mm512_set1_epi16(0xff));
    return {_mm512_add_epi8(_mm512_mullo_epi16(a.v, factor), c.v)};
}

struct I32x16 {
    __m512i v;
    static I32x16 set(int32_t x) { return {_mm512_set1_epi32(x)}; }
    static I32x16 load(const uint8_t* p) {
        return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static I32x16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
    I32x16 operator+(I32x16 o) const { return {_mm512_add_epi32(v, o.v)}; }
    I32x16 operator*(I32x16 o) const { return {_mm512_mullo_epi32(v, o.v)}; }
    // Multiplies lanes of 0..32767 by lanes of 16 bits.
    I32x16 times_16(I32x16 o) const { return *this * o; }
    // Lane i adds unsigned[4i..4i+3] times signed[4i..4i+3].
    void add_products(U8x64 unsigned_bytes, U8x64 signed_bytes) {
        add_byte_products(v, unsigned_bytes.v, signed_bytes.v);
    }
    // Lane i adds quants[4i..4i+3] times the four signed bytes at `quad`.
    void add_dot(U8x64 quants, const int8_t* quad) { add_products(quants, U8x64::repeat_quad(quad)); }
    I32x16 total() const { return *this; }
    F32x16 to_float() const { return {_mm512_cvtepi32_ps(v)}; }
    static I32x16 round(F32x16 x) { return {_mm512_cvtps_epi32(x.v)}; }
    template <int BITS>
    I32x16 shift_left() const { return {_mm512_slli_epi32(v, BITS)}; }
    template <int BITS>
    I32x16 shift_right() const { return {_mm512_srai_epi32(v, BITS)}; }
    void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
    void store_low_bytes(int8_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
    }
};

#else

struct U8x64 {
    __m256i lo, hi;
    static U8x64 load(const uint8_t* p) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
    }
    void store(uint8_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), lo);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), hi);
    }
    U8x64 low_nibbles() const {
        __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)};
    }
    U8x64 high_nibbles() const { return U8x64{_mm256_srli_epi16(lo, 4), _mm256_srli_epi16(hi, 4)}.low_nibbles(); }
    U8x64 lookup(U8x64 indices) const {
        return {_mm256_shuffle_epi8(lo, indices.lo), _mm256_shuffle_epi8(hi, indices.hi)};
    }
    static U8x64 repeat_sixteen(const int8_t* p) {
        __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return {twice, twice};
    }
    static U8x64 repeat_four(const uint8_t* p) {
        auto half = [](const uint8_t* q) {
            __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q)));
            return _mm256_mullo_epi32(wide, _mm256_set1_epi32(0x01010101));
        };
        return {half(p), half(p + 8)};
    }
    static U8x64 repeat_quad(const int8_t* quad) {
        int32_t four;
        std::memcpy(&four, quad, 4);
        return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
    }
};

inline U8x64 multiply_add_bytes(U8x64 a, U8x64 b, U8x64 c) {
    auto half = [](__m256i x, __m256i y, __m256i z) {
        __m256i factor = _mm256_and_si256(y, _mm256_set1_epi16(0xff));
        return _mm256_add_epi8(_mm256_mullo_epi16(x, factor), z);
    };
    return {half(a.lo, b.lo, c.lo), half(a.hi, b.hi, c.hi)};
}

struct I32x16 {
    __m256i lo, hi;
    static I32x16 set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    static I32x16 load(const uint8_t* p) {
        auto half = [](const uint8_t* q) {
            return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q)));
        };
        return {half(p), half(p + 8)};
    }
    static I32x16 load(const int32_t* p) {
        auto half = [](const int32_t* q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)); };
        return {half(p), half(p + 8)};
    }
    I32x16 operator+(I32x16 o) const { return {_mm256_add_epi32(lo, o.lo), _mm256_add_epi32(hi, o.hi)}; }
    I32x16 operator*(I32x16 o) const { return {_mm256_mullo_epi32(lo, o.lo), _mm256_mullo_epi32(hi, o.hi)}; }
    I32x16 times_16(I32x16 o) const { return {_mm256_madd_epi16(lo, o.lo), _mm256_madd_epi16(hi, o.hi)}; }
#if defined(__AVXVNNI__)
    void add_products(U8x64 unsigned_bytes, U8x64 signed_bytes) {
        auto add = [](__m256i& sum, __m256i u, __m256i s) {
            __m256i in_register = _mm256_dpbusd_avx_epi32(sum, u, s);
            asm("" : "+x"(in_register));  // otherwise GCC 12 moves sums between registers and memory
            sum = in_register;
        };
        add(lo, unsigned_bytes.lo, signed_bytes.lo);
        add(hi, unsigned_bytes.hi, signed_bytes.hi);
    }
    void add_dot(U8x64 quants, const int8_t* quad) { add_products(quants, U8x64::repeat_quad(quad)); }
#else
    // Multiplies even and odd bytes as 16-bit numbers, since the instruction for bytes saturates.
    void add_dot(U8x64 quants, const int8_t* quad) {
        __m256i a = U8x64::repeat_quad(quad).lo;
        __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
        auto dot = [&](__m256i w) {
            __m256i left = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)), even);
            return _mm256_add_epi32(left, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
        };
        lo = _mm256_add_epi32(lo, dot(quants.lo));
        hi = _mm256_add_epi32(hi, dot(quants.hi));
        asm("" : "+x"(lo), "+x"(hi));  // otherwise GCC 12 moves sums between registers and memory
    }
#endif
    I32x16 total() const { return *this; }
    F32x16 to_float() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
    static I32x16 round(F32x16 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
    template <int BITS>
    I32x16 shift_left() const { return {_mm256_slli_epi32(lo, BITS), _mm256_slli_epi32(hi, BITS)}; }
    template <int BITS>
    I32x16 shift_right() const { return {_mm256_srai_epi32(lo, BITS), _mm256_srai_epi32(hi, BITS)}; }
    void store(uint8_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), lo);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), hi);
    }
    void store_low_bytes(int8_t* p) const {
        __m256i byte = _mm256_set1_epi32(0xff);
        __m256i pairs = _mm256_packus_epi32(_mm256_and_si256(lo, byte), _mm256_and_si256(hi, byte));
        pairs = _mm256_permute4x64_epi64(pairs, 0b11011000);
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    }
};

#endif

// Up to eight dot products of 4-bit quants.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

struct NibbleSum : I32x16 {
    static NibbleSum set(int32_t x) { return {I32x16::set(x)}; }
    // Returns the sums, which began at 0, times numbers of eight bits. The sums may need more than sixteen.
    I32x16 times(I32x16 factor) const { return *this * factor; }
};

#else

// The instruction for bytes does not saturate here: two products are at most 2 * 15 * 127, and 16 bits hold eight such
// pairs. That is half as many multiplications as `I32x16::add_dot` needs.
struct NibbleSum {
    __m256i lo, hi;  // two sums of 16 bits for each lane
    int32_t start;
    static NibbleSum set(int32_t x) { return {_mm256_setzero_si256(), _mm256_setzero_si256(), x}; }
    void add_dot(U8x64 nibbles, const int8_t* quad) {
        int32_t four;
        std::memcpy(&four, quad, 4);
        __m256i signed_bytes = _mm256_set1_epi32(four);
        lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(nibbles.lo, signed_bytes));
        hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(nibbles.hi, signed_bytes));
        asm("" : "+x"(lo), "+x"(hi));  // otherwise GCC 12 adds in another order, with all products in memory
    }
    I32x16 total() const {
        __m256i one = _mm256_set1_epi16(1);
        return I32x16{_mm256_madd_epi16(lo, one), _mm256_madd_epi16(hi, one)} + I32x16::set(start);
    }
    I32x16 times(I32x16 factor) const {
        auto pairs = [](__m256i x) { return _mm256_or_si256(x, _mm256_slli_epi32(x, 16)); };
        return {_mm256_madd_epi16(lo, pairs(factor.lo)), _mm256_madd_epi16(hi, pairs(factor.hi))};
    }
};

#endif

// Sums of products with numbers of thirteen bits, 64 high + low. A lane adds the numbers 4i..4i+3 times signed bytes, of
// which the sixteen at `q` are repeated.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

struct SplitSum {
    I32x16 low, high;
    static SplitSum zero() { return {I32x16::set(0), I32x16::set(0)}; }
    void add_products(U8x64 low_bytes, U8x64 high_bytes, const int8_t* q) {
        U8x64 repeated = U8x64::repeat_sixteen(q);
        low.add_products(low_bytes, repeated);
        high.add_products(high_bytes, repeated);
    }
    I32x16 total() const { return high.shift_left<6>() + low; }
};

#else

// Two products of seven bits and a signed byte are at most 2 * 127 * 127, which sixteen bits hold.
struct SplitSum {
    I32x16 sum;
    static SplitSum zero() { return {I32x16::set(0)}; }
    void add_products(U8x64 low_bytes, U8x64 high_bytes, const int8_t* q) {
        __m256i repeated = U8x64::repeat_sixteen(q).lo;
        auto add = [&](__m256i& sum, __m256i low, __m256i high) {
            __m256i left = _mm256_madd_epi16(_mm256_maddubs_epi16(low, repeated), _mm256_set1_epi16(1));
            __m256i right = _mm256_madd_epi16(_mm256_maddubs_epi16(high, repeated), _mm256_set1_epi16(64));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(left, right));
        };
        add(sum.lo, low_bytes.lo, high_bytes.lo);
        add(sum.hi, low_bytes.hi, high_bytes.hi);
    }
    I32x16 total() const { return sum; }
};

// Writes the 64 numbers to `numbers`, in the order in which `add_wide_products` reads them.
inline void join_halves(U8x64 low, U8x64 high, int16_t* numbers) {
    __m256i factors = _mm256_set1_epi16(64 << 8 | 1);
    __m256i* target = reinterpret_cast<__m256i*>(numbers);
    auto join = [&](__m256i low, __m256i high) {
        _mm256_storeu_si256(target++, _mm256_maddubs_epi16(_mm256_unpacklo_epi8(low, high), factors));
        _mm256_storeu_si256(target++, _mm256_maddubs_epi16(_mm256_unpackhi_epi8(low, high), factors));
    };
    join(low.lo, high.lo);
    join(low.hi, high.hi);
}

// Adds what `SplitSum` would add, for sixteen numbers q of 16 bits.
[[gnu::always_inline]] inline void add_wide_products(I32x16& sum, const int16_t* numbers, const int16_t* q) {
    const __m256i* w = reinterpret_cast<const __m256i*>(numbers);
    auto repeat = [](const int16_t* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    };
    __m256i first = repeat(q), second = repeat(q + 8);
    auto dot = [&](const __m256i* w) {
        return _mm256_add_epi32(_mm256_madd_epi16(first, _mm256_loadu_si256(w)),
                                _mm256_madd_epi16(second, _mm256_loadu_si256(w + 1)));
    };
    sum.lo = _mm256_add_epi32(sum.lo, dot(w));
    sum.hi = _mm256_add_epi32(sum.hi, dot(w + 2));
}

#endif

// Adds the four lanes of each 128 bits. Their sums, of a, b, c and d, follow one another.
#if defined(__AVX512VNNI__)

inline I32x16 add_within_lanes(I32x16 a, I32x16 b, I32x16 c, I32x16 d) {
    auto fold = [](__m512i x, __m512i y) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    };
    __m512i ab = fold(a.v, b.v), cd = fold(c.v, d.v);
    return {_mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))};
}

#else

inline I32x16 add_within_lanes(I32x16 a, I32x16 b, I32x16 c, I32x16 d) {
    auto fold = [](__m256i w, __m256i x, __m256i y, __m256i z) {
        return _mm256_hadd_epi32(_mm256_hadd_epi32(w, x), _mm256_hadd_epi32(y, z));
    };
    return {fold(a.lo, b.lo, c.lo, d.lo), fold(a.hi, b.hi, c.hi, d.hi)};
}

#endif

// Products of bytes and of numbers of 16 bits, in rows of `count` numbers: `store_signed` and `store_unsigned` write
// sixteen of a row, and WideFactor loads four for all lanes. A row takes 2 * count bytes.
constexpr int MAX_INT8_DIM = 512;         // products of a sum
constexpr float MAX_SIGNED = 16256.0f;    // larger numbers would overflow such a sum
constexpr float MAX_UNSIGNED = 32767.0f;  // and larger ones, too

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// The row's low bytes come first, then its high bytes. Low bytes of signed numbers are signed, too.
inline void store_signed(F32x16 x, int8_t* row, int64_t count, int64_t first) {
    I32x16 numbers = I32x16::round(x);
    numbers.store_low_bytes(row + first);
    (numbers + I32x16::set(128)).shift_right<8>().store_low_bytes(row + count + first);
}
inline void store_unsigned(F32x16 x, int8_t* row, int64_t count, int64_t first) {
    I32x16 numbers = I32x16::round(x);
    numbers.store_low_bytes(row + first);
    numbers.shift_right<8>().store_low_bytes(row + count + first);
}

struct WideFactor {
    U8x64 low, high;
    static WideFactor load(const int8_t* row, int64_t count, int64_t first) {
        return {U8x64::repeat_quad(row + first), U8x64::repeat_quad(row + count + first)};
    }
};

// Sixteen sums. Each product adds four to each lane.
struct WideSum {
    I32x16 low, high;
    static WideSum zero() { return {I32x16::set(0), I32x16::set(0)}; }
    void add_unsigned_bytes(U8x64 bytes, WideFactor signed_factor) {
        low.add_products(bytes, signed_factor.low);
        high.add_products(bytes, signed_factor.high);
    }
    void add_signed_bytes(U8x64 bytes, WideFactor unsigned_factor) {
        low.add_products(unsigned_factor.low, bytes);
        high.add_products(unsigned_factor.high, bytes);
    }
    F32x16 minus(int32_t x) const { return (high.shift_left<8>() + low + I32x16::set(-x)).to_float(); }
};

#else

// The row is of int16. In each four, the second and the third are swapped, so that `WideFactor` can broadcast numbers 0
// and 2, and 1 and 3, without shuffles.
inline void store_signed(F32x16 x, int8_t* row, int64_t, int64_t first) {
    __m256i numbers = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
    numbers = _mm256_permute4x64_epi64(numbers, 0b11011000);
    numbers = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(numbers, 0b11011000), 0b11011000);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * first), numbers);
}
inline void store_unsigned(F32x16 x, int8_t* row, int64_t count, int64_t first) { store_signed(x, row, count, first); }

struct WideFactor {
    __m256i even, odd;  // numbers 0 and 2, and 1 and 3
    static WideFactor load(const int8_t* row, int64_t, int64_t first) {
        const int8_t* four = row + 2 * first;  // of two bytes each
        return {U8x64::repeat_quad(four).lo, U8x64::repeat_quad(four + 4).lo};
    }
};

struct WideSum {
    __m256i lo, hi;
    static WideSum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static void add(__m256i& sum, __m256i even, __m256i odd, WideFactor factor) {
        __m256i left = _mm256_madd_epi16(even, factor.even), right = _mm256_madd_epi16(odd, factor.odd);
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(left, right));
    }
    void add_unsigned_bytes(U8x64 bytes, WideFactor factor) {
        __m256i mask = _mm256_set1_epi16(0xff);
        add(lo, _mm256_and_si256(bytes.lo, mask), _mm256_srli_epi16(bytes.lo, 8), factor);
        add(hi, _mm256_and_si256(bytes.hi, mask), _mm256_srli_epi16(bytes.hi, 8), factor);
    }
    void add_signed_bytes(U8x64 bytes, WideFactor factor) {
        auto even = [](__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); };
        add(lo, even(bytes.lo), _mm256_srai_epi16(bytes.lo, 8), factor);
        add(hi, even(bytes.hi), _mm256_srai_epi16(bytes.hi, 8), factor);
    }
    F32x16 minus(int32_t x) const {
        __m256i y = _mm256_set1_epi32(x);
        return {_mm256_cvtepi32_ps(_mm256_sub_epi32(lo, y)), _mm256_cvtepi32_ps(_mm256_sub_epi32(hi, y))};
    }
};

#endif

}  // namespace quire
