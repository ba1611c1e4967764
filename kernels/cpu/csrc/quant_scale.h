// The scale with which numbers become whole ones.
#pragma once

#include "simd.h"

namespace quire {

struct QuantScale {
    float scale;     // what a quant of 1 stands for; NaN if a number is not finite
    F32x16 inverse;  // 0 if all numbers are tiny, since it would overflow
};

// The largest absolute number of those that were added.
class AbsMax {
  public:
    void add(F32x16 x) {
        max_lanes_ = max(max_lanes_, x.abs());
        nan_lanes_ = fma(x, F32x16::zero(), nan_lanes_);  // NaN * 0 and inf * 0 are NaN
    }

    // Returns the scale with which its quant is `largest`.
    QuantScale scale_to(float largest) const {
        float max_abs = reduce_max(max_lanes_);
        bool tiny = max_abs < 1e-30f;
        float scale = (tiny ? 0.0f : max_abs / largest) + reduce_sum(nan_lanes_);
        return {scale, F32x16::set(tiny ? 0.0f : largest / max_abs)};
    }

  private:
    F32x16 max_lanes_ = F32x16::zero(), nan_lanes_ = F32x16::zero();
};

}  // namespace quire
