// All layers of a decoder in one call. A layer is x + attention(norm(x)), then x + feed_forward(norm(x)).
//
// Tokens go through a layer in blocks, so that the result of one operation is still in a core's cache when the next one
// reads it; the activated output of the first GEMM of a feed-forward block is quantised for the second one before it is
// written. Blocks are processed in order. A token's context precedes it, so its keys and values are in the KV cache
// when its attention is computed.
//
// Of the last layer, only the tokens whose hidden states are read need more than their keys and values. Those are the
// last ones of rows, mostly one of a whole prompt.
//
// The results are equal to those of the single operations, bit for bit: the same functions compute them.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "lora.h"
#include "matrix.h"
#include "tiles.h"

namespace quire {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

const float* data(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr<float>() : nullptr; }

using FieldValues = c10::Dict<std::string, c10::IValue>;

// The fields of a Python named tuple. A struct reads them by name where it declares its members.
class Fields {
  public:
    explicit Fields(const FieldValues& values) : values_(values.copy()) {}

    template <class T>
    T read(const char* name) {
        TORCH_CHECK(values_.contains(name), "the field ", name, " is missing");
        c10::IValue value = values_.at(name);
        (void)values_.erase(name);
        if constexpr (std::is_same_v<T, double>) return value.toScalar().toDouble();  // Python may have an integer
        else return value.to<T>();
    }

    void check_all_read() const {
        for (const auto& entry : values_) TORCH_CHECK(false, "the field ", entry.key(), " is not known here");
    }

  private:
    FieldValues values_;
};

Matrix matrix_of(const Tensor& packed, int64_t outputs, const std::string& format, int64_t bits, bool has_mins,
                 int64_t zero_point, at::TensorList outliers) {
    if (format == "floats") return float_matrix(packed, outputs);
    if (format == "table") return table_matrix(packed, outputs, outliers);
    if (format == "group") return group_matrix(packed, outputs, bits, has_mins, zero_point);
    TORCH_CHECK(format == "channel", "no kernel for weights of the format ", format);
    return channel_matrix(packed, outputs, bits);
}

// A packed matrix, its bias (outputs) and its adapters. It owns the tensors that `matrix` points to.
struct Projection : torch::CustomClassHolder {
    Tensor packed;
    std::vector<Tensor> outliers;
    MaybeTensor bias;
    Matrix matrix;
    std::optional<LoraStack> lora;

    // A matrix of floats ignores `bits`, only one with groups reads `has_mins` and `zero_point`, only one with tables
    // `outliers`.
    Projection(Tensor packed, int64_t outputs, std::string format, int64_t bits, bool has_mins, int64_t zero_point,
               std::vector<Tensor> outliers, MaybeTensor bias)
        : packed(packed),
          outliers(outliers),
          bias(bias),
          matrix(matrix_of(packed, outputs, format, bits, has_mins, zero_point, outliers)) {
        TORCH_CHECK(!bias || (bias->numel() == outputs && bias->is_contiguous() && bias->scalar_type() == at::kFloat),
                    "a bias is float32, one number for each output");
    }

    void set_lora(Tensor a, Tensor b, Tensor ranks, std::vector<int64_t> part_outputs) {
        lora.emplace(a, b, ranks, part_outputs);
        TORCH_CHECK(lora->inputs() == matrix.inputs && lora->outputs() == matrix.outputs,
                    "the adapters are for a matrix of another size");
    }
};
using ProjectionPtr = c10::intrusive_ptr<Projection>;

// `LayerConfig` of kernels/decoder_layers.py.
struct LayerConfig {
    Fields fields;

    int64_t heads = fields.read<int64_t>("heads");
    int64_t kv_heads = fields.read<int64_t>("kv_heads");
    int64_t head_dim = fields.read<int64_t>("head_dim");
    double scale = fields.read<double>("scale");
    double softcap = fields.read<double>("softcap");
    double eps = fields.read<double>("eps");
    std::string activation = fields.read<std::string>("activation");

    bool gelu = activation == "gelu_tanh" || activation == "gelu_tanh_and_mul";
    bool gated = activation == "silu_and_mul" || activation == "gelu_tanh_and_mul";

    explicit LayerConfig(const FieldValues& values) : fields(values) {
        fields.check_all_read();
        TORCH_CHECK(gelu || gated, "no kernel for the activation ", activation);
    }
};

// `DecoderLayer` of kernels/decoder_layers.py.
struct DecoderLayer {
    Fields fields;

    Tensor attention_norm = fields.read<Tensor>("attention_norm");
    ProjectionPtr qkv = fields.read<ProjectionPtr>("qkv");
    MaybeTensor q_norm = fields.read<MaybeTensor>("q_norm");
    MaybeTensor k_norm = fields.read<MaybeTensor>("k_norm");
    ProjectionPtr out = fields.read<ProjectionPtr>("out");
    MaybeTensor attention_post_norm = fields.read<MaybeTensor>("attention_post_norm");
    Tensor mlp_norm = fields.read<Tensor>("mlp_norm");
    ProjectionPtr up = fields.read<ProjectionPtr>("up");
    ProjectionPtr down = fields.read<ProjectionPtr>("down");
    MaybeTensor mlp_post_norm = fields.read<MaybeTensor>("mlp_post_norm");
    int64_t window = fields.read<int64_t>("window");
    std::optional<int64_t> rope = fields.read<std::optional<int64_t>>("rope");
    std::tuple<MaybeTensor, MaybeTensor> kv_bias = fields.read<std::tuple<MaybeTensor, MaybeTensor>>("kv_bias");

    explicit DecoderLayer(const FieldValues& values) : fields(values) { fields.check_all_read(); }

    void check_sizes(const LayerConfig& config) const {
        int64_t hidden = attention_norm.numel(), inner = down->matrix.inputs, heads = config.heads * config.head_dim;
        TORCH_CHECK(qkv->matrix.inputs == hidden && out->matrix.inputs == heads && out->matrix.outputs == hidden &&
                        qkv->matrix.outputs == heads + 2 * config.kv_heads * config.head_dim,
                    "the sizes of the attention's matrices do not match");
        TORCH_CHECK(up->matrix.inputs == hidden && up->matrix.outputs == (config.gated ? 2 : 1) * inner &&
                        down->matrix.outputs == hidden && inner % PANEL == 0,
                    "the sizes of the feed-forward block's matrices do not match");
    }
};

// Consecutive tokens of the batch: the index of the first token and of its row. `offsets` and `starts` are those of the
// parts of rows that the block has; see AttentionProblem. `adapters` are the tokens that use one.
struct TokenBlock {
    int64_t first, count, row;
    std::vector<int64_t> offsets, starts;
    std::vector<LoraSegment> adapters;
};

std::vector<TokenBlock> split_into_blocks(int64_t tokens, const int64_t* offsets, const int64_t* starts) {
    std::vector<TokenBlock> blocks;
    int64_t row = 0;
    for_even_blocks(tokens, MAX_BLOCK_ROWS, [&](int64_t first, int64_t count) {
        while (offsets[row + 1] <= first) row++;
        TokenBlock block{first, count, row, {0}, {}, {}};
        for (int64_t r = row; offsets[r] < first + count; r++) {
            block.starts.push_back(starts[r] + std::max<int64_t>(0, first - offsets[r]));
            block.offsets.push_back(std::min(first + count, offsets[r + 1]) - first);
            if (offsets[r + 1] >= first + count) break;
        }
        blocks.push_back(std::move(block));
    });
    return blocks;
}

// The last tokens of rows, whose hidden states are read, as rows of their own. They see the same contexts.
struct OutputRows {
    Tensor offsets, starts, lora_offsets;  // like those of all tokens

    // `outputs` (N) are indices of tokens, ascending. `offsets` and `starts` are those of the rows of all tokens.
    OutputRows(const Tensor& outputs, const Tensor& all_offsets, const Tensor& all_starts,
               const Tensor& all_lora_offsets)
        : offsets(at::searchsorted(outputs, all_offsets)),
          starts(all_starts + (all_offsets.diff() - offsets.diff())),
          lora_offsets(at::searchsorted(outputs, all_lora_offsets)) {
        const int64_t *token = outputs.const_data_ptr<int64_t>(), *from = offsets.const_data_ptr<int64_t>();
        const int64_t* end = all_offsets.const_data_ptr<int64_t>() + 1;
        for (int64_t row = 0; row < starts.numel(); row++)
            for (int64_t i = from[row]; i < from[row + 1]; i++)
                TORCH_CHECK(token[i] == end[row] - (from[row + 1] - i), "the outputs must be the last tokens of rows");
        TORCH_CHECK(from[0] == 0 && from[starts.numel()] == outputs.numel(), "an output is no token");
    }
};

float* row(const Tensor& tensor, int64_t index) { return tensor.mutable_data_ptr<float>() + index * tensor.size(1); }

// Cosines and sines (tokens, width) of a block's tokens; nullptr if the layer has no rope.
struct Rotation {
    const float *cos = nullptr, *sin = nullptr;
    int64_t width = 0;
};

Rotation rotation_of(const Tensor& cos, const Tensor& sin, int64_t first) {
    int64_t width = cos.size(1);
    return {cos.const_data_ptr<float>() + first * width, sin.const_data_ptr<float>() + first * width, width};
}

struct DecoderLayers : torch::CustomClassHolder {
    explicit DecoderLayers(const FieldValues& config) : config(config) {}

    void add(const FieldValues& values) {
        DecoderLayer layer(values);
        layer.check_sizes(config);
        normed.resize(MAX_BLOCK_ROWS * layer.attention_norm.numel());
        qkv_rows.resize(MAX_BLOCK_ROWS * layer.qkv->matrix.outputs);
        rotated_qk.resize(MAX_BLOCK_ROWS * (config.heads + config.kv_heads) * config.head_dim);
        attended.resize(MAX_BLOCK_ROWS * config.heads * config.head_dim);
        inner_rows.resize(std::max<size_t>(inner_rows.size(), MAX_BLOCK_ROWS * layer.down->matrix.inputs));
        for (const ProjectionPtr& projection : {layer.qkv, layer.out, layer.up, layer.down})
            adapter_slots = std::min(adapter_slots, projection->lora ? projection->lora->a.size(0) : 0);
        layers.push_back(std::move(layer));
    }

    // Returns the hidden states (N, H) of the tokens `outputs` (N), which are the last ones of rows, or without it of
    // all tokens (T, H), for embeddings `x` (T, H). Writes keys and values to the caches of each layer. `cos` and `sin`
    // are a tensor (T, R) for each rope. `angles` are a tensor (tiles, R, 64) for each rope, or empty if no layer has a
    // bias of keys in `kv_bias`. `lora_slots` and `lora_offsets` are those of `LoraSegments`; both are empty if no token
    // uses an adapter.
    Tensor forward(Tensor x, std::vector<Tensor> keys, std::vector<Tensor> values, Tensor slot_mapping, Tensor offsets,
                   Tensor starts, Tensor block_tables, std::vector<Tensor> cos, std::vector<Tensor> sin,
                   std::vector<Tensor> angles, Tensor lora_slots, Tensor lora_offsets, MaybeTensor outputs) {
        TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "x must be float32 and contiguous");
        TORCH_CHECK(keys.size() == layers.size() && values.size() == layers.size(),
                    "there must be a cache for each layer");
        TORCH_CHECK(slot_mapping.scalar_type() == at::kLong && slot_mapping.is_contiguous() &&
                        slot_mapping.numel() == x.size(0),
                    "a slot for each token, int64 and contiguous");
        TORCH_CHECK(block_tables.scalar_type() == at::kInt && block_tables.is_contiguous(),
                    "block tables must be int32 and contiguous");
        TORCH_CHECK(!outputs || (outputs->scalar_type() == at::kLong && outputs->is_contiguous()),
                    "outputs must be int64 and contiguous");
        std::vector<TokenBlock> blocks = token_blocks(x.size(0), offsets, starts, lora_slots, lora_offsets);
        std::optional<OutputRows> rows;
        if (outputs && outputs->numel() < x.size(0)) rows.emplace(*outputs, offsets, starts, lora_offsets);
        // `branch` is the last output of attention or feed-forward. The next norm adds it to the residual.
        Tensor residual = x.clone(), branch = at::empty_like(x);
        for (size_t index = 0; index < layers.size(); index++) {
            const DecoderLayer& layer = layers[index];
            LayerCall call{layer, kv_cache(keys[index], values[index]), block_tables, std::nullopt};
            if (layer.rope && std::get<0>(layer.kv_bias)) call.angles = angles.at(*layer.rope);
            auto store_block = [&](const TokenBlock& block) {
                Rotation rotation;
                if (layer.rope) rotation = rotation_of(cos[*layer.rope], sin[*layer.rope], block.first);
                adapters.segments = block.adapters;
                return store_context(call, block.count, rotation, slot_mapping.const_data_ptr<int64_t>() + block.first,
                                     index ? row(branch, block.first) : nullptr, row(residual, block.first));
            };
            if (!rows || index + 1 < layers.size()) {
                for (const TokenBlock& block : blocks)
                    finish(call, block, store_block(block), row(residual, block.first), row(branch, block.first));
                continue;
            }
            Tensor queries = at::empty({outputs->numel(), config.heads * config.head_dim});
            const int64_t* token = outputs->const_data_ptr<int64_t>();
            int64_t output = 0;
            for (const TokenBlock& block : blocks) {
                HeadVectors q = store_block(block);
                for (; output < outputs->numel() && token[output] < block.first + block.count; output++)
                    std::copy_n(q.data + (token[output] - block.first) * q.token_stride, queries.size(1),
                                row(queries, output));
            }
            residual = residual.index_select(0, *outputs);
            branch = at::empty_like(residual);
            blocks = token_blocks(outputs->numel(), rows->offsets, rows->starts, lora_slots, rows->lora_offsets);
            for (const TokenBlock& block : blocks) {
                adapters.segments = block.adapters;
                HeadVectors q{row(queries, block.first), queries.size(1), config.head_dim};
                finish(call, block, q, row(residual, block.first), row(branch, block.first));
            }
        }
        return residual.add_(branch);
    }

  private:
    LayerConfig config;
    std::vector<DecoderLayer> layers;
    // Intermediate results of one block of tokens, a row for each token.
    QuantizedRows quantized, quantized_inner;
    std::vector<float> normed, qkv_rows, rotated_qk, attended, inner_rows;
    LoraRows adapters;
    int64_t adapter_slots = std::numeric_limits<int64_t>::max();  // of each layer

    // A layer, and what its attention reads, the same for all blocks.
    struct LayerCall {
        const DecoderLayer& layer;
        KVCache cache;
        const Tensor& block_tables;
        MaybeTensor angles;
    };

    std::vector<TokenBlock> token_blocks(int64_t tokens, const Tensor& offsets, const Tensor& starts,
                                         const Tensor& lora_slots, const Tensor& lora_offsets) const {
        auto blocks =
            split_into_blocks(tokens, offsets.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>());
        for (TokenBlock& block : blocks)
            if (lora_slots.numel())
                block.adapters = segments_within(lora_slots, lora_offsets, adapter_slots, block.first, block.count);
        return blocks;
    }

    // Computes what tokens add to their contexts, up to a block's queries, which it returns.
    HeadVectors store_context(const LayerCall& call, int64_t count, const Rotation& rotation, const int64_t* slots,
                              const float* branch, float* residual) {
        norm(branch, residual, call.layer.attention_norm, call.layer.qkv->matrix, count);
        project(*call.layer.qkv, normed.data(), count, qkv_rows.data());
        return rotate_and_store(call, count, rotation, slots);
    }

    // Computes the rest of the layer: attention of queries q, and the feed-forward block.
    void finish(const LayerCall& call, const TokenBlock& block, HeadVectors q, float* residual, float* branch) {
        const DecoderLayer& layer = call.layer;
        int64_t width = layer.attention_norm.numel();
        attend(call, block, q);
        quantize_rows_for(layer.out->matrix, attended.data(), layer.out->matrix.inputs, block.count, quantized);
        project(*layer.out, attended.data(), block.count, branch);
        post_norm(layer.attention_post_norm, branch, block.count, width);
        norm(branch, residual, layer.mlp_norm, layer.up->matrix, block.count);
        feed_forward(layer, block.count, branch);
        post_norm(layer.mlp_post_norm, branch, block.count, width);
    }

    // residual (count, H) += branch, unless that is nullptr. Writes the sum's norm to `normed` and, if `next` is
    // quantised, to `quantized`.
    void norm(const float* branch, float* residual, const Tensor& weight, const Matrix& next, int64_t count) {
        int64_t width = weight.numel();
        if (next.quantized()) quantized.reset(count, width, next.activation_group());
        at::parallel_for(0, count, ROWS_PER_THREAD, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++) {
                float *row_residual = residual + row * width, *y = &normed[row * width];
                add_rms_norm(branch ? branch + row * width : row_residual, branch ? row_residual : nullptr,
                             weight.const_data_ptr<float>(), config.eps, 1, width, y, row_residual);
                if (next.quantized()) quantized.set(row, y);
            }
        });
    }

    void post_norm(const MaybeTensor& weight, float* x, int64_t count, int64_t width) {
        if (weight) add_rms_norm(x, nullptr, data(weight), config.eps, count, width, x, nullptr);
    }

    // Returns a block's rows x (count, inputs), or their `quants`, with the adapters that they use.
    InputRows input_of(const Projection& projection, const float* x, int64_t count, const QuantizedRows& quants) {
        InputRows input{x, projection.matrix.inputs, count, &quants};
        if (adapters.segments.empty()) return input;
        adapters.shrink(*projection.lora, x, input.stride, count);
        input.adapters = &adapters;
        return input;
    }

    void project(const Projection& projection, const float* x, int64_t count, float* y) {
        matmul(projection.matrix, input_of(projection, x, count, quantized), data(projection.bias), y);
    }

    // Writes keys and values of `qkv_rows` to the cache. Returns the queries.
    HeadVectors rotate_and_store(const LayerCall& call, int64_t count, const Rotation& rotation, const int64_t* slots) {
        const DecoderLayer& layer = call.layer;
        int64_t heads = config.heads, kv_heads = config.kv_heads, head_dim = config.head_dim;
        int64_t token_stride = (heads + 2 * kv_heads) * head_dim;
        if (layer.q_norm)
            at::parallel_for(0, count, ROWS_PER_THREAD, [&](int64_t from, int64_t to) {
                for (int64_t t = from; t < to; t++) {
                    float *q = &qkv_rows[t * token_stride], *k = q + heads * head_dim;
                    add_rms_norm(q, nullptr, data(layer.q_norm), config.eps, heads, head_dim, q, nullptr);
                    add_rms_norm(k, nullptr, data(layer.k_norm), config.eps, kv_heads, head_dim, k, nullptr);
                }
            });
        HeadVectors qk{qkv_rows.data(), token_stride, head_dim};
        HeadVectors v{qkv_rows.data() + (heads + kv_heads) * head_dim, token_stride, head_dim};
        if (rotation.cos) {
            rotary(qk, rotation.cos, rotation.sin, count, heads + kv_heads, head_dim, rotation.width,
                   rotated_qk.data());
            qk = {rotated_qk.data(), (heads + kv_heads) * head_dim, head_dim};
        }
        HeadVectors k{qk.data + heads * head_dim, qk.token_stride, head_dim};
        write_kv(k, v, count, head_dim, call.cache, slots);
        return qk;
    }

    // Computes `attended` (count, heads * head_dim) of queries q.
    void attend(const LayerCall& call, const TokenBlock& block, HeadVectors q) {
        AttentionProblem problem{};
        problem.q = q.data;
        problem.q_token_stride = q.token_stride;
        problem.q_head_stride = q.head_stride;
        problem.out = attended.data();
        problem.cache = call.cache;
        problem.offsets = block.offsets.data();
        problem.starts = block.starts.data();
        problem.rows = block.starts.size();
        problem.block_tables = call.block_tables.const_data_ptr<int32_t>() + block.row * call.block_tables.size(1);
        problem.table_width = call.block_tables.size(1);
        problem.heads = config.heads;
        problem.head_dim = config.head_dim;
        problem.scale = config.scale;
        problem.softcap = config.softcap;
        problem.window = call.layer.window;
        const auto& [key_bias, value_bias] = call.layer.kv_bias;
        set_kv_bias(problem, key_bias, value_bias, call.angles);
        paged_attention(problem);
    }

    // Computes y (count, H) from `normed` or `quantized`. A thread computes all inputs of `down` that share a scale.
    void feed_forward(const DecoderLayer& layer, int64_t count, float* y) {
        const Matrix& down = layer.down->matrix;
        int64_t width = down.inputs, panels = width / PANEL;
        int64_t group_panels = down.quantized() ? down.activation_group() / PANEL : 1;
        if (down.quantized()) quantized_inner.reset(count, width, down.activation_group());
        bool keep = down.reads_floats() || !adapters.segments.empty();  // the activated rows, in floats
        InputRows input = input_of(*layer.up, normed.data(), count, quantized);
        parallel_for_panels((panels + group_panels - 1) / group_panels, [&](int64_t group) {
            int64_t first = group * group_panels, end = std::min(first + group_panels, panels);
            alignas(64) float activated[MAX_BLOCK_ROWS * MAX_ACTIVATION_GROUP];
            float* out = keep ? &inner_rows[first * PANEL] : activated;
            int64_t stride = keep ? width : (end - first) * PANEL;
            for (int64_t panel = first; panel < end; panel++)
                activated_panel(layer, input, panel, out + (panel - first) * PANEL, stride);
            for (int64_t row = 0; down.quantized() && row < count; row++)
                quantized_inner.set(row, group, out + row * stride);
        });
        matmul(down, input_of(*layer.down, inner_rows.data(), count, quantized_inner), data(layer.down->bias), y);
    }

    // Computes 32 of the inputs of `down` for each row of `input`. `stride` is the distance between rows of `out`.
    void activated_panel(const DecoderLayer& layer, const InputRows& input, int64_t panel, float* out, int64_t stride) {
        const Matrix& up = layer.up->matrix;
        int64_t width = layer.down->matrix.inputs;
        const float* bias = data(layer.up->bias);
        alignas(64) float gate_sums[MAX_BLOCK_ROWS * PANEL], up_sums[MAX_BLOCK_ROWS * PANEL];
        panel_matmul(up, input, panel, gate_sums);
        if (config.gated) panel_matmul(up, input, width / PANEL + panel, up_sums);
        if (input.adapters) {  // which come after the bias
            auto finish = [&](float* sums, int64_t output) {
                for (int64_t row = 0; bias && row < input.rows; row++)
                    write_outputs(sums + row * PANEL, sums + row * PANEL, bias + output, PANEL);
                input.adapters->expand(output / PANEL, sums, PANEL);
            };
            finish(gate_sums, panel * PANEL);
            if (config.gated) finish(up_sums, width + panel * PANEL);
            bias = nullptr;
        }
        for (int64_t row = 0; row < input.rows; row++)
            for (int half = 0; half < PANEL; half += 16) {
                int64_t index = row * PANEL + half, output = panel * PANEL + half;
                F32x16 y = F32x16::load(gate_sums + index);
                if (bias) y = y + F32x16::load(bias + output);
                y = activate(y, config.gelu);
                if (config.gated) {
                    F32x16 factor = F32x16::load(up_sums + index);
                    if (bias) factor = factor + F32x16::load(bias + width + output);
                    y = y * factor;
                }
                y.store(out + row * stride + half);
            }
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.class_<Projection>("Projection")
        .def(torch::init<Tensor, int64_t, std::string, int64_t, bool, int64_t, std::vector<Tensor>, MaybeTensor>())
        .def("set_lora", &Projection::set_lora);
    m.class_<DecoderLayers>("DecoderLayers")
        .def(torch::init<FieldValues>())
        .def("add", &DecoderLayers::add)
        .def("forward", &DecoderLayers::forward);
}

}  // namespace quire
