// A decoder's layers in one call: norm, attention, norm, feed-forward, each added to what came in.
//
// Tokens go through a layer in blocks, so that what one step of it makes is still in a core's cache when the next step
// wants it: the activated output of the first product is quantised for the second one before it is ever written. Blocks
// are taken in order, and a token's context lies before it, so its keys and values are there when it asks for them.
//
// The numbers are those of the single operations, to the bit: they are made by the same functions.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "matrix.h"
#include "tiles.h"

namespace quire {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

const float* data(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr<float>() : nullptr; }

// A packed matrix and its bias, which it keeps alive.
struct Projection : torch::CustomClassHolder {
    Tensor packed;
    MaybeTensor bias;
    Matrix matrix;

    // `bits` is 0 for a matrix of floats; `least` and `zero` then mean nothing.
    Projection(Tensor packed, int64_t outputs, int64_t bits, bool least, int64_t zero, MaybeTensor bias)
        : packed(packed), bias(bias),
          matrix(bits ? quantized_matrix(packed, outputs, bits, least, zero) : float_matrix(packed, outputs)) {
        TORCH_CHECK(!bias || (bias->numel() == outputs && bias->is_contiguous() && bias->scalar_type() == at::kFloat),
                    "a bias is float32, one number for each output");
    }
};
using ProjectionPtr = c10::intrusive_ptr<Projection>;

struct Layer {
    Tensor attention_norm, mlp_norm;
    ProjectionPtr qkv, out, up, down;
    MaybeTensor q_norm, k_norm, attention_post_norm, mlp_post_norm, key_bias, value_bias;
    int64_t window, rope;  // 0: none; which of the model's ropes, or -1
};

// Some of the batch's tokens, in order: `first` is the first one's place; offsets, starts and tables are of their rows.
struct Block {
    int64_t first, count, row;
    std::vector<int64_t> offsets, starts;
};

std::vector<Block> blocks_of(int64_t tokens, const int64_t* offsets, const int64_t* starts) {
    std::vector<Block> blocks;
    int64_t row = 0;
    over_blocks(tokens, BLOCK, [&](int64_t first, int64_t count) {
        while (offsets[row + 1] <= first) row++;
        Block block{first, count, row, {0}, {}};
        for (int64_t r = row; offsets[r] < first + count; r++) {
            block.starts.push_back(starts[r] + std::max<int64_t>(0, first - offsets[r]));
            block.offsets.push_back(std::min(first + count, offsets[r + 1]) - first);
            if (offsets[r + 1] >= first + count) break;
        }
        blocks.push_back(std::move(block));
    });
    return blocks;
}

struct DecoderLayers : torch::CustomClassHolder {
    DecoderLayers(int64_t heads, int64_t kv_heads, int64_t head_dim, double scale, double softcap, double eps, bool gelu,
                  bool gated)
        : heads(heads), kv_heads(kv_heads), head_dim(head_dim), scale(scale), softcap(softcap), eps(eps), gelu(gelu),
          gated(gated) {}

    void add(Tensor attention_norm, ProjectionPtr qkv, MaybeTensor q_norm, MaybeTensor k_norm, ProjectionPtr out,
             MaybeTensor attention_post_norm, Tensor mlp_norm, ProjectionPtr up, ProjectionPtr down,
             MaybeTensor mlp_post_norm, MaybeTensor key_bias, MaybeTensor value_bias, int64_t window, int64_t rope) {
        int64_t hidden = attention_norm.numel(), inner = down->matrix.inputs;
        TORCH_CHECK(qkv->matrix.inputs == hidden && qkv->matrix.outputs == (heads + 2 * kv_heads) * head_dim &&
                        out->matrix.inputs == heads * head_dim && out->matrix.outputs == hidden,
                    "the attention's matrices are of other sizes");
        TORCH_CHECK(up->matrix.inputs == hidden && up->matrix.outputs == (gated ? 2 : 1) * inner &&
                        down->matrix.outputs == hidden && inner % PANEL == 0,
                    "the feed-forward block's matrices are of other sizes");
        normed.resize(BLOCK * hidden);
        qkv_rows.resize(BLOCK * qkv->matrix.outputs);
        rotated_qk.resize(BLOCK * (heads + kv_heads) * head_dim);
        attended.resize(BLOCK * heads * head_dim);
        inner_rows.resize(std::max<size_t>(inner_rows.size(), BLOCK * inner));
        layers.push_back({attention_norm, mlp_norm, qkv, out, up, down, q_norm, k_norm, attention_post_norm, mlp_post_norm,
                          key_bias, value_bias, window, rope});
    }

    // Hidden states (T, H) of embeddings `x` (T, H); keys and values go to the caches, a pair for each layer. `angles` has
    // a table for each rope, or nothing if no keys lack a bias.
    Tensor forward(Tensor x, std::vector<Tensor> keys, std::vector<Tensor> values, Tensor slots, Tensor offsets,
                   Tensor starts, Tensor tables, std::vector<Tensor> cos, std::vector<Tensor> sin,
                   std::vector<Tensor> angles) {
        TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "x must be float32 and contiguous");
        TORCH_CHECK(keys.size() == layers.size() && values.size() == layers.size(), "a cache for each layer");
        TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.numel() == x.size(0), "slots");
        TORCH_CHECK(tables.scalar_type() == at::kInt && tables.is_contiguous(), "tables must be int32 and contiguous");
        const int64_t *row_offsets = offsets.const_data_ptr<int64_t>(), *row_starts = starts.const_data_ptr<int64_t>();
        std::vector<Block> blocks = blocks_of(x.size(0), row_offsets, row_starts);
        Tensor stream = x.clone(), part = at::empty_like(x);
        for (size_t l = 0; l < layers.size(); l++) {
            const Layer& layer = layers[l];
            KVCache cache = kv_cache(keys[l], values[l]);
            for (const Block& block : blocks) {
                float* s = stream.mutable_data_ptr<float>() + block.first * x.size(1);
                float* p = part.mutable_data_ptr<float>() + block.first * x.size(1);
                norm(l ? p : nullptr, s, layer.attention_norm, layer.qkv->matrix, block.count);
                project(*layer.qkv, normed.data(), block.count, qkv_rows.data());
                const float *c = nullptr, *n = nullptr;
                int64_t rotated = 0;
                if (layer.rope >= 0) {
                    rotated = cos[layer.rope].size(1);
                    c = cos[layer.rope].const_data_ptr<float>() + block.first * rotated;
                    n = sin[layer.rope].const_data_ptr<float>() + block.first * rotated;
                }
                MaybeTensor turns;
                if (layer.rope >= 0 && layer.key_bias) turns = angles.at(layer.rope);
                attend(layer, cache, block, c, n, rotated, slots.const_data_ptr<int64_t>() + block.first, tables, turns);
                quantize_for(layer.out->matrix, attended.data(), heads * head_dim, block.count, rows);
                project(*layer.out, attended.data(), block.count, p);
                post_norm(layer.attention_post_norm, p, block.count, x.size(1));
                norm(p, s, layer.mlp_norm, layer.up->matrix, block.count);
                feed_forward(layer, block.count, p);
                post_norm(layer.mlp_post_norm, p, block.count, x.size(1));
            }
        }
        return stream.add_(part);
    }

private:
    int64_t heads, kv_heads, head_dim;
    double scale, softcap, eps;
    bool gelu, gated;
    std::vector<Layer> layers;
    // Of one block.
    QuantizedRows rows, activated_rows;
    std::vector<float> normed, qkv_rows, rotated_qk, attended, inner_rows;

    // stream += part, and the sum's norm to `normed` and, if `next` wants that, to `rows`.
    void norm(const float* part, float* stream, const Tensor& weight, const Matrix& next, int64_t count) {
        int64_t width = weight.numel();
        if (next.quantized()) rows.reset(count, width);
        at::parallel_for(0, count, FEW, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++) {
                float *own = stream + row * width, *y = &normed[row * width];
                add_rms_norm(part ? part + row * width : own, part ? own : nullptr, weight.const_data_ptr<float>(), eps,
                             1, width, y, own);
                if (next.quantized()) rows.set(row, y, width);
            }
        });
    }

    void post_norm(const MaybeTensor& weight, float* x, int64_t count, int64_t width) {
        if (weight) add_rms_norm(x, nullptr, data(weight), eps, count, width, x, nullptr);
    }

    void project(const Projection& p, const float* x, int64_t count, float* y) {
        multiply(p.matrix, {x, p.matrix.inputs, count, &rows}, data(p.bias), y);
    }

    // From `qkv_rows` to `attended`.
    void attend(const Layer& layer, const KVCache& cache, const Block& block, const float* cos, const float* sin,
                int64_t rotated, const int64_t* slots, const Tensor& tables, const MaybeTensor& angles) {
        int64_t token = (heads + 2 * kv_heads) * head_dim;
        if (layer.q_norm)
            at::parallel_for(0, block.count, FEW, [&](int64_t from, int64_t to) {
                for (int64_t t = from; t < to; t++) {
                    float *q = &qkv_rows[t * token], *k = q + heads * head_dim;
                    add_rms_norm(q, nullptr, data(layer.q_norm), eps, heads, head_dim, q, nullptr);
                    add_rms_norm(k, nullptr, data(layer.k_norm), eps, kv_heads, head_dim, k, nullptr);
                }
            });
        Heads qk{qkv_rows.data(), token, head_dim}, v{qkv_rows.data() + (heads + kv_heads) * head_dim, token, head_dim};
        if (cos) {
            rotary(qk, cos, sin, block.count, heads + kv_heads, head_dim, rotated, rotated_qk.data());
            qk = {rotated_qk.data(), (heads + kv_heads) * head_dim, head_dim};
        }
        Heads k{qk.data + heads * head_dim, qk.token, head_dim};
        write_kv(k, v, block.count, head_dim, cache, slots);
        AttentionProblem problem{
            qk.data, qk.token, qk.head, attended.data(), cache, block.offsets.data(), block.starts.data(),
            int64_t(block.starts.size()), tables.const_data_ptr<int32_t>() + block.row * tables.size(1),
            tables.size(1), int(heads), int(head_dim), float(scale), float(softcap), int(layer.window)};
        lack(problem, layer.key_bias, layer.value_bias, angles);
        paged_attention(problem);
    }

    // From `normed` and `rows` to y.
    void feed_forward(const Layer& layer, int64_t count, float* y) {
        const Matrix &up = layer.up->matrix, &down = layer.down->matrix;
        int64_t width = down.inputs, panels = width / PANEL;
        const float* bias = data(layer.up->bias);
        if (down.quantized()) activated_rows.reset(count, width);
        Input in{normed.data(), up.inputs, count, &rows};
        over_panels(panels, [&](int64_t panel) {
            alignas(64) float gate_sums[BLOCK * PANEL], up_sums[BLOCK * PANEL];
            panel_sums(up, in, panel, gate_sums);
            if (gated) panel_sums(up, in, panels + panel, up_sums);
            for (int64_t row = 0; row < count; row++) {
                F32x16 half[2];
                for (int h = 0; h < 2; h++) {
                    int64_t at = row * PANEL + h * 16, place = panel * PANEL + h * 16;
                    half[h] = F32x16::load(gate_sums + at);
                    if (bias) half[h] = half[h] + F32x16::load(bias + place);
                    half[h] = activated(half[h], gelu);
                    if (!gated) continue;
                    F32x16 other = F32x16::load(up_sums + at);
                    if (bias) other = other + F32x16::load(bias + width + place);
                    half[h] = half[h] * other;
                }
                if (down.quantized()) {
                    activated_rows.set(row, panel, half[0], half[1]);
                } else {
                    half[0].store(&inner_rows[row * width + panel * PANEL]);
                    half[1].store(&inner_rows[row * width + panel * PANEL + 16]);
                }
            }
        });
        multiply(down, {inner_rows.data(), width, count, &activated_rows}, data(layer.down->bias), y);
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.class_<Projection>("Projection")
        .def(torch::init<Tensor, int64_t, int64_t, bool, int64_t, MaybeTensor>());
    m.class_<DecoderLayers>("DecoderLayers")
        .def(torch::init<int64_t, int64_t, int64_t, double, double, double, bool, bool>())
        .def("add", &DecoderLayers::add)
        .def("forward", &DecoderLayers::forward);
}

}  // namespace quire
