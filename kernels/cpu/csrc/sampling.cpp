// Penalties, sampling and log-probabilities of rows of logits; kernels/reference/sampling.py has the rules under the
// same names. One thread works on a row from beginning to end, so that the result depends neither on its neighbours nor
// on the number of threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <optional>

#include "row_sampler.h"

namespace quire {
namespace {

// Calls f(row, sampler) for each of `rows`. Threads take them one by one, since some take longer than others.
template <class F>
void parallel_for_rows(int64_t rows, int64_t vocab, F&& f) {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(rows, at::get_num_threads()), 1, [&](int64_t from, int64_t to) {
        for (; from < to; from++) {
            RowSampler sampler(vocab);
            for (int64_t row; (row = next.fetch_add(1)) < rows;) f(row, sampler);
        }
    });
}

void check_logits(const at::Tensor& logits) {
    TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat && logits.size(1) > 0,
                "logits must be (rows, vocabulary), float32 and contiguous");
    TORCH_CHECK(logits.size(1) < TAIL, "the vocabulary is too large");
}

// ids[i] = the token drawn from logits[rows[i]] among those that masks[mask_rows[i]] allows, or among all if that index
// is -1; a temperature below `greedy_below` takes the maximum.
void sample(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& temperature, const at::Tensor& top_k,
            const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& seeds, const at::Tensor& samples,
            const at::Tensor& positions, const at::Tensor& mask_rows, const std::optional<at::Tensor>& masks,
            double greedy_below, at::Tensor& ids) {
    check_logits(logits);
    int64_t count = ids.numel(), vocab = logits.size(1), num_masks = masks ? masks->size(0) : 0;
    int64_t words = (vocab + 31) / 32;
    for (const at::Tensor& t : {rows, temperature, top_k, top_p, min_p, seeds, samples, positions, mask_rows})
        TORCH_CHECK(t.numel() == count && t.is_contiguous(), "one parameter a row, contiguous");
    TORCH_CHECK(!masks || (masks->dim() == 2 && masks->size(1) == words && masks->is_contiguous() &&
                           masks->scalar_type() == at::kInt),
                "masks must be (masks, vocabulary / 32), int32 and contiguous");
    const int32_t* mask_words = masks ? masks->const_data_ptr<int32_t>() : nullptr;
    const int64_t* mask_row = mask_rows.const_data_ptr<int64_t>();
    const float* x = logits.const_data_ptr<float>();
    const int64_t *row = rows.const_data_ptr<int64_t>(), *k = top_k.const_data_ptr<int64_t>();
    const float *t = temperature.const_data_ptr<float>(), *p = top_p.const_data_ptr<float>();
    const float* minimum = min_p.const_data_ptr<float>();
    const int64_t *seed = seeds.const_data_ptr<int64_t>(), *index = samples.const_data_ptr<int64_t>();
    const int64_t* position = positions.const_data_ptr<int64_t>();
    int64_t* out = ids.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < count; i++) {
        TORCH_CHECK(row[i] >= 0 && row[i] < logits.size(0), "no such row");
        TORCH_CHECK(mask_row[i] >= -1 && mask_row[i] < num_masks, "no such mask");
    }
    parallel_for_rows(count, vocab, [&](int64_t i, RowSampler& sampler) {
        Logits allowed{x + row[i] * vocab, vocab, mask_row[i] < 0 ? nullptr : mask_words + mask_row[i] * words};
        Noise noise{seed[i], index[i], position[i]};
        out[i] = t[i] < greedy_below ? argmax(allowed) : sampler.draw(allowed, t[i], k[i], p[i], minimum[i], noise);
    });
}

// Applies penalties to a row x (vocab) in place: repetition for each of its tokens, frequency and presence for those of
// the output. `counts` (vocab) must be 0, and is 0 again at the end. In between, it holds 1 + the number of times in
// the output for each of the tokens.
void penalize(float* x, const int32_t* tokens, int64_t prompt_len, int64_t length, float repetition, float presence,
              float frequency, std::vector<int32_t>& counts) {
    for (int64_t i = 0; i < length; i++) counts[tokens[i]] = std::max(counts[tokens[i]], 1) + (i >= prompt_len);
    for (int64_t i = 0; i < length; i++) {
        int32_t &entry = counts[tokens[i]], count = entry - 1;
        if (entry == 0) continue;  // a token that was handled before
        float& logit = x[tokens[i]];
        logit = logit > 0 ? logit / repetition : logit * repetition;
        logit = logit - frequency * float(count) - presence * float(count > 0);
        entry = 0;
    }
}

void penalties(at::Tensor& logits, const at::Tensor& tokens, const at::Tensor& prompt_lens, const at::Tensor& lengths,
               const at::Tensor& repetition, const at::Tensor& presence, const at::Tensor& frequency) {
    check_logits(logits);
    int64_t count = logits.size(0), vocab = logits.size(1), width = tokens.size(1);
    TORCH_CHECK(tokens.is_contiguous() && tokens.size(0) == count, "tokens (rows, length), contiguous");
    for (const at::Tensor& t : {prompt_lens, lengths, repetition, presence, frequency})
        TORCH_CHECK(t.numel() == count && t.is_contiguous(), "one parameter a row, contiguous");
    const int32_t* ids = tokens.const_data_ptr<int32_t>();
    const int64_t *prompt_len = prompt_lens.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
    const float *repetitions = repetition.const_data_ptr<float>(), *presences = presence.const_data_ptr<float>();
    const float* frequencies = frequency.const_data_ptr<float>();
    float* x = logits.mutable_data_ptr<float>();
    for (int64_t i = 0; i < count; i++) {
        TORCH_CHECK(length[i] <= width, "a row has more tokens than there are");
        for (int64_t j = 0; j < length[i]; j++)
            TORCH_CHECK(ids[i * width + j] >= 0 && ids[i * width + j] < vocab, "no such token");
    }
    at::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
        std::vector<int32_t> counts(vocab);
        for (int64_t i = from; i < to; i++)
            penalize(x + i * vocab, ids + i * width, prompt_len[i], length[i], repetitions[i], presences[i],
                     frequencies[i], counts);
    });
}

// Returns the rank of a token, 1 for the likeliest. Of equal logits, the one with the lower id comes first.
int64_t rank(Logits row, int64_t token) {
    int64_t count = 1;
    for_each_logits(row, [&](int64_t first, F32x16 value) {
        uint32_t lower_ids = token >= first + 16 ? 0xffff : token < first ? 0 : (1u << (token - first)) - 1;
        count += __builtin_popcount(value.lanes_at_least(row[token]) & (~value.lanes_equal(row[token]) | lower_ids));
    });
    return count;
}

// Sets values[i] and ranks[i] of tokens[i] in row i, and ids and values (rows, k) of the best. Lower log-probabilities
// than `floor` become `floor`.
void logprobs(const at::Tensor& logits, const at::Tensor& tokens, double floor, at::Tensor& values, at::Tensor& ranks,
              at::Tensor& top_ids, at::Tensor& top_values) {
    check_logits(logits);
    int64_t count = logits.size(0), vocab = logits.size(1), k = top_ids.size(1);
    TORCH_CHECK(tokens.numel() == count && tokens.is_contiguous() && k <= vocab,
                "one token a row, k of the vocabulary");
    const float* x = logits.const_data_ptr<float>();
    const int64_t* token = tokens.const_data_ptr<int64_t>();
    float *value_out = values.mutable_data_ptr<float>(), *top_value_out = top_values.mutable_data_ptr<float>();
    int64_t *rank_out = ranks.mutable_data_ptr<int64_t>(), *top_id_out = top_ids.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < count; i++) TORCH_CHECK(token[i] >= 0 && token[i] < vocab, "no such token");
    parallel_for_rows(count, vocab, [&](int64_t i, RowSampler& sampler) {
        Logits row{x + i * vocab, vocab};
        float maximum = row_max(row);
        DoubleSum mass;
        for_each_logits(row, [&](int64_t, F32x16 value) { mass.add(exp(value - F32x16::set(maximum))); });
        float total = maximum + float(std::log(mass.value()));
        auto logprob = [&](float logit) {
            float value = logit - total;
            return value > floor ? value : float(floor);  // `floor` for NaN too
        };
        value_out[i] = logprob(row[token[i]]), rank_out[i] = rank(row, token[i]);
        if (k == 0) return;
        const std::vector<Candidate>& best = sampler.top_k(row, maximum, k);
        for (int64_t j = 0; j < k; j++) {
            top_id_out[i * k + j] = best[j].id;
            top_value_out[i * k + j] = logprob(best[j].z);
        }
    });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "penalties(Tensor(a!) logits, Tensor tokens, Tensor prompt_lens, Tensor lengths, Tensor repetition, "
        "Tensor presence, Tensor frequency) -> ()");
    m.def(
        "sample(Tensor logits, Tensor rows, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
        "Tensor seeds, Tensor samples, Tensor positions, Tensor mask_rows, Tensor? masks, float greedy_below, "
        "Tensor(a!) ids) -> ()");
    m.def(
        "logprobs(Tensor logits, Tensor tokens, float floor, Tensor(a!) values, Tensor(b!) ranks, Tensor(c!) top_ids, "
        "Tensor(d!) top_values) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("penalties", penalties);
    m.impl("sample", sample);
    m.impl("logprobs", logprobs);
}

}  // namespace quire
