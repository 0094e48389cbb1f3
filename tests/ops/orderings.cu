// SPDX-License-Identifier: Apache-2.0
// The ways in which the kernels of csrc/ order accesses to shared memory, one at a time: as they
// are, and with what orders them left out.
//
// Emulated, it shows what the emulator's search for races sees. On a GPU it shows the same of a
// tool that watches kernels:
//
//     nvcc -x cu -arch=sm_90a -lineinfo -Icsrc tests/ops/orderings.cu -o orderings
//     compute-sanitizer --tool racecheck ./orderings arrive_pair [wrong]
#include <cstdio>
#include <cstring>

#include "ptx.cuh"

namespace {

enum Idiom {
    BLOCK,
    WARP,
    ARRIVE_ALL,
    ARRIVE_PAIR,
    ARRIVE_BOTH,
    READ_PAIR,
    WRITE_PAIR,
    COPY,
    COPY_BARRIER
};
constexpr const char* NAMES[] = {"block",     "warp",      "arrive_all", "arrive_pair", "arrive_both",
                                 "read_pair", "write_pair", "copy",      "copy_barrier"};
constexpr int IDIOMS = sizeof NAMES / sizeof NAMES[0];
constexpr int THREADS = 128, NUMBERS = 2 * THREADS;
// A number of each thread; a matrix of each warp; two copies of each thread.
constexpr uint32_t MATRICES = THREADS * 4, COPIES = MATRICES + THREADS * 16,
                   MORE_COPIES = COPIES + THREADS * 16, SHARED_BYTES = MORE_COPIES + THREADS * 16;

struct Params {
    Idiom idiom;
    bool wrong;
    float* numbers;
};

// Warps 0 and 2 are a pair, and warps 1 and 3; each has a barrier of its own.
WEAVER_DEVICE void arrive(unsigned pair) {
    if (pair == 0)
        ptx::named_arrive<2, 64>();
    else
        ptx::named_arrive<3, 64>();
}
WEAVER_DEVICE void await(unsigned pair) {
    if (pair == 0)
        ptx::named_sync<2, 64>();
    else
        ptx::named_sync<3, 64>();
}

// Offset of a thread's number.
WEAVER_DEVICE uint32_t number(unsigned thread) { return thread * 4; }

WEAVER_KERNEL(THREADS, 1)
kernel(WEAVER_PARAMETER const Params p) {
    const unsigned thread = ptx::thread(), warp = thread / 32, lane = thread % 32, pair = warp % 2;
    const bool first = warp < 2, right = !p.wrong;
    float sum = 0.0f;
    if (p.idiom == BLOCK) {
        ptx::shared<float>(number(thread)) = 1.0f;
        if (right) ptx::block_sync();
        sum = ptx::shared<float>(number(thread ^ 32));
    } else if (p.idiom == WARP) {
        const uint32_t row[4] = {lane, lane, lane, lane}, matrices = MATRICES + warp * 512;
        ptx::store_matrices_transposed(matrices + lane * 16, row);
        if (right) ptx::warp_sync();
        sum = ptx::shared<float>(matrices + (lane ^ 1) * 16);
    } else if (p.idiom == ARRIVE_ALL) {
        if (!first) {
            ptx::shared<float>(number(thread)) = 1.0f;
            if (right) ptx::named_arrive<1, THREADS>();
        } else {
            if (right) ptx::named_sync<1, THREADS>();
            sum = ptx::shared<float>(number(thread + 64));
        }
    } else if (p.idiom == ARRIVE_PAIR) {
        if (first) {
            ptx::shared<float>(number(thread)) = 1.0f;
            if (right) arrive(pair);
        } else {
            if (right) await(pair);
            sum = ptx::shared<float>(number(thread - 64));
        }
    } else if (p.idiom == ARRIVE_BOTH) {
        // Who waits for its pair has arrived at a barrier that the pair waits at before it writes.
        if (first) {
            ptx::named_sync<1, THREADS>();
            ptx::shared<float>(number(thread)) = 1.0f;
            if (right) arrive(pair);
        } else {
            ptx::named_arrive<1, THREADS>();
            if (right) await(pair);
            sum = ptx::shared<float>(number(thread - 64));
        }
    } else if (p.idiom == READ_PAIR) {
        ptx::shared<float>(number(thread)) = 1.0f;
        ptx::block_sync();
        if (first) {
            sum = ptx::shared<float>(number(thread + 64));
            if (right) arrive(pair);
        } else {
            if (right) await(pair);
            ptx::shared<float>(number(thread)) = 2.0f;
        }
    } else if (p.idiom == WRITE_PAIR) {
        if (first) {
            ptx::shared<float>(number(thread)) = 1.0f;
            if (right) arrive(pair);
        } else {
            if (right) await(pair);
            ptx::shared<float>(number(thread - 64)) = 2.0f;
        }
    } else {
        ptx::copy_async(COPIES + thread * 16, p.numbers, true);
        ptx::copy_commit();
        ptx::copy_async(MORE_COPIES + thread * 16, p.numbers, false);
        ptx::copy_commit();
        if (right || p.idiom != COPY) ptx::copy_wait<1>();
        if (right || p.idiom != COPY_BARRIER) ptx::block_sync();
        sum = ptx::shared<float>(COPIES + (thread ^ 32) * 16);
        ptx::copy_wait<0>();
        ptx::block_sync();
        sum += ptx::shared<float>(MORE_COPIES + (thread ^ 32) * 16);
    }
    p.numbers[THREADS + thread] = sum;
}

}  // namespace

int main(int count, char** arguments) {
    const bool wrong = count > 2 && std::strcmp(arguments[2], "wrong") == 0;
    for (int idiom = 0; idiom < IDIOMS; ++idiom) {
        if (count > 1 && std::strcmp(arguments[1], NAMES[idiom]) != 0) continue;
#ifdef WEAVER_EMULATE
        alignas(16) float numbers[NUMBERS] = {};
        emulator::launch_races() = true;
        emulator::regions() = {
            {"numbers", 0}, {"matrices", MATRICES}, {"copies", COPIES}, {"more", MORE_COPIES}};
#else
        float* numbers;
        if (cudaMalloc(&numbers, NUMBERS * sizeof(float)) != cudaSuccess) return 1;
        cudaMemset(numbers, 0, NUMBERS * sizeof(float));
#endif
        Params params{static_cast<Idiom>(idiom), wrong, numbers};
#ifdef WEAVER_EMULATE
        try {
            WEAVER_LAUNCH(kernel, 1, 1, 1, THREADS, SHARED_BYTES, nullptr, params);
            std::printf("%s: no race\n", NAMES[idiom]);
        } catch (const std::runtime_error& error) {
            std::printf("%s: %s\n", NAMES[idiom], error.what());
        }
#else
        WEAVER_LAUNCH(kernel, 1, 1, 1, THREADS, SHARED_BYTES, nullptr, params);
        if (cudaDeviceSynchronize() != cudaSuccess) return 1;
        cudaFree(numbers);
        std::printf("%s: launched\n", NAMES[idiom]);
#endif
    }
}
