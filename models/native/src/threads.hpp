// A team of threads that do one thing at a time together: the caller is one of them.
//
// Knows nothing of what is done.  The one idea: within a job everybody meets at barriers by spinning, since the next
// part begins within microseconds; between jobs the others spin for a moment and then sleep.  Where a neighbour wants
// the cores too, all wait at every barrier for the one who has none: fewer are faster then, so how many take part is
// decided anew for each job.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <numeric>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
inline void breathe() { _mm_pause(); }
#else
inline void breathe() { std::this_thread::yield(); }
#endif

class Team {
  public:
    // One that `adapts` takes it that all who take part have as much to do.
    explicit Team(int size, bool adapts = true)
        : adapts_(adapts), spins_(size <= int(std::thread::hardware_concurrency()) ? SPINS : 0), most_(size), size_(size), used_(size) {
        for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        job_ = nullptr;
        size_ = most_;
        announce();
        for (auto& thread : threads_) thread.join();
    }

    // Decides how many take part in the next job.
    void muster() {
        if (size_ < most_ && Clock::now() >= until_) ++size_;
    }
    int size() const { return size_; }

    // f(thread) on all that take part at once; the caller is thread 0.
    template <class F>
    void run(F&& f) {
        if (size_ == 1) { f(0); return; }
        job_ = [](void* f, int thread) { (*static_cast<std::remove_reference_t<F>*>(f))(thread); };
        what_ = &f;
        const auto began = Clock::now();
        announce();
        work(0);
        if (adapts_) judge(Clock::now() - began);
    }

    // Returns when all threads of the job have called it.
    void wait() {
        const int size = size_;  // before this thread arrives: when all have, the next job may have another
        if (size == 1) return;
        const int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        Time began{};
        for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
            if (++spins == PATIENT) began = computed();
            if (spins < spins_) breathe();
            else std::this_thread::yield();  // somebody else has the core of whom we wait for
        }
        if (began != Time{}) idle += computed() - began;
    }

  private:
    using Clock = std::chrono::steady_clock;
    using Time = std::chrono::nanoseconds;
    static constexpr int SPINS = 20000, LINGER = 1000, PATIENT = 500;  // about 1, 0.05 and 0.025 ms
    static constexpr Time SHORT = std::chrono::milliseconds(10), LONG = std::chrono::seconds(2);
    static constexpr uint32_t COUNTED = 1 << 10;  // more than threads there are

    static Time computed() {  // by this thread
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return std::chrono::seconds(t.tv_sec) + Time(t.tv_nsec);
    }

    void work(int thread) {
        idle = Time{};
        const Time before = computed();
        job_(what_, thread);
        used_[thread] = computed() - before - idle;
        wait();  // for the last of the others
    }

    // All of us together did less than one fewer could have done in the same time: one fewer from now on.  One more
    // again after a pause, which grows as long as that turns out to be too early.
    void judge(Time took) {
        if (std::accumulate(used_.begin(), used_.begin() + size_, Time{}) < took * (size_ - 1)) {
            --size_;
            until_ = Clock::now() + pause_;
            pause_ = std::min(4 * pause_, LONG);
        } else if (size_ == most_) {
            pause_ = SHORT;
        }
    }

    // The number of a job says how many take part too: both change at once.
    void announce() {
        const uint32_t last = job_number_.load(std::memory_order_relaxed);
        job_number_.store((last / COUNTED + 1) * COUNTED + uint32_t(size_), std::memory_order_release);
        job_number_.notify_all();
    }
    void serve(int thread) {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; spins < LINGER && job_number_.load(std::memory_order_acquire) == seen; ++spins) breathe();
            job_number_.wait(seen, std::memory_order_acquire);
            seen = job_number_.load(std::memory_order_acquire);
            if (thread >= int(seen % COUNTED)) continue;
            if (!job_) return;
            work(thread);
        }
    }

    const bool adapts_;
    const int spins_, most_;
    int size_;
    Time pause_ = SHORT;
    Clock::time_point until_{};
    void (*job_)(void*, int) = nullptr;
    void* what_ = nullptr;
    std::vector<Time> used_;  // for computing, in the last job
    static inline thread_local Time idle{};  // spent in long waits of this job
    alignas(64) std::atomic<uint32_t> job_number_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    std::vector<std::thread> threads_;
};
