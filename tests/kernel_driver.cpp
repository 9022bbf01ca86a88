// Calls a kernel's functions as native.py does, on planes from its input, and writes the planes after each call: without
// Python, so that an emulator of another processor can run it. test_kernel_variants.py knows the format of a case.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <dlfcn.h>

namespace {

constexpr int planes = 5;  // weights, remainder, two moments, gradients

struct Planes {
    void *weights, *remainder, *moments[2];
};

struct Case {
    char name[64];
    float scalars[16], by;
    uint32_t elements[3], has_remainder;
    int64_t numel, in_vectors;
};

using Update = void (*)(const Planes *, const void *, float, const Planes *, int64_t, int64_t, const void *, const void *,
                        int);

struct alignas(64) Line {
    char bytes[64];
};
using Memory = std::vector<Line>;

Planes of(Memory *memory, bool has_remainder) {
    return {memory[0].data(), has_remainder ? memory[1].data() : nullptr, {memory[2].data(), memory[3].data()}};
}

}  // namespace

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    for (Case one; std::fread(&one, sizeof one, 1, stdin) == 1;) {
        const auto update = reinterpret_cast<Update>(dlsym(library, one.name));
        if (!update) return std::fprintf(stderr, "no %s\n", one.name), 1;
        const size_t nbytes = one.numel * sizeof(float);
        Memory read[planes], written[planes];
        for (int i = 0; i < planes; ++i) {
            read[i].resize(nbytes / sizeof(Line) + 1);
            written[i] = read[i];
            if (std::fread(read[i].data(), 1, nbytes, stdin) != nbytes) return 1;
        }
        const Planes from = of(read, one.has_remainder), to = of(written, one.has_remainder);
        for (const Planes *into : {&to, &from})
            update(&from, read[planes - 1].data(), one.by, into, one.numel, one.in_vectors, one.scalars, one.elements, 2);
        for (const Memory *memory : {written, read})
            for (int i = 0; i < planes - 1; ++i) std::fwrite(memory[i].data(), 1, nbytes, stdout);
    }
}
