// CUDA threads as fibers with seeded schedules; included once.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include "cuda_host.hpp"

cuda_host::Index threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

constexpr std::size_t kStack = 64 << 10;

struct Fiber {
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStack);
    jmp_buf at;
    bool started, done, waits;
    // What the lane brings to the exchange that it waits in, and what it took from the last.
    Kind kind;
    unsigned mask;
    std::uint64_t word;
    Lanes words;
};

class Block {
  public:
    std::uint64_t exchanges = 0;

    // Runs the kernel for every thread of one block.
    void run(unsigned threads, std::uint64_t seed, std::uint64_t most_switches,
             const std::function<void()>& kernel) {
        while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
        threads_ = threads, random_ = seed * 2 + 1, switches_left_ = most_switches, kernel_ = &kernel;
        at_barrier_ = done_ = 0;
        ready_.clear();
        for (unsigned t = 0; t < threads; ++t) {
            fibers_[t]->started = fibers_[t]->done = fibers_[t]->waits = false;
            ready_.push_back(t);
        }
        error_.clear();
        if (_setjmp(home_) == 0) go_on();
        if (!error_.empty()) throw error_;
    }

    const Lanes& exchange(Kind kind, unsigned mask, std::uint64_t word) {
        Fiber& own = *fibers_[current_];
        const unsigned lane = current_ % kLanes, first = current_ - lane;
        if (!(mask >> lane & 1)) fail("a lane outside its own mask");
        own.kind = kind, own.mask = mask, own.word = word, own.waits = true;
        bool all = true;
        for (int l = 0; l < kLanes; ++l) {
            if (!(mask >> l & 1)) continue;
            if (first + l >= threads_ || fibers_[first + l]->done) fail("a mask with a lane that has ended");
            const Fiber& other = *fibers_[first + l];
            if (!other.waits || other.mask == 0)
                all = false;
            else if (other.kind != kind || other.mask != mask)
                fail("lanes of one mask in different exchanges");
        }
        if (all) {
            ++exchanges;
            for (int l = 0; l < kLanes; ++l) {
                if (!(mask >> l & 1)) continue;
                Fiber& other = *fibers_[first + l];
                for (int w = 0; w < kLanes; ++w) other.words[w] = mask >> w & 1 ? fibers_[first + w]->word : 0;
                other.waits = false;
                if (first + l != current_) ready_.push_back(first + l);
            }
            ready_.push_back(current_);
        }
        suspend();
        return own.words;
    }

    void barrier() {
        Fiber& own = *fibers_[current_];
        own.waits = true, own.mask = 0;
        ++at_barrier_;
        open_barrier();
        suspend();
    }

    void take_turns() {
        ready_.push_back(current_);
        suspend();
    }

    [[noreturn]] void stop(const std::string& what) {
        error_ = what;
        _longjmp(home_, 1);
    }

  private:
    // The barrier opens when all threads that have not ended are there.
    void open_barrier() {
        if (at_barrier_ == 0 || at_barrier_ + done_ < threads_) return;
        at_barrier_ = 0;
        for (unsigned t = 0; t < threads_; ++t) {
            Fiber& f = *fibers_[t];
            if (!f.waits) continue;
            f.waits = false;
            ready_.push_back(t);
        }
    }

    void suspend() {
        if (_setjmp(fibers_[current_]->at) == 0) go_on();
    }

    [[noreturn]] void go_on() {
        if (ready_.empty()) {
            if (done_ < threads_) stop("deadlock: every thread waits");
            _longjmp(home_, 1);
        }
        if (switches_left_-- == 0) stop("no end: too many switches");
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        std::swap(ready_[random_ % ready_.size()], ready_.back());
        current_ = ready_.back();
        ready_.pop_back();
        threadIdx.x = current_;
        Fiber& next = *fibers_[current_];
        if (next.started) _longjmp(next.at, 1);
        next.started = true;
        // swapcontext asks the kernel for the signal mask each time: only to begin.
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = next.stack.get();
        context.uc_stack.ss_size = kStack;
        context.uc_link = nullptr;
        makecontext(&context, &Block::enter, 0);
        setcontext(&context);
        std::abort();
    }

    static void enter();

    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<unsigned> ready_;
    unsigned threads_ = 0, current_ = 0, at_barrier_ = 0, done_ = 0;
    std::uint64_t random_ = 1, switches_left_ = 0;
    const std::function<void()>* kernel_ = nullptr;
    std::string error_;
    jmp_buf home_;
};

inline Block block;

inline void Block::enter() {
    (*block.kernel_)();
    block.fibers_[block.current_]->done = true;
    ++block.done_;
    block.open_barrier();
    block.go_on();
}

const Lanes& exchange(Kind kind, unsigned mask, std::uint64_t word) { return block.exchange(kind, mask, word); }
void block_barrier() { block.barrier(); }
void at_atomic() { block.take_turns(); }
void fence() {}
void fail(const std::string& what) { block.stop(what); }

inline void begin_launch() { block.exchanges = 0; }
inline void run_block(unsigned threads, std::uint64_t seed, std::uint64_t most_switches,
                      const std::function<void()>& kernel) {
    block.run(threads, seed, most_switches, kernel);
}

}  // namespace cuda_host
