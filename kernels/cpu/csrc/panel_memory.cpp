// A step reads all weights, and with pages of 4 KiB, address translation takes much of that time. Weights lie side by
// side in chunks that are asked for in huge pages before anything is written: malloc would put the ends of large tensors
// and all small ones into small pages, which then have to be copied into huge ones.
#include "panel_memory.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace quire {
namespace {

constexpr size_t HUGE_PAGE = size_t(1) << 21;
constexpr size_t CHUNK = size_t(1) << 28;  // what is not used of it takes no memory
constexpr size_t ALIGNMENT = 64;           // bytes of a cache line

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

class Chunk {
public:
    explicit Chunk(size_t size) : mapped_(round_up(size, HUGE_PAGE) + HUGE_PAGE) {
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(base_ != MAP_FAILED, "there is no memory for ", size, " bytes of weights");
        next_ = round_up(reinterpret_cast<size_t>(base_), HUGE_PAGE);
        end_ = next_ + round_up(size, HUGE_PAGE);
        madvise(reinterpret_cast<void*>(next_), end_ - next_, MADV_HUGEPAGE);
    }
    Chunk(const Chunk&) = delete;
    ~Chunk() { munmap(base_, mapped_); }

    // Returns the next `size` bytes, all zero; nullptr if fewer are left.
    void* take(size_t size) {
        if (end_ - next_ < size) return nullptr;
        void* taken = reinterpret_cast<void*>(next_);
        next_ += round_up(size, ALIGNMENT);
        return taken;
    }

private:
    size_t mapped_, next_, end_;
    void* base_;
};

}  // namespace

// A chunk is freed with the last tensor in it.
at::Tensor zero_panels(at::IntArrayRef sizes, at::ScalarType dtype) {
    static std::mutex mutex;
    static std::weak_ptr<Chunk> last;
    size_t bytes = std::max<size_t>(c10::multiply_integers(sizes) * c10::elementSize(dtype), 1);
    std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Chunk> chunk = last.lock();
    void* data = chunk ? chunk->take(bytes) : nullptr;
    if (!data) {
        last = chunk = std::make_shared<Chunk>(std::max(bytes, CHUNK));
        data = chunk->take(bytes);
    }
    return at::from_blob(data, sizes, [chunk](void*) {}, at::TensorOptions().dtype(dtype));
}

}  // namespace quire
