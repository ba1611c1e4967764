// Pinning the threads of at::parallel_for to processors.
#include <ATen/Parallel.h>
#include <sched.h>
#include <torch/library.h>

namespace quire {
namespace {

// Pins each thread of the pool to one of `cpus`; the calling thread gets the first.
void pin_threads(at::IntArrayRef cpus) {
    TORCH_CHECK(int64_t(cpus.size()) == at::get_num_threads(), "a processor for each thread");
    at::parallel_for(0, cpus.size(), 1, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cpus[i], &set);
            TORCH_CHECK(sched_setaffinity(0, sizeof set, &set) == 0, "a thread cannot be pinned to processor ",
                        cpus[i]);
        }
    });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) { m.def("pin_threads(int[] cpus) -> ()"); }
TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) { m.impl("pin_threads", pin_threads); }

}  // namespace quire
