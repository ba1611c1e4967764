// The products of attention, for each type of the cache: queries with keys, and weights with values.
//
// A query's and a weight's bits are chosen here, by the type alone:
//   float32, float16  fused multiply-adds of float32
//   bfloat16          the processor's products of pairs of bfloat16, to which queries and weights are rounded, as on
//                     GPUs; without such an instruction, fused multiply-adds
//   int8              exact products of bytes with numbers of 16 bits, to which queries and weights are rounded
//
// A vector has GROUP elements for each of sixteen lanes (kv_cache.h). A factor is GROUP numbers, the same for all
// lanes.
#pragma once

#include <algorithm>
#include <cmath>

#include "int8.h"
#include "kv_cache.h"
#include "quant_scale.h"
#include "simd.h"

namespace quire {

// A query's scores are (sum - offset) * scale, times the key's scale.
struct QueryScale {
    float scale;
    int32_t offset;
};

// Queries and weights that are multiplied as they are.
struct FloatOperands {
    using Operand = float;
    static constexpr int OPERANDS = 1;

    static QueryScale store_query(const float* q, int64_t dim, float* row) {
        std::copy_n(q, dim, row);
        return {1.0f, 0};
    }
    static void store_weights(F32x16 weights, float* row, int64_t, int64_t first) { weights.store(row + first); }
};

// Numbers of factors are OPERANDS Operands each, in rows of `count` numbers. QUERY_TILE queries are computed
// together, so that their sums stay in registers.
template <class T>
struct Products : FloatOperands {
    static constexpr int QUERY_TILE = 6;
    static constexpr int SUMS = 24;  // that fit into the registers beside the other operands

    struct Vector {
        F32x16 v;
        static Vector load(const T* p) { return {F32x16::load(p)}; }
    };
    struct Factor {
        F32x16 v;
        static Factor load(const float* row, int64_t, int64_t first) { return {F32x16::set(row[first])}; }
    };
    struct Sum {
        F32x16 v;
        static Sum zero() { return {F32x16::zero()}; }
        void add_key(Vector x, Factor f) { v = fma(f.v, x.v, v); }
        void add_value(Vector x, Factor f) { add_key(x, f); }
        F32x16 scores(QueryScale) const { return v; }
        F32x16 values(float) const { return v; }
    };
};

#if defined(__AVX512BF16__)

template <>
struct Products<bf16> {
    using Operand = bf16;
    static constexpr int OPERANDS = 1;
    static constexpr int QUERY_TILE = 6;
    static constexpr int SUMS = 24;

    struct Vector {
        __m512i v;
        static Vector load(const bf16* p) { return {_mm512_loadu_si512(p)}; }
        Vector first_of_pairs() const { return {_mm512_and_si512(v, _mm512_set1_epi32(0xffff))}; }
    };
    struct Factor {
        __m512i v;
        static Factor load(const bf16* row, int64_t, int64_t first) {
            int32_t pair;
            std::memcpy(&pair, row + first, 4);
            return {_mm512_set1_epi32(pair)};
        }
    };
    struct Sum {
        __m512 v;
        static Sum zero() { return {_mm512_setzero_ps()}; }
        // Written like `add_byte_products`, for the same reasons.
        void add_key(Vector x, Factor f) {
            __m512 in_register = v;
            asm("vdpbf16ps %2, %1, %0" : "+v"(in_register) : "v"(f.v), "v"(x.v));
            v = in_register;
        }
        void add_value(Vector x, Factor f) { add_key(x, f); }
        F32x16 scores(QueryScale) const { return {v}; }
        F32x16 values(float) const { return {v}; }
    };

    static QueryScale store_query(const float* q, int64_t dim, bf16* row) {
        for (int64_t d = 0; d < dim; d += 16) store_weights(F32x16::load(q + d), row, dim, d);
        return {1.0f, 0};
    }
    static void store_weights(F32x16 weights, bf16* row, int64_t, int64_t first) {
        __m256bh narrowed = _mm512_cvtneps_pbh(weights.v);
        std::memcpy(row + first, &narrowed, sizeof narrowed);
    }
};

#else

template <>
struct Products<bf16> : FloatOperands {
#if defined(__AVX512F__)
    static constexpr int QUERY_TILE = 6;
#else
    static constexpr int QUERY_TILE = 4;
#endif
    static constexpr int SUMS = 16;  // a vector takes two registers

    struct Vector {
        F32x16 even, odd;
        static Vector load(const bf16* p) { return {F32x16::load_even(p), F32x16::load_odd(p)}; }
        Vector first_of_pairs() const { return {even, F32x16::zero()}; }
    };
    struct Factor {
        F32x16 even, odd;
        static Factor load(const float* row, int64_t, int64_t first) {
            return {F32x16::set(row[first]), F32x16::set(row[first + 1])};
        }
    };
    struct Sum {
        F32x16 v;
        static Sum zero() { return {F32x16::zero()}; }
        void add_key(Vector x, Factor f) { v = fma(f.odd, x.odd, fma(f.even, x.even, v)); }
        void add_value(Vector x, Factor f) { add_key(x, f); }
        F32x16 scores(QueryScale) const { return v; }
        F32x16 values(float) const { return v; }
    };
};

#endif

template <>
struct Products<int8_t> {
    using Operand = int8_t;
    static constexpr int OPERANDS = 2;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    static constexpr int QUERY_TILE = 6;  // with AVX-VNNI, whose registers are fewer, this has not been measured
    static constexpr int SUMS = 12;       // each of two registers
#else
    static constexpr int QUERY_TILE = 4;
#endif

    struct Vector {
        U8x64 v;
        static Vector load(const int8_t* p) { return {U8x64::load(reinterpret_cast<const uint8_t*>(p))}; }
    };
    using Factor = WideFactor;
    struct Sum {
        WideSum v;
        static Sum zero() { return {WideSum::zero()}; }
        void add_key(Vector x, Factor f) { v.add_unsigned_bytes(x.v, f); }
        void add_value(Vector x, Factor f) { v.add_signed_bytes(x.v, f); }
        F32x16 scores(QueryScale q) const { return v.minus(q.offset) * F32x16::set(q.scale); }
        F32x16 values(float scale) const { return v.minus(0) * F32x16::set(scale); }
    };

    // The scale is NaN if the query is not finite. The offset undoes the 128 that each key has too much.
    static QueryScale store_query(const float* q, int64_t dim, int8_t* row) {
        AbsMax max_abs;
        for (int64_t d = 0; d < dim; d += 16) max_abs.add(F32x16::load(q + d));
        QuantScale quants = max_abs.scale_to(MAX_SIGNED);
        F32x16 sums = F32x16::zero();
        for (int64_t d = 0; d < dim; d += 16) {
            F32x16 rounded = (F32x16::load(q + d) * quants.inverse).round();
            store_signed(rounded, row, dim, d);
            sums = sums + rounded;
        }
        return {quants.scale, std::isfinite(quants.scale) ? 128 * int32_t(reduce_sum(sums)) : 0};
    }
    // Weights lie between 0 and MAX_UNSIGNED.
    static void store_weights(F32x16 weights, int8_t* row, int64_t count, int64_t first) {
        store_unsigned(weights, row, count, first);
    }
};

}  // namespace quire
