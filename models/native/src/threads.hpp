// A team of threads that run one job at a time together; the caller is one of them.
//
// Within a job threads wait at barriers by spinning, since the next part begins within microseconds; between jobs they
// spin for a moment and then sleep.  If other programs use the cores too, all threads wait at every barrier for one
// without a core, and fewer threads are faster.  So the number of threads is chosen anew for each job.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
inline void spin_pause() { _mm_pause(); }
#elif defined(__aarch64__)
inline void spin_pause() { asm volatile("isb"); }  // takes about as long as x86's pause; yield takes no time
#else
inline void spin_pause() { std::this_thread::yield(); }
#endif

class Team {
  public:
    // At most `size` threads: as many as can be started.  `adapts`: choose the number of threads by measurement; assumes
    // that all threads get equal work.
    explicit Team(int size, bool adapts = true)
        : adapts_(adapts), spins_(size <= int(std::thread::hardware_concurrency()) ? SPINS : 0), max_size_(size),
          size_(size), used_(size) {
        for (int i = 1; i < size; ++i) {
            try {
                threads_.emplace_back([this, i] { serve_jobs(i); });
            } catch (const std::system_error&) {  // the system starts no more: those that run do all the work
                max_size_ = size_ = i;
                return;
            }
        }
    }
    ~Team() {
        job_ = nullptr;
        size_ = max_size_;
        publish_job();
        for (auto& thread : threads_) thread.join();
    }

    // Chooses the number of threads of the next job.
    void choose_size() {
        if (size_ < max_size_ && Clock::now() >= until_) ++size_;
    }
    int size() const { return size_; }

    // Runs f(thread) on all threads of the job at once; the caller is thread 0.
    template <class F>
    void run(F&& f) {
        if (size_ == 1) { f(0); return; }
        job_ = [](void* f, int thread) { (*static_cast<std::remove_reference_t<F>*>(f))(thread); };
        argument_ = &f;
        const auto began = Clock::now();
        publish_job();
        work(0);
        took_ = Clock::now() - began;
    }

    // Judges by the last job whether the next ones have fewer threads.
    void adapt() {
        if (adapts_ && size_ > 1) adapt_size(took_);
    }

    // Returns when all threads of the job have called it.
    void wait() {
        const int size = size_;  // read before this thread arrives: after the last one the next job may have another size
        if (size == 1) return;
        const int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        Time began{};
        for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
            if (++spins == PATIENT) began = cpu_time();
            if (spins < spins_) spin_pause();
            else std::this_thread::yield();  // another program has the core of a thread that is waited for
        }
        if (began != Time{}) idle += cpu_time() - began;
    }

  private:
    using Clock = std::chrono::steady_clock;
    using Time = std::chrono::nanoseconds;
    static constexpr int SPINS = 20000, LINGER = 1000, PATIENT = 500;  // about 1, 0.05 and 0.025 ms
    static constexpr Time SHORT = std::chrono::milliseconds(10), LONG = std::chrono::seconds(2);
    static constexpr uint32_t COUNTED = 1 << 10;  // more than any number of threads

    static Time cpu_time() {  // processor time of this thread
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return std::chrono::seconds(t.tv_sec) + Time(t.tv_nsec);
    }

    void work(int thread) {
        idle = Time{};
        const Time before = cpu_time();
        job_(argument_, thread);
        used_[thread] = cpu_time() - before - idle;
        wait();  // for the last thread
    }

    // If all threads together used less processor time than one thread fewer could have used, use one fewer from now
    // on.  Try one more again after a pause, which grows as long as that turns out to be too early.
    void adapt_size(Time took) {
        if (std::accumulate(used_.begin(), used_.begin() + size_, Time{}) < took * (size_ - 1)) {
            --size_;
            until_ = Clock::now() + pause_;
            pause_ = std::min(4 * pause_, LONG);
        } else if (size_ == max_size_) {
            pause_ = SHORT;
        }
    }

    // The job number contains the number of threads too, so that both change at once.
    void publish_job() {
        const uint32_t last = job_number_.load(std::memory_order_relaxed);
        job_number_.store((last / COUNTED + 1) * COUNTED + uint32_t(size_), std::memory_order_release);
        job_number_.notify_all();
    }
    void serve_jobs(int thread) {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; spins < LINGER && job_number_.load(std::memory_order_acquire) == seen; ++spins) spin_pause();
            job_number_.wait(seen, std::memory_order_acquire);
            seen = job_number_.load(std::memory_order_acquire);
            if (thread >= int(seen % COUNTED)) continue;
            if (!job_) return;
            work(thread);
        }
    }

    const bool adapts_;
    const int spins_;
    int max_size_, size_;
    Time pause_ = SHORT, took_{};
    Clock::time_point until_{};
    void (*job_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    std::vector<Time> used_;  // processor time of computing, in the last job
    static inline thread_local Time idle{};  // processor time of this thread in long waits of this job
    alignas(64) std::atomic<uint32_t> job_number_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    std::vector<std::thread> threads_;
};
