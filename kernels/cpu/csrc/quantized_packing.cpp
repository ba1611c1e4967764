// Packs the quants of a checkpoint into the records of quantized_linear.cpp, straight from where they lie, often in a
// mapped file. The parts of a weight follow one another. Their layouts are:
//
//     rows   (out, in) uint8
//     gptq   (in * bits / 32, out) int32: quants of neighbouring inputs, the lowest bits first
//     awq    (in, out / 8) int32: quants of the outputs 0 2 4 6 1 3 5 7 of each eight, the lowest bits first
//
// With an order, the inputs of gptq and awq are permuted: place k gets input order[k].
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "matrix.h"
#include "panel_memory.h"
#include "parts.h"
#include "quant_tile.h"

namespace quire {
namespace {

struct Bytes {
    const uint8_t* data;
    int64_t output_stride;

    void unpack(int64_t group, const Lanes& lanes, Tile& tile) const {
        for (int j = 0; j < lanes.count; j++) {
            const uint8_t* quants = data + (lanes.first + j) * output_stride + group * QUANT_GROUP_SIZE;
            for (int s = 0; s < QUADS; s++) tile[s][lanes.lane + j] = word_at(quants + 4 * s);
        }
    }
};

// The inputs that get the places 4 s .. 4 s + 3 of a group.
struct Quad {
    int64_t input[4];

    Quad(int64_t group, int s, const int64_t* order) {
        for (int i = 0; i < 4; i++) {
            int64_t place = group * QUANT_GROUP_SIZE + 4 * s + i;
            input[i] = order ? order[place] : place;
        }
    }
};

struct GptqWords {
    const uint32_t* words;
    int64_t stride;
    int bits;
    const int64_t* order;

    void unpack(int64_t group, const Lanes& lanes, Tile& tile) const {
        int quants = 32 / bits;
        uint32_t mask = (1u << bits) - 1;
        for (int s = 0; s < QUADS; s++) {
            Quad quad(group, s, order);
            const uint32_t* row[4];
            int shift[4];
            for (int i = 0; i < 4; i++) {
                row[i] = words + quad.input[i] / quants * stride + lanes.first;
                shift[i] = int(quad.input[i] % quants) * bits;
            }
            uint32_t* target = tile[s] + lanes.lane;
            for (int j = 0; j < lanes.count; j++)
                target[j] = (row[0][j] >> shift[0] & mask) | (row[1][j] >> shift[1] & mask) << 8 |
                            (row[2][j] >> shift[2] & mask) << 16 | (row[3][j] >> shift[3] & mask) << 24;
        }
    }
};

struct AwqWords {
    static constexpr int OUTPUTS = 8;  // of a word

    const uint32_t* words;
    int64_t stride;
    const int64_t* order;

    void unpack(int64_t group, const Lanes& lanes, Tile& tile) const {
        static constexpr int SHIFTS[OUTPUTS] = {0, 16, 4, 20, 8, 24, 12, 28};
        for (int s = 0; s < QUADS; s++) {
            Quad quad(group, s, order);
            const uint32_t* row[4];
            for (int i = 0; i < 4; i++) row[i] = words + quad.input[i] * stride + lanes.first / OUTPUTS;
            for (int word = 0; word < lanes.count / OUTPUTS; word++) {
                uint32_t* target = tile[s] + lanes.lane + word * OUTPUTS;
                for (int j = 0; j < OUTPUTS; j++)
                    target[j] = (row[0][word] >> SHIFTS[j] & 15) | (row[1][word] >> SHIFTS[j] & 15) << 8 |
                                (row[2][word] >> SHIFTS[j] & 15) << 16 | (row[3][word] >> SHIFTS[j] & 15) << 24;
            }
        }
    }
};

// Scales or mins (out, n), each for `size` groups of inputs.
struct GroupNumbers {
    const fp16* data;
    int64_t output_stride, stride, size;

    GroupNumbers(const at::Tensor& numbers, int64_t size)
        : data(static_cast<const fp16*>(numbers.const_data_ptr())),
          output_stride(numbers.stride(0)),
          stride(numbers.stride(1)),
          size(size) {}

    void copy(int64_t group, const Lanes& lanes, fp16* target) const {
        const fp16* first = data + lanes.first * output_stride + group / size * stride;
        for (int j = 0; j < lanes.count; j++) target[lanes.lane + j] = first[j * output_stride];
    }
};

// Calls f(layout) with how the quants of a part are laid out.
template <class F>
void with_layout(const at::Tensor& quants, std::string_view name, int bits, const int64_t* order, F&& f) {
    const void* data = quants.const_data_ptr();
    auto* bytes = static_cast<const uint8_t*>(data);
    auto* words = static_cast<const uint32_t*>(data);
    if (name == "rows") return f(Bytes{bytes, quants.stride(0)});
    if (name == "gptq") return f(GptqWords{words, quants.stride(0), bits, order});
    f(AwqWords{words, quants.stride(0), order});
}

void check_part(const at::Tensor& quants, const at::Tensor& scales, std::string_view layout, int64_t bits,
                int64_t inputs, int64_t group_size) {
    int64_t outputs = scales.size(0);
    TORCH_CHECK(scales.scalar_type() == at::kHalf && scales.dim() == 2, "scales must be (out, n) float16");
    TORCH_CHECK(scales.size(1) == (inputs + group_size - 1) / group_size, "a scale for each group");
    bool of_words = layout == "gptq" || layout == "awq";
    TORCH_CHECK(quants.scalar_type() == (of_words ? at::kInt : at::kByte), "quants are bytes, or words of int32");
    TORCH_CHECK(quants.stride(-1) == 1 || quants.size(-1) <= 1, "quants or words must be side by side");
    if (layout == "rows") {
        TORCH_CHECK(quants.sizes() == at::IntArrayRef({outputs, inputs}), "a quant for each output and input");
    } else if (layout == "gptq") {
        TORCH_CHECK(quants.sizes() == at::IntArrayRef({inputs * bits / 32, outputs}), "words for all inputs");
    } else {
        TORCH_CHECK(layout == "awq" && bits == 4, "layouts are rows, gptq and awq of 4 bits");
        TORCH_CHECK(outputs % AwqWords::OUTPUTS == 0, "outputs must be a multiple of eight");
        TORCH_CHECK(quants.sizes() == at::IntArrayRef({inputs, outputs / AwqWords::OUTPUTS}), "words for all outputs");
    }
}

// Returns the records (panel, group, bytes) of all parts. There are mins for all of them, or none. A scale and a min are
// for `group_size` inputs.
at::Tensor pack_quantized(at::TensorList quants, at::TensorList scales, at::TensorList mins, std::string_view layout,
                          int64_t bits, int64_t inputs, int64_t group_size, const std::optional<at::Tensor>& order) {
    int64_t panels = (count_outputs(scales) + PANEL - 1) / PANEL, groups = inputs / QUANT_GROUP_SIZE;
    TORCH_CHECK(inputs % QUANT_GROUP_SIZE == 0, "inputs must be a multiple of ", QUANT_GROUP_SIZE);
    TORCH_CHECK(bits == 8 || bits == 4, "8 or 4 bits");
    TORCH_CHECK(group_size > 0 && group_size % QUANT_GROUP_SIZE == 0, "groups must be of a multiple of 32 inputs");
    TORCH_CHECK(quants.size() == scales.size() && (mins.empty() || mins.size() == scales.size()),
                "a tensor of each kind for each part");
    for (size_t part = 0; part < quants.size(); part++) {
        check_part(quants[part], scales[part], layout, bits, inputs, group_size);
        TORCH_CHECK(mins.empty() || (mins[part].scalar_type() == at::kHalf && mins[part].sizes() == scales[part].sizes()),
                    "mins must be like the scales");
    }
    TORCH_CHECK(!order || (order->scalar_type() == at::kLong && order->is_contiguous() &&
                           order->numel() == inputs),
                "an order of all inputs, int64");
    int bytes = record_bytes(bits, !mins.empty());
    at::Tensor records = zero_panels({panels, groups, bytes}, at::kByte);
    uint8_t* data = records.mutable_data_ptr<uint8_t>();
    const int64_t* order_data = order ? order->const_data_ptr<int64_t>() : nullptr;
    at::parallel_for(0, panels, 1, [&](int64_t from, int64_t to) {
        for (int64_t panel = from; panel < to; panel++)
            for_each_part(scales, panel, [&](size_t part, int64_t first, int lane, int count) {
                Lanes lanes{first, lane, count};
                GroupNumbers part_scales(scales[part], group_size / QUANT_GROUP_SIZE);
                GroupNumbers part_mins(mins.empty() ? scales[part] : mins[part], group_size / QUANT_GROUP_SIZE);
                with_layout(quants[part], layout, int(bits), order_data, [&](const auto& part_quants) {
                    Tile tile;
                    for (int64_t group = 0; group < groups; group++) {
                        uint8_t* record = data + (panel * groups + group) * bytes;
                        fp16* tail = reinterpret_cast<fp16*>(record + quant_bytes(bits));
                        part_quants.unpack(group, lanes, tile);
                        store(tile, int(bits), lanes, record);
                        part_scales.copy(group, lanes, tail);
                        if (!mins.empty()) part_mins.copy(group, lanes, tail + PANEL);
                    }
                });
            });
    });
    return records;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def(
        "pack_quantized(Tensor[] quants, Tensor[] scales, Tensor[] mins, str layout, int bits, int inputs, "
        "int group_size, Tensor? order) -> Tensor");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("pack_quantized", pack_quantized); }

}  // namespace quire
