// An allocator of host memory with a budget, for torch's device "cpu": beyond it, torch raises its OutOfMemoryError, as
// on a GPU. What was allocated before it is installed does not count.

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

std::atomic<int64_t> used{0}, budget{INT64_MAX}, peak{0}, refusals{0};

struct Header {
    int64_t nbytes;
};

constexpr size_t before = 64;

void give_back(void* data) {
    if (!data) return;
    void* address = static_cast<char*>(data) - before;
    used -= static_cast<Header*>(address)->nbytes;
    std::free(address);
}

struct Budget : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        const int64_t now = used += int64_t(nbytes);
        void* address = now > budget ? nullptr : std::aligned_alloc(64, (before + nbytes + 63) / 64 * 64);
        if (!address) {
            used -= int64_t(nbytes);
            ++refusals;
            TORCH_CHECK_WITH(OutOfMemoryError, false, "the budget lacks memory for ", nbytes, " bytes");
        }
        for (int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
        }
        static_cast<Header*>(address)->nbytes = int64_t(nbytes);
        void* data = static_cast<char*>(address) + before;
        return {data, data, &give_back, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &give_back;
    }
    void copy_data(void* to, const void* from, size_t nbytes) const override {
        default_copy_data(to, from, nbytes);
    }
};

Budget own;
c10::Allocator* others = nullptr;

}  // namespace

extern "C" {

void budget_install() {
    others = c10::GetAllocator(c10::kCPU);
    c10::SetAllocator(c10::kCPU, &own, 255);
}

void budget_remove() {
    c10::SetAllocator(c10::kCPU, others, 255);
    budget = INT64_MAX;
}

// Allow so many bytes. Returns how many are used.
int64_t budget_set(int64_t nbytes) {
    budget = nbytes;
    peak = used.load();
    return used;
}

int64_t budget_used() {
    return used;
}

int64_t budget_peak() {
    return peak;
}

int64_t budget_refusals() {
    return refusals;
}
}
