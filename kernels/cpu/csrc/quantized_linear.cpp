// y = x Wᵀ + b for weights of 8 or 4 bits in groups of 32 inputs, and x quantised to 8 bits on the way in.
//
//     w[n, k] = step[n, g] * code[n, k] + least[n, g]      code unsigned; g = k / 32
//     x[m, k] ≈ scale[m, g] * q[m, k]                      q in -127..127, scale = max |x[m, group]| / 127; see below
//     y[m, n] = Σ_g scale * (step * Σ_k code q  +  least * Σ_k q)
//
// Where `least` is a whole multiple of `step` for the entire weight, `least = -zero * step`, its term is a start value of
// the integer sum and costs nothing: the symmetric kinds. Scales belong to a row and a group, never to a batch, groups
// are added in order, and integer sums are exact: a row's result does not depend on the other rows.
//
// A packed weight is a stream of records, (panel of 32 outputs, group): the codes in the order in which they are used,
// then 32 steps and, if there are any, 32 leasts, in float16. Of 4-bit codes, byte i of quad s holds that of input
// 4 s + i % 4 in its low half and of input 16 + 4 s + i % 4 in its high one.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "int8.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int GROUP = 32, PANEL = 32;
constexpr float OUTLIER = 4.5;  // a group's largest number over its root mean square, from which it has a second term

#if defined(__AVX512VNNI__)
constexpr int ROWS = 6;  // 12 sums of int32 and 12 of float32
#else
constexpr int ROWS = 1;
#endif

template <int BITS, bool LEAST>
struct Kind {
    static constexpr int codes = PANEL * GROUP * BITS / 8;
    static constexpr int record = codes + PANEL * 2 * (LEAST ? 2 : 1);
};

// A group of one row, as eight bits: x ≈ scale * q. The product needs Σ q times the scale, or times minus `zero`.
struct Group {
    float scale, shift;
    int32_t start;
};

// Quantised rows. Where one number of a group is far larger than the others, eight bits say little of these: such a
// group has a second term, what the first leaves over in steps that are 128 times finer.
struct Activations {
    std::vector<int8_t> q, fine_q;  // (M, K)
    std::vector<Group> group, fine;  // (M, K / 32)
    std::vector<uint8_t> has_fine;
    int64_t inputs, groups;

    Activations(const at::Tensor& x, int zero)
        : q(x.numel()), fine_q(x.numel()), group(x.numel() / GROUP), fine(group.size()), has_fine(group.size()),
          inputs(x.size(1)), groups(x.size(1) / GROUP) {
        const float* data = x.const_data_ptr<float>();
        int64_t stride = x.stride(0);
        at::parallel_for(0, x.size(0), 4, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++)
                for (int64_t g = 0; g < groups; g++) quantize(data + row * stride + g * GROUP, row * groups + g, zero);
        });
    }

    void quantize(const float* x, int64_t at, int zero) {
        F32x16 part[2] = {F32x16::load(x), F32x16::load(x + 16)};
        float most = largest(max(part[0].abs(), part[1].abs()));
        float squares = sum(fma(part[0], part[0], part[1] * part[1]));
        group[at] = round(part, most / 127, &q[at * GROUP], zero);
        has_fine[at] = most * most * GROUP > OUTLIER * OUTLIER * squares;
        if (!has_fine[at]) return;
        F32x16 scale = F32x16::set(-group[at].scale);
        for (int half = 0; half < 2; half++)
            part[half] = fma(F32x16::load(&q[at * GROUP + half * 16]), scale, part[half]);
        fine[at] = round(part, group[at].scale / 128, &fine_q[at * GROUP], zero);
    }

    static Group round(const F32x16 (&part)[2], float scale, int8_t* to, int zero) {
        F32x16 factor = F32x16::set(scale > 0 ? 1 / scale : 0), left = (part[0] * factor).round();
        F32x16 right = (part[1] * factor).round();
        left.store(to);
        right.store(to + 16);
        float total = sum(left + right);  // of whole numbers: exact
        return {scale, total * scale, -zero * int32_t(total)};
    }
};

// Calls f(left, right, k) for each quad of inputs k..k+3, with the codes of the panel's halves.
template <int BITS, class F>
void over_quads(const uint8_t* codes, F&& f) {
    if constexpr (BITS == 8) {
        for (int s = 0; s < 8; s++) f(U8x64::load(codes + s * 128), U8x64::load(codes + s * 128 + 64), 4 * s);
    } else {
        for (int s = 0; s < 4; s++) {
            U8x64 left = U8x64::load(codes + s * 128), right = U8x64::load(codes + s * 128 + 64);
            f(left.low_nibbles(), right.low_nibbles(), 4 * s);
            f(left.high_nibbles(), right.high_nibbles(), 16 + 4 * s);
        }
    }
}

template <bool LEAST>
void add(F32x16& sum, const I32x16& dot, F32x16 step, F32x16 least, const Group& group) {
    sum = fma(dot.to_float(), step * F32x16::set(group.scale), sum);
    if (LEAST) sum = fma(least, F32x16::set(group.shift), sum);
}

template <int N, int BITS, bool LEAST>
void multiply(const Activations& a, int64_t first, const uint8_t* panel, float* y, int64_t y_stride, const float* bias,
              int width) {
    using K = Kind<BITS, LEAST>;
    F32x16 sums[N][2];
    for (auto& s : sums) s[0] = s[1] = F32x16::zero();
    for (int64_t g = 0; g < a.groups; g++, panel += K::record) {
        const int8_t* q = &a.q[first * a.inputs + g * GROUP];
        const int64_t at = first * a.groups + g;
        I32x16 dots[N][2];
        for (int n = 0; n < N; n++) dots[n][0] = dots[n][1] = I32x16::set(LEAST ? 0 : a.group[at + n * a.groups].start);
        over_quads<BITS>(panel, [&](U8x64 left, U8x64 right, int k) {
            for (int n = 0; n < N; n++) {
                dots[n][0].add_dot(left, q + n * a.inputs + k);
                dots[n][1].add_dot(right, q + n * a.inputs + k);
            }
        });
        const fp16* steps = reinterpret_cast<const fp16*>(panel + K::codes);
        F32x16 step[2], least[2];
        for (int half = 0; half < 2; half++) {
            step[half] = F32x16::load(steps + half * 16);
            least[half] = LEAST ? F32x16::load(steps + PANEL + half * 16) : F32x16::zero();
            for (int n = 0; n < N; n++)
                add<LEAST>(sums[n][half], dots[n][half], step[half], least[half], a.group[at + n * a.groups]);
        }
        for (int n = 0; n < N; n++) {
            if (!a.has_fine[at + n * a.groups]) continue;
            const Group& fine = a.fine[at + n * a.groups];
            const int8_t* rest = &a.fine_q[(first + n) * a.inputs + g * GROUP];
            I32x16 dot[2] = {I32x16::set(LEAST ? 0 : fine.start), I32x16::set(LEAST ? 0 : fine.start)};
            over_quads<BITS>(panel, [&](U8x64 left, U8x64 right, int k) {
                dot[0].add_dot(left, rest + k);
                dot[1].add_dot(right, rest + k);
            });
            for (int half = 0; half < 2; half++) add<LEAST>(sums[n][half], dot[half], step[half], least[half], fine);
        }
    }
    for (int n = 0; n < N; n++) write_outputs(sums[n], y + n * y_stride, bias, width);
}

template <int BITS, bool LEAST>
void run(const at::Tensor& x, const at::Tensor& packed, int64_t zero, const float* bias, at::Tensor& y) {
    Activations a(x, zero);
    int64_t outputs = y.size(1);
    const uint8_t* weights = packed.const_data_ptr<uint8_t>();
    float* to = y.mutable_data_ptr<float>();
    over_panels(x.size(0), packed.size(0), [&](int64_t panel, int64_t first, int64_t last) {
        const uint8_t* records = weights + panel * a.groups * Kind<BITS, LEAST>::record;
        const float* b = bias ? bias + panel * PANEL : nullptr;
        int width = std::min<int64_t>(PANEL, outputs - panel * PANEL);
        in_even_groups<ROWS>(last - first, [&](auto n, int64_t at) {
            multiply<decltype(n)::value, BITS, LEAST>(a, first + at, records, to + (first + at) * outputs + panel * PANEL,
                                                      outputs, b, width);
        });
    });
}

template <int BITS, bool LEAST>
at::Tensor pack(const at::Tensor& codes, const at::Tensor& steps, const at::Tensor* least) {
    int64_t outputs = codes.size(0), inputs = codes.size(1), groups = inputs / GROUP;
    int64_t panels = (outputs + PANEL - 1) / PANEL;
    using K = Kind<BITS, LEAST>;
    at::Tensor packed = at::zeros({panels, groups, K::record}, at::kByte);
    uint8_t* records = packed.mutable_data_ptr<uint8_t>();
    const uint8_t* code = codes.const_data_ptr<uint8_t>();
    const fp16* step = static_cast<const fp16*>(steps.const_data_ptr());
    const fp16* low = LEAST ? static_cast<const fp16*>(least->const_data_ptr()) : nullptr;
    at::parallel_for(0, outputs, 16, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++)
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* record = records + ((n / PANEL) * groups + g) * K::record;
                int64_t lane = n % PANEL, half = lane / 16 * 64 + lane % 16 * 4;
                for (int k = 0; k < GROUP; k++) {
                    uint8_t c = code[n * inputs + g * GROUP + k];
                    if (BITS == 8) record[k / 4 * 128 + half + k % 4] = c;
                    else record[k % 16 / 4 * 128 + half + k % 4] |= k < 16 ? c : c << 4;
                }
                fp16* tail = reinterpret_cast<fp16*>(record + K::codes);
                tail[lane] = step[n * groups + g];
                if (LEAST) tail[PANEL + lane] = low[n * groups + g];
            }
    });
    return packed;
}

at::Tensor pack_quantized(const at::Tensor& codes, const at::Tensor& steps, const std::optional<at::Tensor>& least,
                          int64_t bits) {
    TORCH_CHECK(codes.scalar_type() == at::kByte && codes.is_contiguous(), "codes must be uint8 and contiguous");
    TORCH_CHECK(codes.size(1) % GROUP == 0, "inputs must be a multiple of ", GROUP);
    TORCH_CHECK(steps.scalar_type() == at::kHalf && steps.is_contiguous(), "steps must be float16 and contiguous");
    TORCH_CHECK(steps.size(0) == codes.size(0) && steps.size(1) * GROUP == codes.size(1), "a step for each group");
    TORCH_CHECK(!least || (least->scalar_type() == at::kHalf && least->is_contiguous() && least->sizes() == steps.sizes()),
                "leasts must be like the steps");
    if (bits == 8) return least ? pack<8, true>(codes, steps, &*least) : pack<8, false>(codes, steps, nullptr);
    TORCH_CHECK(bits == 4, "8 or 4 bits");
    return least ? pack<4, true>(codes, steps, &*least) : pack<4, false>(codes, steps, nullptr);
}

void quantized_linear(const at::Tensor& x, const at::Tensor& packed, int64_t bits, bool least, int64_t zero,
                      const std::optional<at::Tensor>& bias, at::Tensor& y) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(1) == 1 && y.is_contiguous(), "x must be float32, y contiguous");
    TORCH_CHECK(packed.is_contiguous() && packed.size(1) * GROUP == x.size(1), "the weight is for other inputs");
    const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
    if (bits == 8) return least ? run<8, true>(x, packed, zero, b, y) : run<8, false>(x, packed, zero, b, y);
    return least ? run<4, true>(x, packed, zero, b, y) : run<4, false>(x, packed, zero, b, y);
}

template <int BITS, bool LEAST>
void rows(const at::Tensor& packed, int zero, const at::Tensor& ids, at::Tensor& y) {
    using K = Kind<BITS, LEAST>;
    int64_t groups = packed.size(1);
    const uint8_t* records = packed.const_data_ptr<uint8_t>();
    const int64_t* id = ids.const_data_ptr<int64_t>();
    float* to = y.mutable_data_ptr<float>();
    at::parallel_for(0, ids.numel(), 8, [&](int64_t from, int64_t last) {
        for (int64_t t = from; t < last; t++) {
            int64_t lane = id[t] % PANEL, half = lane / 16 * 64 + lane % 16 * 4;
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t* record = records + (id[t] / PANEL * groups + g) * K::record;
                const fp16* tail = reinterpret_cast<const fp16*>(record + K::codes);
                float step = widen(tail[lane]), least = LEAST ? widen(tail[PANEL + lane]) : 0;
                for (int k = 0; k < GROUP; k++) {
                    int code = BITS == 8 ? record[k / 4 * 128 + half + k % 4]
                                         : record[k % 16 / 4 * 128 + half + k % 4] >> (k < 16 ? 0 : 4) & 15;
                    to[(t * groups + g) * GROUP + k] = LEAST ? std::fma(float(code), step, least) : (code - zero) * step;
                }
            }
        }
    });
}

// y[t] = the weight's row ids[t], dequantised.
void quantized_rows(const at::Tensor& packed, int64_t bits, bool least, int64_t zero, const at::Tensor& ids,
                    at::Tensor& y) {
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && y.is_contiguous(), "ids int64, contiguous");
    if (bits == 8) return least ? rows<8, true>(packed, zero, ids, y) : rows<8, false>(packed, zero, ids, y);
    return least ? rows<4, true>(packed, zero, ids, y) : rows<4, false>(packed, zero, ids, y);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
    m.def("pack_quantized(Tensor codes, Tensor steps, Tensor? least, int bits) -> Tensor");
    m.def("quantized_rows(Tensor packed, int bits, bool least, int zero, Tensor ids, Tensor(a!) y) -> ()");
    m.def(
        "quantized_linear(Tensor x, Tensor packed, int bits, bool least, int zero, Tensor? bias, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(quire, CPU, m) {
    m.impl("pack_quantized", pack_quantized);
    m.impl("quantized_rows", quantized_rows);
    m.impl("quantized_linear", quantized_linear);
}

}  // namespace quire
