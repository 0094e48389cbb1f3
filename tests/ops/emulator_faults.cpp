// SPDX-License-Identifier: Apache-2.0
// Kernels that are wrong in one way each, for the emulator to show; the argument names the fault.
#include <cmath>
#include <cstdio>
#include <cstring>

#include "ptx.cuh"

namespace {

struct Params {
    const char* fault;
    float* out;
};

bool is(const Params& p, const char* fault) { return std::strcmp(p.fault, fault) == 0; }

// The second warp writes numbers, the first adds them up; both copy a number that was copied
// asynchronously.
void kernel(const Params& p) {
    const unsigned thread = ptx::thread(), lane = thread % 32;
    if (is(p, "past_the_end") && thread == 32) ptx::shared<float>(128) = 0.0f;
    if (is(p, "misaligned") && thread == 0) ptx::shared<float>(2) = 0.0f;
    if (is(p, "divergent") && lane < 16) {
        ptx::shuffle_xor(0.0f, 1);
    } else if (is(p, "divergent")) {
        ptx::warp_sync();
    }
    if (is(p, "deadlock") && thread == 0) ptx::named_sync<1, 64>();
    if (is(p, "counts")) {
        if (thread < 32)
            ptx::named_sync<1, 64>();
        else
            ptx::named_sync<1, 128>();
    }
    if (thread == 0) ptx::copy_async(64, p.out, true);
    ptx::copy_commit();
    if (thread >= 32 && lane < 10) ptx::shared<float>(lane * 4) = static_cast<float>(lane);
    if (!is(p, "no_wait")) ptx::copy_wait<0>();
    if (!is(p, "no_barrier")) ptx::block_sync();
    float sum = 0.0f;
    for (int i = 0; i < 10; ++i) sum += ptx::shared<float>(i * 4);
    if (lane == 0) p.out[4 + thread / 32] = sum + ptx::shared<float>(64);
}

}  // namespace

int main(int count, char** arguments) {
    alignas(16) float out[6] = {};
    Params params{count > 1 ? arguments[1] : "none", out};
    try {
        WEAVER_LAUNCH(kernel, 1, 1, 1, 64, 128, nullptr, params);
        std::printf("%g %g\n", std::fabs(out[4]), std::fabs(out[5]));
    } catch (const std::runtime_error& error) {
        std::printf("error: %s\n", error.what());
    }
}
