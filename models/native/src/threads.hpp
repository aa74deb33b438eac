// A team of threads that do one thing at a time together: the caller is one of them.
//
// Knows nothing of what is done.  The one idea: within a job everybody meets at barriers by spinning, since the next
// part begins within microseconds; between jobs the others spin for a moment and then sleep.
#pragma once

#include <atomic>
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
    explicit Team(int size) : size_(size), spins_(size <= int(std::thread::hardware_concurrency()) ? SPINS : 0) {
        for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        job_ = nullptr;
        announce();
        for (auto& thread : threads_) thread.join();
    }
    int size() const { return size_; }

    // f(thread) on all threads at once, or on the caller's alone; the caller is thread 0.
    template <class F>
    void run(bool together, F&& f) {
        count_ = together ? size_ : 1;
        if (count_ == 1) { f(0); return; }
        job_ = [](void* f, int thread) { (*static_cast<std::remove_reference_t<F>*>(f))(thread); };
        what_ = &f;
        announce();
        f(0);
        wait();  // for the last of the others
    }

    // Returns when all threads of the job have called it.
    void wait() {
        if (count_ == 1) return;
        const int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
            if (++spins < spins_) breathe();
            else std::this_thread::yield();  // somebody else has the core of whom we wait for
        }
    }

  private:
    static constexpr int SPINS = 20000, LINGER = 1000;  // about a millisecond, and a twentieth of one

    void announce() {
        job_number_.fetch_add(1, std::memory_order_release);
        job_number_.notify_all();
    }
    void serve(int thread) {
        for (int seen = 0;;) {
            for (int spins = 0; spins < LINGER && job_number_.load(std::memory_order_acquire) == seen; ++spins) breathe();
            job_number_.wait(seen, std::memory_order_acquire);
            seen = job_number_.load(std::memory_order_acquire);
            if (!job_) return;
            job_(what_, thread);
            wait();
        }
    }

    const int size_, spins_;
    int count_ = 1;
    void (*job_)(void*, int) = nullptr;
    void* what_ = nullptr;
    alignas(64) std::atomic<int> job_number_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    std::vector<std::thread> threads_;
};
