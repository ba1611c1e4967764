// AVX-VNNI and AMX in plain C++, for processors without them: the compiler includes this before a kernel's source, so
// the source that is tested is the one that is compiled for those processors.
//
// They do what Intel's manual (volume 2) says of VPDPBUSD, LDTILECFG, TILELOADD, TDPBSUD, TILESTORED, TILEZERO and
// TILERELEASE. What raises an exception there, such as a tile without a shape, ends the process here.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace emulated {

inline void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "emulated instruction: %s\n", what);
    std::abort();
}

inline __m256i dpbusd(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    alignas(32) int32_t total[8];
    alignas(32) uint8_t u[32];
    alignas(32) int8_t s[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(total), sum);
    _mm256_store_si256(reinterpret_cast<__m256i*>(u), unsigned_bytes);
    _mm256_store_si256(reinterpret_cast<__m256i*>(s), signed_bytes);
    for (int i = 0; i < 32; i++) total[i / 4] += int32_t(u[i]) * int32_t(s[i]);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(total));
}

struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64);

struct Tiles {
    Shapes shapes;
    uint8_t bytes[8][16][64];
};
inline thread_local Tiles tiles;

inline void check_shape(int tile) {
    require(tiles.shapes.palette == 1 && tiles.shapes.rows[tile] && tiles.shapes.row_bytes[tile], "a tile has no shape");
}

inline void loadconfig(const void* shapes) {
    std::memset(&tiles, 0, sizeof tiles);
    std::memcpy(&tiles.shapes, shapes, sizeof(Shapes));
    require(tiles.shapes.palette == 1 && tiles.shapes.start_row == 0, "a palette that is not supported");
    for (uint8_t byte : tiles.shapes.reserved) require(byte == 0, "a reserved byte is set");
    for (int tile = 0; tile < 16; tile++) {
        int rows = tiles.shapes.rows[tile], row_bytes = tiles.shapes.row_bytes[tile];
        require(rows <= 16 && row_bytes <= 64 && !rows == !row_bytes && (tile < 8 || !rows), "a shape is out of bounds");
    }
}

inline void release() { std::memset(&tiles, 0, sizeof tiles); }

inline void zero(int tile) {
    check_shape(tile);
    std::memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]);
}

inline void loadd(int tile, const void* base, long stride) {
    zero(tile);
    for (int row = 0; row < tiles.shapes.rows[tile]; row++)
        std::memcpy(tiles.bytes[tile][row], static_cast<const char*>(base) + row * stride, tiles.shapes.row_bytes[tile]);
}

inline void stored(int tile, void* base, long stride) {
    check_shape(tile);
    for (int row = 0; row < tiles.shapes.rows[tile]; row++)
        std::memcpy(static_cast<char*>(base) + row * stride, tiles.bytes[tile][row], tiles.shapes.row_bytes[tile]);
}

// sums (M, N) of int32 += a (M, K) of signed bytes times b (K / 4, N, 4) of unsigned ones.
inline void dpbsud(int sums, int a, int b) {
    for (int tile : {sums, a, b}) check_shape(tile);
    require(sums != a && sums != b && a != b, "a tile is two operands");
    const Shapes& shapes = tiles.shapes;
    int M = shapes.rows[sums], N = shapes.row_bytes[sums] / 4, K = shapes.row_bytes[a];
    require(shapes.rows[a] == M && shapes.row_bytes[b] == 4 * N && shapes.rows[b] == K / 4, "the shapes do not match");
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            int32_t sum;
            std::memcpy(&sum, &tiles.bytes[sums][m][4 * n], 4);
            for (int k = 0; k < K; k++)
                sum += int32_t(int8_t(tiles.bytes[a][m][k])) * int32_t(tiles.bytes[b][k / 4][4 * n + k % 4]);
            std::memcpy(&tiles.bytes[sums][m][4 * n], &sum, 4);
        }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd
#define _tile_loadconfig emulated::loadconfig
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::loadd
#define _tile_stored emulated::stored
#define _tile_dpbsud emulated::dpbsud
