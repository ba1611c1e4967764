// Memory for packed weights, in huge pages.
#pragma once

#include <ATen/core/Tensor.h>

namespace quire {

// Returns a tensor of zeros. A page of it belongs to the thread that first writes to it.
at::Tensor zero_panels(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace quire
