// SPDX-License-Identifier: Apache-2.0
// Finds pairs of accesses to a block's shared memory that nothing orders, by vector clocks.
//
// A thread's clock counts its synchronisations; a barrier hands the clocks of those that arrive to
// those that wait. An access is ordered after another one if its thread has been handed the other
// thread's clock of then. So a race is found in whatever order threads run, also between lanes of
// one warp. The header knows no kernel and no scheduling.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace emulator {

// Where in the source an access is asked for.
struct Place {
    const char* file;
    int line;

    static Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

// A named part of shared memory, from `offset` to the next one's; in order.
struct Region {
    const char* name;
    uint32_t offset;
};

// Those of the kernel that is launched next.
inline std::vector<Region>& regions() {
    static std::vector<Region> regions;
    return regions;
}

class Races {
 public:
    using Clock = std::vector<uint32_t>;
    static constexpr size_t SHOWN = 8;

    Races(int threads, size_t bytes) : clocks_(threads, Clock(threads)), cells_(bytes) {
        for (int thread = 0; thread < threads; ++thread) clocks_[thread][thread] = 1;
    }

    void read(int thread, uint32_t offset, size_t bytes, Place place) {
        for (uint32_t byte = offset; byte < offset + bytes; ++byte) {
            Cell& cell = cells_[byte];
            if (!is_ordered(cell.write, thread))
                report("read after write", byte, thread, place, cell.write);
            // A write that comes after this read comes after those that it follows, too.
            auto& reads = cell.reads;
            reads.erase(std::remove_if(reads.begin(), reads.end(),
                                       [&](const Access& a) { return is_ordered(a, thread); }),
                        reads.end());
            reads.push_back(access(thread, place));
        }
    }

    void write(int thread, uint32_t offset, size_t bytes, Place place) {
        for (uint32_t byte = offset; byte < offset + bytes; ++byte) {
            Cell& cell = cells_[byte];
            if (!is_ordered(cell.write, thread))
                report("write after write", byte, thread, place, cell.write);
            for (const Access& read : cell.reads)
                if (!is_ordered(read, thread))
                    report("write after read", byte, thread, place, read);
            cell.reads.clear();
            cell.write = access(thread, place);
        }
    }

    // An asynchronous copy writes at any time until its thread has waited for it: nothing may
    // follow before that, of its own thread neither.
    void begin_copy(int thread, uint32_t offset, size_t bytes, Place place) {
        write(thread, offset, bytes, place);
        for (uint32_t byte = offset; byte < offset + bytes; ++byte)
            cells_[byte].write.clock = UNDER_WAY;
    }
    void end_copy(int thread, uint32_t offset, size_t bytes) {
        for (uint32_t byte = offset; byte < offset + bytes; ++byte)
            if (Access& write = cells_[byte].write;
                write.thread == thread && write.clock == UNDER_WAY)
                write.clock = clocks_[thread][thread];
    }

    // Hands all that the thread did so far to whoever follows `clock`.
    void release(int thread, Clock& clock) {
        clock.resize(clocks_.size());
        join(clock, clocks_[thread]);
        ++clocks_[thread][thread];
    }
    void follow(int thread, const Clock& clock) { join(clocks_[thread], clock); }

    // What was found, a line for each pair of places; empty if nothing was.
    std::string found() const {
        std::string text;
        for (size_t i = 0; i < std::min(races_.size(), SHOWN); ++i)
            text += (i ? "\n" : "") + races_[i].text + ", " + std::to_string(races_[i].bytes) +
                    " bytes in all";
        if (races_.size() > SHOWN)
            text += "\nand " + std::to_string(races_.size() - SHOWN) + " more pairs of places";
        return text;
    }

 private:
    static constexpr uint32_t UNDER_WAY = ~0u;

    struct Access {
        int thread = -1;
        uint32_t clock = 0;
        Place place = {nullptr, 0};
    };
    struct Cell {
        Access write;
        std::vector<Access> reads;
    };
    struct Race {
        const char* kind;
        Place place, before;
        uint64_t bytes;
        std::string text;
    };

    Access access(int thread, Place place) const {
        return {thread, clocks_[thread][thread], place};
    }
    bool is_ordered(const Access& before, int thread) const {
        return before.thread < 0 || (before.thread == thread && before.clock != UNDER_WAY) ||
               clocks_[thread][before.thread] >= before.clock;
    }
    static void join(Clock& clock, const Clock& other) {
        for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
    }

    void report(const char* kind, uint32_t byte, int thread, Place place, const Access& before) {
        for (Race& race : races_)
            if (race.kind == kind && same(race.place, place) && same(race.before, before.place)) {
                ++race.bytes;
                return;
            }
        races_.push_back({kind, place, before.place, 1,
                          std::string("race, ") + kind + " at " + describe(byte) + ": thread " +
                              std::to_string(thread) + " at " + describe(place) +
                              ", nothing orders it after thread " + std::to_string(before.thread) +
                              " at " + describe(before.place) +
                              (before.clock == UNDER_WAY ? ", a copy not waited for" : "")});
    }
    static bool same(Place a, Place b) {
        return a.line == b.line && std::strcmp(a.file, b.file) == 0;
    }
    static std::string describe(Place place) {
        const char* slash = std::strrchr(place.file, '/');
        return std::string(slash ? slash + 1 : place.file) + ":" + std::to_string(place.line);
    }
    static std::string describe(uint32_t byte) {
        std::string text = "byte " + std::to_string(byte);
        for (const Region& region : regions())
            if (region.offset <= byte)
                text = region.name + (" + " + std::to_string(byte - region.offset));
        return text;
    }

    std::vector<Clock> clocks_;
    std::vector<Cell> cells_;
    std::vector<Race> races_;
};

}  // namespace emulator
