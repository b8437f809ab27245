// Kernels of solvers/cuda behind one call, `launch`, which takes what cuLaunchKernel does. Which kernels says
// kernels.hpp, which host_build.py writes. With threads there is a main() besides: it reads a launch from a
// file and writes the arrays back.
#ifdef CUDA_HOST_THREADS
#include "threads.hpp"
#else
#include "fibers.hpp"
#endif

#include <cstdio>
#include <tuple>
#include <utility>

#include "kernels.hpp"

namespace {

template <class... Args, std::size_t... I>
void run(void (*kernel)(Args...), unsigned blocks, unsigned threads, std::uint64_t seed,
         std::uint64_t most_switches, void** args, std::index_sequence<I...>) {
    blockDim.x = threads, gridDim.x = blocks;
    cuda_host::begin_launch();
    for (unsigned b = 0; b < blocks; ++b) {
        blockIdx.x = b;
        cuda_host::run_block(threads, seed + b, most_switches, [&] { kernel(*static_cast<Args*>(args[I])...); });
    }
}

template <class... Args>
void run(void (*kernel)(Args...), unsigned blocks, unsigned threads, std::uint64_t seed,
         std::uint64_t most_switches, void** args) {
    run(kernel, blocks, threads, seed, most_switches, args, std::index_sequence_for<Args...>());
}

}  // namespace

#ifndef CUDA_HOST_THREADS
// Warp exchanges of the last launch.
extern "C" std::uint64_t exchanges() { return cuda_host::block.exchanges; }
#endif

// Returns what went wrong, or null.
extern "C" const char* launch(const char* name, unsigned blocks, unsigned threads, std::uint64_t seed,
                              std::uint64_t most_switches, void** args) {
    static std::string error;
    try {
#define KERNEL(kernel) \
    if (std::strcmp(name, #kernel) == 0) return run(&kernel, blocks, threads, seed, most_switches, args), nullptr;
        KERNELS
        return "no such kernel";
    } catch (const std::string& what) {
        error = what;
        return error.c_str();
    }
}

#ifdef CUDA_HOST_THREADS
// Takes a kernel and a file: blocks, threads, arguments, and for each whether it is an array, its bytes, and those
// bytes; all numbers of 64 bits.
int main(int, char** argv) {
    std::FILE* file = std::fopen(argv[2], "r+b");
    const auto number = [file] {
        std::uint64_t n = 0;
        if (std::fread(&n, sizeof n, 1, file) != 1) std::abort();
        return n;
    };
    const auto blocks = static_cast<unsigned>(number()), threads = static_cast<unsigned>(number());
    struct Arg {
        bool array;
        long at;
        std::vector<char> bytes;
        void* pointer;
    };
    std::vector<Arg> args(number());
    std::vector<void*> values;
    for (Arg& arg : args) {
        arg.array = number() != 0;
        arg.bytes.resize(number());
        arg.at = std::ftell(file);
        if (std::fread(arg.bytes.data(), 1, arg.bytes.size(), file) != arg.bytes.size()) std::abort();
        arg.pointer = arg.bytes.data();
        values.push_back(arg.array ? static_cast<void*>(&arg.pointer) : arg.pointer);
    }
    launch(argv[1], blocks, threads, 0, 0, values.data());
    for (const Arg& arg : args) {
        std::fseek(file, arg.at, SEEK_SET);
        std::fwrite(arg.bytes.data(), 1, arg.bytes.size(), file);
    }
    std::fclose(file);
}
#endif
