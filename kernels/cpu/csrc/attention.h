// Paged attention on plain memory, for other kernels to call; formula and rules stand with attention.cpp.
#pragma once

#include <cstdint>
#include <optional>

#include "kv_cache.h"

namespace quire {

struct AttentionProblem {
    const float* q;  // (tokens, heads, head_dim), the last contiguous
    int64_t q_token, q_head;  // strides
    float* out;  // (tokens, heads, head_dim) contiguous
    KVCache cache;
    const int64_t* offsets;  // (rows + 1): where each row's queries are in q
    const int64_t* starts;   // (rows): the position of its first one
    int64_t rows;
    const int32_t* tables;  // (rows, table_width)
    int64_t table_width;
    int heads, head_dim;
    float scale;
    float softcap;  // 0: none
    int window;     // 0: none
    // What the cache's keys (before rotation) and values lack, the same for all tokens: (kv_heads, head_dim), or nullptr.
    const float *key_bias, *value_bias;
    // (tiles, rotated, 64): the cosines, then the sines of 64 positions a tile, for `rotated` / 2 pairs of dimensions.
    const float* angles;
    int64_t rotated, angle_tiles;  // without angles 0
};

// Sets what the problem's keys and values lack, and the angles of its rope, from tensors of these shapes; raises
// c10::Error if they have others.
void lack(AttentionProblem& problem, const std::optional<at::Tensor>& key_bias,
          const std::optional<at::Tensor>& value_bias, const std::optional<at::Tensor>& angles);

// Raises c10::Error for a block size or number of heads that there is no kernel for.
void paged_attention(const AttentionProblem& problem);

}  // namespace quire
