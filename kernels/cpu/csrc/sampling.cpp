// From rows of logits to tokens, and to log-probabilities; what a token depends on stands with the references of the
// same names in kernels/reference. A row is one thread's from beginning to end, so that neither its neighbours nor the
// number of threads make a difference.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>

#include "draw.h"

namespace quire {
namespace {

// Calls f(row, work) for each of `rows`; threads take them one by one, since some take longer than others.
template <class F>
void each_row(int64_t rows, int64_t vocab, F&& f) {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(rows, at::get_num_threads()), 1, [&](int64_t from, int64_t to) {
        for (; from < to; from++) {
            Row work(vocab);
            for (int64_t row; (row = next.fetch_add(1)) < rows;) f(row, work);
        }
    });
}

void check(const at::Tensor& logits) {
    TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat && logits.size(1) > 0,
                "logits must be (rows, vocabulary), float32 and contiguous");
    TORCH_CHECK(logits.size(1) < TAIL, "a vocabulary beyond 2^31");
}

// ids[i] = the token drawn from logits[rows[i]]; a temperature below `greedy_below` takes the largest.
void sample(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& temperature, const at::Tensor& top_k,
            const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& seeds, const at::Tensor& samples,
            const at::Tensor& positions, double greedy_below, at::Tensor& ids) {
    check(logits);
    int64_t count = ids.numel(), vocab = logits.size(1);
    for (const at::Tensor& t : {rows, temperature, top_k, top_p, min_p, seeds, samples, positions})
        TORCH_CHECK(t.numel() == count && t.is_contiguous(), "one parameter a row, contiguous");
    const float* x = logits.const_data_ptr<float>();
    const int64_t *row = rows.const_data_ptr<int64_t>(), *k = top_k.const_data_ptr<int64_t>();
    const float *t = temperature.const_data_ptr<float>(), *p = top_p.const_data_ptr<float>();
    const float* least = min_p.const_data_ptr<float>();
    const int64_t *seed = seeds.const_data_ptr<int64_t>(), *index = samples.const_data_ptr<int64_t>();
    const int64_t* position = positions.const_data_ptr<int64_t>();
    int64_t* out = ids.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < count; i++) TORCH_CHECK(row[i] >= 0 && row[i] < logits.size(0), "no such row");
    each_row(count, vocab, [&](int64_t i, Row& work) {
        const float* from = x + row[i] * vocab;
        out[i] = t[i] < greedy_below ? argmax(from, vocab)
                                     : work.draw(from, t[i], k[i], p[i], least[i], {seed[i], index[i], position[i]});
    });
}

// In place: repetition for each token that is known, frequency and presence for those of the output. `seen` is zero for
// all of the vocabulary, and is left so.
void penalise(float* x, const int32_t* tokens, int64_t prompt, int64_t length, float repetition, float presence,
              float frequency, std::vector<int32_t>& seen) {
    for (int64_t i = 0; i < length; i++) seen[tokens[i]] = std::max(seen[tokens[i]], 1) + (i >= prompt);
    for (int64_t i = 0; i < length; i++) {
        int32_t &times = seen[tokens[i]], count = times - 1;
        if (times == 0) continue;  // done
        float& logit = x[tokens[i]];
        logit = logit > 0 ? logit / repetition : logit * repetition;
        logit = logit - frequency * float(count) - presence * float(count > 0);
        times = 0;
    }
}

void penalties(at::Tensor& logits, const at::Tensor& tokens, const at::Tensor& prompts, const at::Tensor& lengths,
               const at::Tensor& repetition, const at::Tensor& presence, const at::Tensor& frequency) {
    check(logits);
    int64_t count = logits.size(0), vocab = logits.size(1), width = tokens.size(1);
    TORCH_CHECK(tokens.is_contiguous() && tokens.size(0) == count, "tokens (rows, length), contiguous");
    for (const at::Tensor& t : {prompts, lengths, repetition, presence, frequency})
        TORCH_CHECK(t.numel() == count && t.is_contiguous(), "one parameter a row, contiguous");
    const int32_t* ids = tokens.const_data_ptr<int32_t>();
    const int64_t *prompt = prompts.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
    const float *again = repetition.const_data_ptr<float>(), *present = presence.const_data_ptr<float>();
    const float* often = frequency.const_data_ptr<float>();
    float* x = logits.mutable_data_ptr<float>();
    for (int64_t i = 0; i < count; i++) {
        TORCH_CHECK(length[i] <= width, "a row has more tokens than there are");
        for (int64_t j = 0; j < length[i]; j++)
            TORCH_CHECK(ids[i * width + j] >= 0 && ids[i * width + j] < vocab, "no such token");
    }
    at::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
        std::vector<int32_t> seen(vocab);
        for (int64_t i = from; i < to; i++)
            penalise(x + i * vocab, ids + i * width, prompt[i], length[i], again[i], present[i], often[i], seen);
    });
}

// How many come before a token, itself included.
int64_t rank(const float* x, int64_t vocab, int64_t token) {
    int64_t count = 1;
    over(x, vocab, [&](int64_t first, F32x16 value) {
        uint32_t same = value.lanes_equal(x[token]), lower = token >= first + 16 ? 0xffff : token < first ? 0 : (1u << (token - first)) - 1;
        count += __builtin_popcount(value.lanes_at_least(x[token]) & (~same | lower));
    });
    return count;
}

// chosen[i] and ranks[i]: of tokens[i] in row i; ids and values (rows, k): of the best. All that is lower is `floor`.
void logprobs(const at::Tensor& logits, const at::Tensor& tokens, double floor, at::Tensor& chosen, at::Tensor& ranks,
              at::Tensor& ids, at::Tensor& values) {
    check(logits);
    int64_t count = logits.size(0), vocab = logits.size(1), k = ids.size(1);
    TORCH_CHECK(tokens.numel() == count && tokens.is_contiguous() && k <= vocab, "one token a row, k of the vocabulary");
    const float* x = logits.const_data_ptr<float>();
    const int64_t* token = tokens.const_data_ptr<int64_t>();
    float *chosen_out = chosen.mutable_data_ptr<float>(), *value_out = values.mutable_data_ptr<float>();
    int64_t *rank_out = ranks.mutable_data_ptr<int64_t>(), *id_out = ids.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < count; i++) TORCH_CHECK(token[i] >= 0 && token[i] < vocab, "no such token");
    each_row(count, vocab, [&](int64_t i, Row& work) {
        const float* row = x + i * vocab;
        float most = peak(row, vocab);
        Total weights;
        over(row, vocab, [&](int64_t, F32x16 value) { weights.add(exp(value - F32x16::set(most))); });
        float total = most + float(std::log(weights.value()));
        auto reported = [&](float logit) {
            float value = logit - total;
            return value > floor ? value : float(floor);  // NaN is not
        };
        chosen_out[i] = reported(row[token[i]]), rank_out[i] = rank(row, vocab, token[i]);
        if (k == 0) return;
        const std::vector<Entry>& best = work.best(row, most, k);
        for (int64_t j = 0; j < k; j++) id_out[i * k + j] = best[j].id, value_out[i * k + j] = reported(best[j].z);
    });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "penalties(Tensor(a!) logits, Tensor tokens, Tensor prompts, Tensor lengths, Tensor repetition, "
        "Tensor presence, Tensor frequency) -> ()");
    m.def(
        "sample(Tensor logits, Tensor rows, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
        "Tensor seeds, Tensor samples, Tensor positions, float greedy_below, Tensor(a!) ids) -> ()");
    m.def(
        "logprobs(Tensor logits, Tensor tokens, float floor, Tensor(a!) chosen, Tensor(b!) ranks, Tensor(c!) ids, "
        "Tensor(d!) values) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("penalties", penalties);
    m.impl("sample", sample);
    m.impl("logprobs", logprobs);
}

}  // namespace quire
