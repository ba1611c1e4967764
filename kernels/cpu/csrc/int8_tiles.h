// Products of bytes by AMX: one instruction multiplies sixteen terms of activations with sixteen outputs, over 64 inputs.
//
// Its operands are tiles of sixteen rows of 64 bytes. It reads weights in the order that panels have for all kernels,
// (input / 4, output, 4), so nothing is packed differently for it. Sums are exact, so they are those of int8.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "matrix.h"

namespace quire {

#if defined(__AMX_INT8__)

constexpr int TILE_TERMS = 16, TILE_INPUTS = 64;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// A constant, since the compiler does not know that the intrinsic reads all of it, and might leave out stores.
inline constexpr TileShapes TILE_SHAPES;

// The calling thread's tiles. They have shapes from their first use until the object is destroyed, and no longer: code
// of others, such as torch's oneDNN, gives them other shapes in the same threads.
class Int8Tiles {
public:
    Int8Tiles() = default;
    Int8Tiles(const Int8Tiles&) = delete;
    ~Int8Tiles() {
        if (shaped_) _tile_release();
    }

    static bool fit(const Terms& terms) { return terms.count >= TILE_TERMS && terms.size % TILE_INPUTS == 0; }

    // Calls f(term, dots) for all terms in order, with the products (32) of each and the panel's u. `terms` must fit.
    // A tile for which fewer than sixteen terms are left begins with terms that are done.
    template <class F>
    void for_each_dots(const uint8_t* u, const Terms& terms, F&& f) {
        if (!shaped_) _tile_loadconfig(&TILE_SHAPES);
        shaped_ = true;
        alignas(64) int32_t dots[2 * TILE_TERMS * PANEL];
        for (int done = 0; done < terms.count;) {
            bool two = terms.count - done > TILE_TERMS && terms.count >= 2 * TILE_TERMS;
            int count = two ? 2 * TILE_TERMS : TILE_TERMS, first = std::min(done, terms.count - count);
            (two ? multiply<2> : multiply<1>)(u, terms.size, terms.q + first * terms.size, dots);
            for (; done < first + count; done++) f(terms.term[done], dots + (done - first) * PANEL);
        }
    }

private:
    bool shaped_ = false;

    // Sets dots (16 * TILES, 32) to the products of as many terms, of `size` bytes of q each, with a panel's u.
    template <int TILES>
    static void multiply(const uint8_t* u, int size, const int8_t* q, int32_t* dots) {
        // The compiler does not know that tiles are loaded from memory: this keeps earlier stores before the loads.
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int k = 0; k < size; k += TILE_INPUTS) {
            _tile_loadd(6, u + k * PANEL, 4 * PANEL);
            _tile_loadd(7, u + k * PANEL + 64, 4 * PANEL);
            _tile_loadd(4, q + k, size);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if constexpr (TILES == 2) {
                _tile_loadd(5, q + TILE_TERMS * size + k, size);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        }
        constexpr int row_bytes = PANEL * sizeof(int32_t);
        _tile_stored(0, dots, row_bytes);
        _tile_stored(1, dots + 16, row_bytes);
        if constexpr (TILES == 2) {
            _tile_stored(2, dots + TILE_TERMS * PANEL, row_bytes);
            _tile_stored(3, dots + TILE_TERMS * PANEL + 16, row_bytes);
        }
    }
};

#else

// A processor without AMX.
struct Int8Tiles {
    static constexpr bool fit(const Terms&) { return false; }
    template <class F>
    void for_each_dots(const uint8_t*, const Terms&, F&&) {}
};

#endif

}  // namespace quire
