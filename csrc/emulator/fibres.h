// SPDX-License-Identifier: Apache-2.0
// Runs a kernel's thread blocks on a CPU: each thread is a fibre that runs until it waits for
// others.
//
// One thread runs at a time, so results are deterministic. Which warp runs next is the order's
// choice: with a barrier missing, some order lets a reader run before its writer, and results
// differ or are NaN, since shared memory starts as NaN. Reported as errors are accesses outside
// shared memory or misaligned, lanes of a warp that meet in different operations, and deadlocks;
// on demand also accesses that nothing orders (races.h). The header knows no kernel and none of the
// GPU's instructions but barriers.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <ucontext.h>
#include <vector>

#include "races.h"

namespace emulator {

// longjmp without the check of _FORTIFY_SOURCE, a default of Ubuntu's g++: it ends the process
// where a jump goes down the stack, as one from the scheduler into a fibre may.
[[noreturn]] void unchecked_longjmp(jmp_buf target, int value) __asm__("_longjmp");

constexpr int WARP = 32;
constexpr int BARRIERS = 16;
constexpr size_t STACK_BYTES = 128 * 1024;

// What a warp does once all its lanes have asked for it; gets each lane's arguments.
using Collective = void (*)(void* const* arguments);

struct Copy {
    uint32_t offset;
    const void* source;
    bool live;
};

struct Thread {
    enum State { READY, COLLECTIVE, BARRIER, DONE };

    int index = 0;
    State state = READY;
    bool started = false;
    jmp_buf resume;
    ucontext_t context;
    Collective collective = nullptr;
    void* arguments = nullptr;
    int barrier = 0;
    // Copies asked for, by group; the last group is open.
    std::vector<std::vector<Copy>> copies;
};

struct Barrier {
    int arrived = 0;
    int expected = 0;
    Races::Clock clock;
};

class Block {
 public:
    // `order`: 0 runs warps from first to last, 1 from last to first, else it seeds a random
    // choice. `races`: whether to look for them.
    Block(int x, int y, int z, int threads, size_t shared_bytes, unsigned order, bool races,
          const std::function<void()>& body)
        : index_{x, y, z},
          order_(order),
          random_(order),
          body_(body),
          shared_(shared_bytes, 0xff),
          threads_(threads),
          races_(races ? std::make_unique<Races>(threads, shared_bytes) : nullptr) {
        stacks().resize(std::max(stacks().size(), threads * STACK_BYTES));
        for (int i = 0; i < threads; ++i) threads_[i].index = i;
    }

    void run() {
        current() = this;
        for (int warp = next_warp(); warp >= 0; warp = next_warp()) run_warp(warp);
        for (const Thread& thread : threads_)
            if (thread.state != Thread::DONE) fail("deadlock: " + describe(thread));
        for (const Barrier& barrier : barriers_)
            if (barrier.arrived != 0)
                fail("a barrier is left with " + std::to_string(barrier.arrived) + " arrivals");
        if (races_ && !races_->found().empty()) fail(races_->found());
    }

    static Block*& current() {
        static Block* block = nullptr;
        return block;
    }

    int index(int axis) const { return index_[axis]; }
    int threads() const { return static_cast<int>(threads_.size()); }
    Thread& thread() { return *running_; }
    // None unless they are looked for.
    Races* races() { return races_.get(); }

    unsigned char* shared(uint32_t offset, size_t bytes) {
        if (offset % bytes != 0)
            stop("misaligned access of " + std::to_string(bytes) + " bytes at", offset);
        if (offset + bytes > shared_.size()) stop("access past shared memory at", offset);
        return shared_.data() + offset;
    }

    void collective(Collective operation, void* arguments) {
        running_->collective = operation;
        running_->arguments = arguments;
        wait(Thread::COLLECTIVE);
    }

    // All lanes of the warp wait for each other; what they did is ordered before what they do next.
    void warp_sync() {
        collective(
            [](void* const*) {
                Block& block = *current();
                if (!block.races_) return;
                Races::Clock clock;
                const int first = block.running_->index / WARP * WARP;
                for (int lane = 0; lane < WARP; ++lane) block.races_->release(first + lane, clock);
                for (int lane = 0; lane < WARP; ++lane) block.races_->follow(first + lane, clock);
            },
            nullptr);
    }

    void barrier(int id, int count, bool waits) {
        Barrier& barrier = barriers_[id];
        if (barrier.arrived != 0 && barrier.expected != count)
            stop("threads disagree on the count of barrier", id);
        barrier.expected = count;
        if (races_) races_->release(running_->index, barrier.clock);
        if (++barrier.arrived == count) {
            barrier.arrived = 0;
            for (Thread& thread : threads_)
                if (thread.state == Thread::BARRIER && thread.barrier == id) {
                    thread.state = Thread::READY;
                    if (races_) races_->follow(thread.index, barrier.clock);
                }
            if (races_ && waits) races_->follow(running_->index, barrier.clock);
            barrier.clock.clear();
        } else if (waits) {
            running_->barrier = id;
            wait(Thread::BARRIER);
        }
    }

 private:
    int next_warp() {
        const int warps = static_cast<int>(threads_.size()) / WARP;
        std::vector<int> ready;
        for (int warp = 0; warp < warps; ++warp)
            for (int lane = 0; lane < WARP; ++lane)
                if (threads_[warp * WARP + lane].state == Thread::READY) {
                    ready.push_back(warp);
                    break;
                }
        if (ready.empty()) return -1;
        if (order_ == 0) return ready.front();
        if (order_ == 1) return ready.back();
        return ready[random_() % ready.size()];
    }

    // Each lane up to where it waits, then what the warp waits for together.
    void run_warp(int warp) {
        Thread* lanes = &threads_[warp * WARP];
        // Twice where the last lane's arrival at a barrier lets the others go on.
        for (bool ran = true; ran;) {
            ran = false;
            for (int lane = 0; lane < WARP; ++lane)
                if (lanes[lane].state == Thread::READY) {
                    resume(lanes[lane]);
                    ran = true;
                }
        }
        int waiting = 0;
        for (int lane = 0; lane < WARP; ++lane) waiting += lanes[lane].state == Thread::COLLECTIVE;
        if (waiting == 0) return;
        void* arguments[WARP];
        for (int lane = 0; lane < WARP; ++lane) {
            if (lanes[lane].state != Thread::COLLECTIVE ||
                lanes[lane].collective != lanes[0].collective)
                fail("lanes of a warp diverge: " + describe(lanes[0]) + ", " +
                     describe(lanes[lane]));
            arguments[lane] = lanes[lane].arguments;
        }
        running_ = lanes;
        lanes[0].collective(arguments);
        for (int lane = 0; lane < WARP; ++lane) lanes[lane].state = Thread::READY;
    }

    // setjmp and longjmp switch without the system calls of swapcontext.
    void resume(Thread& thread) {
        running_ = &thread;
        if (_setjmp(scheduler_) == 0) {
            if (thread.started) unchecked_longjmp(thread.resume, 1);
            thread.started = true;
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = stacks().data() + thread.index * STACK_BYTES;
            thread.context.uc_stack.ss_size = STACK_BYTES;
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, &Block::enter, 0);
            setcontext(&thread.context);
        }
        if (!error_.empty()) fail(error_);
    }

    static void enter() {
        Block* block = current();
        block->body_();
        block->wait(Thread::DONE);
    }

    void wait(Thread::State state) {
        running_->state = state;
        if (_setjmp(running_->resume) == 0) unchecked_longjmp(scheduler_, 1);
    }

    // An error ends the block; an exception cannot leave a fibre's stack, so there the scheduler
    // throws it.
    [[noreturn]] void stop(const std::string& line, uint32_t where) {
        error_ = line + " " + std::to_string(where) + ", thread " + std::to_string(running_->index);
        if (running_->state != Thread::READY) fail(error_);
        unchecked_longjmp(scheduler_, 1);
    }

    [[noreturn]] void fail(const std::string& line) const {
        throw std::runtime_error("emulator, block " + std::to_string(index_[0]) + " " +
                                 std::to_string(index_[1]) + " " + std::to_string(index_[2]) +
                                 ": " + line);
    }

    static std::string describe(const Thread& thread) {
        static const char* const states[] = {"is ready", "waits for its warp", "waits at barrier ",
                                             "has ended"};
        return "thread " + std::to_string(thread.index) + " " + states[thread.state] +
               (thread.state == Thread::BARRIER ? std::to_string(thread.barrier) : "");
    }

    static std::vector<char>& stacks() {
        static std::vector<char> stacks;
        return stacks;
    }

    int index_[3];
    unsigned order_;
    std::mt19937 random_;
    const std::function<void()>& body_;
    std::vector<unsigned char> shared_;
    std::vector<Thread> threads_;
    std::unique_ptr<Races> races_;
    Barrier barriers_[BARRIERS];
    Thread* running_ = nullptr;
    jmp_buf scheduler_;
    std::string error_;
};

inline unsigned& launch_order() {
    static unsigned order = 0;
    return order;
}

inline bool& launch_races() {
    static bool races = false;
    return races;
}

inline void launch(int x, int y, int z, int threads, size_t shared_bytes,
                   const std::function<void()>& body) {
    for (int k = 0; k < z; ++k)
        for (int j = 0; j < y; ++j)
            for (int i = 0; i < x; ++i)
                Block(i, j, k, threads, shared_bytes, launch_order(), launch_races(), body).run();
}

}  // namespace emulator
