// Packs blocks of a GGUF file into the records of quantized_linear.cpp, from where they lie in the mapped file.
//
// The parts of a weight follow one another. If they are of different types, all get the most general format of them: 8
// bits beside 4, and mins if one has mins. Neither changes a value, since zero points are powers of two.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "gguf_types.h"
#include "panel_memory.h"
#include "parts.h"
#include "quant_tile.h"

namespace quire {
namespace {

struct Format {
    int bits = 4;
    bool has_mins = false;

    int zero_point() const { return has_mins ? 0 : bits == 8 ? ZERO_POINT<8> : ZERO_POINT<4>; }
};

// Blocks (out, n, bytes) of a type, and the group of a row's first block with which the part begins.
struct Blocks {
    const uint8_t* data;
    int64_t output_stride, stride, first_group;
};

// Rounds the scale and the min of a group to float16, and changes a group of `Type` to the format.
template <class Type>
void convert(const Format& format, GgufGroup& group, fp16& scale, fp16& min) {
    narrow(group.scale, scale);
    if (Type::HAS_MINS) {
        narrow(group.min, min);
    } else if (format.has_mins) {
        narrow(-ZERO_POINT<Type::BITS> * widen(scale), min);
    } else if (Type::BITS == 4 && format.bits == 8) {
        group.quants = _mm256_add_epi8(group.quants, _mm256_set1_epi8(ZERO_POINT<8> - ZERO_POINT<4>));
    }
}

// Writes the lanes of a panel's records.
template <class Type>
void pack_lanes(const Blocks& blocks, const Lanes& lanes, int64_t groups, const Format& format, uint8_t* records) {
    constexpr int GROUPS = Type::VALUES / QUANT_GROUP_SIZE;  // of a block
    int bytes = record_bytes(format.bits, format.has_mins);
    alignas(32) float rows[PANEL][QUADS] = {};  // the quants of an output, four in each number
    Tile tile;
    fp16 scales[PANEL], mins[PANEL];
    for (int64_t g = 0; g < groups; g++) {
        int64_t from = blocks.first_group + g;
        const uint8_t* block = blocks.data + lanes.first * blocks.output_stride + from / GROUPS * blocks.stride;
        for (int lane = lanes.lane; lane < lanes.lane + lanes.count; lane++, block += blocks.output_stride) {
            GgufGroup group;
            unpack_group<Type>(block, int(from % GROUPS), group);
            convert<Type>(format, group, scales[lane], mins[lane]);
            _mm256_store_si256(reinterpret_cast<__m256i*>(rows[lane]), group.quants);
        }
        for (int lane = 0; lane < PANEL; lane += 8)
            transpose(rows[lane], QUADS, reinterpret_cast<float*>(&tile[0][lane]), PANEL);
        uint8_t* record = records + g * bytes;
        store(tile, format.bits, lanes, record);
        fp16* tail = reinterpret_cast<fp16*>(record + quant_bytes(format.bits)) + lanes.lane;
        std::memcpy(tail, scales + lanes.lane, lanes.count * sizeof(fp16));
        if (format.has_mins) std::memcpy(tail + PANEL, mins + lanes.lane, lanes.count * sizeof(fp16));
    }
}

// Returns the records (panel, group, bytes) of all parts, and their bits, whether there are mins, and the zero point.
// `blocks` are (out, n, bytes) of a type each; part i begins with the group first_groups[i] of its first block.
std::tuple<at::Tensor, int64_t, bool, int64_t> pack_blocks(at::TensorList blocks, at::IntArrayRef types,
                                                           at::IntArrayRef first_groups, int64_t inputs) {
    TORCH_CHECK(!blocks.empty() && types.size() == blocks.size() && first_groups.size() == blocks.size(),
                "a type and a first group for each part");
    int64_t outputs = 0, groups = inputs / QUANT_GROUP_SIZE;
    Format format;
    std::vector<Blocks> parts;
    for (size_t part = 0; part < blocks.size(); part++) {
        const at::Tensor& own = blocks[part];
        with_gguf_type(types[part], [&](auto type) {
            check_blocks<decltype(type)>(own, first_groups[part], inputs);
            format.bits = std::max(format.bits, type.BITS);
            format.has_mins |= type.HAS_MINS;
        });
        outputs += own.size(0);
        parts.push_back({own.const_data_ptr<uint8_t>(), own.stride(0), own.stride(1), first_groups[part]});
    }
    int64_t panels = (outputs + PANEL - 1) / PANEL, bytes = record_bytes(format.bits, format.has_mins);
    at::Tensor records = zero_panels({panels, groups, bytes}, at::kByte);
    uint8_t* data = records.mutable_data_ptr<uint8_t>();
    at::parallel_for(0, panels, 1, [&](int64_t from, int64_t to) {
        for (int64_t panel = from; panel < to; panel++)
            for_each_part(blocks, panel, [&](size_t part, int64_t first, int lane, int count) {
                with_gguf_type(types[part], [&](auto type) {
                    Lanes lanes{first, lane, count};
                    pack_lanes<decltype(type)>(parts[part], lanes, groups, format, data + panel * groups * bytes);
                });
            });
    });
    return {records, format.bits, format.has_mins, format.zero_point()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("pack_blocks(Tensor[] blocks, int[] types, int[] first_groups, int inputs) -> (Tensor, int, bool, int)");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("pack_blocks", pack_blocks); }

}  // namespace quire
