// Paged attention on plain memory, for other kernels to call; formula and rules stand with attention.cpp.
#pragma once

#include <cstdint>

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
};

// Raises c10::Error for a block size or number of heads that there is no kernel for.
void paged_attention(const AttentionProblem& problem);

}  // namespace quire
