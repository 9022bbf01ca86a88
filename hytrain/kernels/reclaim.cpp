// torch's allocator, served from inside: where it has no memory for a request, optimizer state leaves the GPU.
//
//     allocate(n) --OutOfMemoryError--> evict at least n bytes of what is offered --> allocate(n), until nothing is left
//
// c10::Allocator::allocate is virtual, so its entry in the allocator's table is what all requests go through; it is
// replaced by `served`. So the size is known, the driver was asked before, and what is cached has been given back.
// c10::FreeMemoryCallback is told no size, is called before the driver is asked, and under the allocator's lock, where
// freeing a block may wait for Python's (c10/cuda/CUDACachingAllocator.cpp, maybeGatherContext).
//
// An item is a layer's state: pieces to copy to host memory that was made ready before, storages to free, and an event
// after the last use. Python offers it after an update and withdraws it before it looks at it (hytrain/memory/reclaim.py).
// `items_lock` is held while state is copied, but not while memory is freed or allocated, and nobody who has it waits
// for Python. Built against the headers of the torch that runs; the CUDA driver is looked up when it is needed.

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Piece {
    void* to;
    const void* from;
    int64_t nbytes;
};

enum State : int { HELD, OFFERED, TAKEN };

struct Item {
    std::vector<Piece> pieces;
    std::vector<c10::StorageImpl*> storages;
    size_t nbytes = 0;
    int rank = 0;  // the highest leaves first
    c10::Device device = c10::Device(c10::kCPU);
    State state = HELD;
    void* last_use = nullptr;
    double began_s = 0, ended_s = 0;
    size_t asked = 0;
};

// How state is copied: by the CUDA driver, or in memory. Each returns 0, or an error. `free` is at most what is free.
struct Driver {
    size_t (*free)();
    int (*wait)(void* event);
    int (*copy)(void* to, const void* from, size_t nbytes);
    int (*finish)();
};

std::mutex items_lock;
std::vector<Item*> items;
std::atomic<int64_t> evictions{0};
std::string sentence;  // for those whose request is refused

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// ---------------------------------------------------------------- copies

struct Cuda {
    int (*event_synchronize)(void*);
    int (*stream_create)(void**, unsigned);
    int (*stream_synchronize)(void*);
    int (*stream_destroy)(void*);
    int (*copy)(void*, unsigned long long, size_t, void*);
    int (*capture_mode)(int*);
    int (*memory_info)(size_t*, size_t*);
} cuda;

thread_local void* stream = nullptr;  // of the eviction that this thread makes

template <typename F>
bool found(void* library, const char* name, F& function) {
    return (function = reinterpret_cast<F>(dlsym(library, name))) != nullptr;
}

bool has_cuda() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    return library && found(library, "cuEventSynchronize", cuda.event_synchronize) &&
        found(library, "cuStreamCreate", cuda.stream_create) &&
        found(library, "cuStreamSynchronize", cuda.stream_synchronize) &&
        found(library, "cuStreamDestroy_v2", cuda.stream_destroy) &&
        found(library, "cuMemcpyDtoHAsync_v2", cuda.copy) &&
        found(library, "cuThreadExchangeStreamCaptureMode", cuda.capture_mode) &&
        found(library, "cuMemGetInfo_v2", cuda.memory_info);
}

const Driver by_cuda = {
    [] {
        size_t free = 0, total = 0;
        return cuda.memory_info(&free, &total) ? SIZE_MAX : free;
    },
    [](void* event) { return event ? cuda.event_synchronize(event) : 0; },
    [](void* to, const void* from, size_t nbytes) {
        constexpr unsigned non_blocking = 1;
        if (int error = stream ? 0 : cuda.stream_create(&stream, non_blocking)) return error;
        return cuda.copy(to, reinterpret_cast<unsigned long long>(from), nbytes, stream);
    },
    [] {
        int error = stream ? cuda.stream_synchronize(stream) : 0;
        if (stream) cuda.stream_destroy(stream);
        stream = nullptr;
        return error;
    },
};

const Driver in_memory = {
    [] { return SIZE_MAX; },
    [](void*) { return 0; },
    [](void* to, const void* from, size_t nbytes) { return std::memcpy(to, from, nbytes), 0; },
    [] { return 0; },
};

// While another stream is captured into a graph, other calls of this thread are none of it.
struct Relaxed {
    int mode = 2;
    Relaxed() { exchange(); }
    ~Relaxed() { exchange(); }
    void exchange() {
        if (cuda.capture_mode) cuda.capture_mode(&mode);
    }
};

// ---------------------------------------------------------------- eviction

// Somebody's view would lose its memory. Python's wrapper, once it was asked for, lives as long as the storage.
bool is_alone(const Item& item) {
    return std::all_of(item.storages.begin(), item.storages.end(), [](c10::StorageImpl* storage) {
        const size_t owners = c10::raw::intrusive_ptr::use_count(storage);
        return owners == 1 || (owners == 2 && storage->pyobj_slot()->has_unique_reference());
    });
}

bool copied(const Driver& driver, const Item& item) {
    if (driver.wait(item.last_use)) return false;
    int error = 0;
    for (const Piece& piece : item.pieces)
        if ((error = driver.copy(piece.to, piece.from, size_t(piece.nbytes)))) break;
    return driver.finish() == 0 && error == 0;
}

// Evict at least `nbytes` of what is offered on the device, or all; nothing if all were too little. Returns how many.
int64_t evict(size_t nbytes, c10::Device device) {
    const Relaxed relaxed;
    const Driver& driver = device.is_cuda() ? by_cuda : in_memory;
    std::vector<c10::DataPtr> freed;  // without the lock
    size_t there = 0, left = 0;
    const std::lock_guard<std::mutex> guard(items_lock);
    std::vector<Item*> offered;
    for (Item* item : items)
        if (item->state == OFFERED && item->device == device) offered.push_back(item), there += item->nbytes;
    if (const size_t free = driver.free(); free < nbytes && there < nbytes - free) return 0;
    std::stable_sort(offered.begin(), offered.end(), [](Item* a, Item* b) { return a->rank > b->rank; });
    for (Item* item : offered) {
        if (left && left >= nbytes) break;
        item->began_s = now_s();
        if (!is_alone(*item) || !copied(driver, *item)) continue;
        for (c10::StorageImpl* storage : item->storages) {
            freed.push_back(storage->set_data_ptr(c10::DataPtr(nullptr, storage->device())));
            storage->set_nbytes(0);
        }
        item->ended_s = now_s();
        item->asked = nbytes;
        item->state = TAKEN;
        left += item->nbytes;
        ++evictions;
    }
    return int64_t(left);
}

// ---------------------------------------------------------------- the allocator

using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);

struct Served {
    void** entry = nullptr;
    Allocate allocate = nullptr;
    c10::DeviceType type = c10::kCPU;
};
Served served_one;  // written once, before its entry is replaced

c10::DataPtr served(c10::Allocator* self, size_t nbytes) {
    while (true) {
        try {
            return served_one.allocate(self, nbytes);
        } catch (c10::OutOfMemoryError& error) {
            const c10::Device device = c10::impl::getDeviceGuardImpl(served_one.type)->getDevice();
            if (evict(nbytes, device) == 0) {
                const std::lock_guard<std::mutex> guard(items_lock);
                if (!sentence.empty()) error.add_context(sentence);
                throw;
            }
            // What steps need begins anew, beside less state.
            if (auto* counts = dynamic_cast<c10::DeviceAllocator*>(self)) counts->resetPeakStats(device.index());
        }
    }
}

// The entry of `allocate` in a table of virtual functions, as pointers to members have it (Itanium C++ ABI).
size_t entry_of_allocate() {
    auto member = &c10::Allocator::allocate;
    ptrdiff_t parts[2];
    static_assert(sizeof(member) == sizeof(parts), "a pointer to a member function");
    std::memcpy(parts, &member, sizeof(parts));
#if defined(__aarch64__) || defined(__arm__)
    return size_t(parts[0]) / sizeof(void*);
#else
    return size_t(parts[0] - 1) / sizeof(void*);
#endif
}

bool is_writable(uintptr_t address) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        unsigned long start = 0, end = 0;
        char may[5] = "";
        if (std::sscanf(line.c_str(), "%lx-%lx %4s", &start, &end, may) == 3 && start <= address && address < end)
            return may[1] == 'w';
    }
    return false;
}

}  // namespace

extern "C" {

// Serve the allocator of a c10::DeviceType. Returns null, or why that cannot be. Once in a process.
const char* hytrain_reclaim_serve(int type) {
    const std::lock_guard<std::mutex> guard(items_lock);
    if (served_one.entry) return served_one.type == c10::DeviceType(type) ? nullptr : "another device's is served";
    if (c10::DeviceType(type) == c10::kCUDA && !has_cuda()) return "the CUDA driver lacks what it needs";
    c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType(type));
    if (!allocator) return "there is no allocator";
    void** entry = *reinterpret_cast<void***>(allocator) + entry_of_allocate();
    const auto page = uintptr_t(getpagesize());
    void* const start = reinterpret_cast<void*>(uintptr_t(entry) / page * page);  // an entry crosses no page
    const bool was_writable = is_writable(uintptr_t(entry));
    if (!was_writable && mprotect(start, page, PROT_READ | PROT_WRITE)) return "its functions cannot be replaced";
    served_one = {entry, reinterpret_cast<Allocate>(*entry), c10::DeviceType(type)};
    __atomic_store_n(entry, reinterpret_cast<void*>(&served), __ATOMIC_RELEASE);
    if (!was_writable) mprotect(start, page, PROT_READ);
    return nullptr;
}

// `tensors` have the storages, which they alone refer to. They live as long as the item is offered.
Item* hytrain_reclaim_add(
    const Piece* pieces, int64_t many, c10::TensorImpl* const* tensors, int64_t count) {
    auto item = std::make_unique<Item>();
    item->pieces.assign(pieces, pieces + many);
    for (int64_t i = 0; i < count; ++i) {
        item->storages.push_back(tensors[i]->unsafe_storage().unsafeGetStorageImpl());
        item->nbytes += item->storages.back()->nbytes();
        item->device = item->storages.back()->device();
    }
    const std::lock_guard<std::mutex> guard(items_lock);
    items.push_back(item.get());
    return item.release();
}

// From now on it may leave, after the event `last_use`: the items of the highest rank first.
void hytrain_reclaim_offer(Item* item, void* last_use, int rank) {
    const std::lock_guard<std::mutex> guard(items_lock);
    item->rank = rank;
    item->last_use = last_use;
    item->state = OFFERED;
}

// From now on it stays. Returns 1 if it has left already: when that began and ended, and for a request of how many bytes.
int hytrain_reclaim_withdraw(Item* item, double* times_s, int64_t* asked) {
    const std::lock_guard<std::mutex> guard(items_lock);
    if (item->state == TAKEN) {
        times_s[0] = item->began_s;
        times_s[1] = item->ended_s;
        *asked = int64_t(item->asked);
        return 1;
    }
    item->state = HELD;
    return 0;
}

int hytrain_reclaim_has_left(Item* item) {
    const std::lock_guard<std::mutex> guard(items_lock);
    return item->state == TAKEN;
}

void hytrain_reclaim_remove(Item* item) {
    const std::lock_guard<std::mutex> guard(items_lock);
    items.erase(std::find(items.begin(), items.end(), item));
    delete item;
}

// What an OutOfMemoryError says from now on, besides.
void hytrain_reclaim_say(const char* what) {
    const std::lock_guard<std::mutex> guard(items_lock);
    sentence = what;
}

// How many items have left since the process began.
int64_t hytrain_reclaim_evictions() {
    return evictions;
}
}
