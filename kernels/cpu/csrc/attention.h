// Paged attention on raw pointers, for other kernels to call. attention.cpp explains the algorithm.
#pragma once

#include <cstdint>
#include <optional>

#include "kv_cache.h"

namespace quire {

struct AttentionProblem {
    const float* q;  // (tokens, heads, head_dim), the last contiguous
    int64_t q_token_stride, q_head_stride;
    float* out;  // (tokens, heads, head_dim) contiguous
    KVCache cache;
    const int64_t* offsets;  // (rows + 1): row r's queries are q[offsets[r]] to q[offsets[r + 1] - 1]
    const int64_t* starts;   // (rows): the position of each row's first query
    int64_t rows;
    const int32_t* block_tables;  // (rows, table_width)
    int64_t table_width;
    int heads, head_dim;
    float scale;
    float softcap;  // 0: none
    int window;     // positions that a query sees, its own included; 0: all
    // The biases that the cache leaves out of keys (before rotation) and values: (kv_heads, head_dim), or nullptr.
    const float *key_bias, *value_bias;
    // (angle_tiles, rotated, 64), a tile for each 64 positions: the cosines of `rotated` / 2 pairs of dimensions, then
    // the sines.
    const float* angles;
    int64_t rotated, angle_tiles;  // 0 without angles
};

// Sets the problem's biases and angles. Raises c10::Error if a shape is not that of the field.
void set_kv_bias(AttentionProblem& problem, const std::optional<at::Tensor>& key_bias,
                 const std::optional<at::Tensor>& value_bias, const std::optional<at::Tensor>& angles);

// Raises c10::Error for a block size or number of heads that there is no kernel for.
void paged_attention(const AttentionProblem& problem);

}  // namespace quire
