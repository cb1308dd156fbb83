// Threads: the one pool of CPU threads that computes a model, and how they share the work of a job.
//
// A job is a row of phases, a phase a number of items; a phase begins when every item of the one before is done. Nobody is bound to an
// item beforehand and nobody waits for a thread that has none: where another process takes a core away, the others go on with the rest.
// Who finds nothing to do looks for some microseconds, then offers its core to others between two looks, and sleeps after a millisecond: the
// pool never keeps a core from someone who works. What a job throws on any of the threads, run() throws, when no thread is at it any more.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace radixrt {

class Job {
public:
    virtual ~Job() = default;
    virtual int phases() const = 0;
    virtual int items(int phase) = 0;  // called by one thread, before the phase begins; 0: the phase is left out
    virtual void run(int phase, int item, int thread) = 0;
};

class Threads {
public:
    // A child of fork() has none of the workers: there the caller computes alone, and what the workers left is not cleaned up.
    static std::shared_ptr<Threads> make(int count) {
        return {new Threads(count), [process = getpid()](Threads* threads) {
                    if (getpid() == process) delete threads;
                }};
    }

    ~Threads() { close(); }

    int count() const { return count_; }

    void run(Job& job) {  // returns when every item is done, or one has thrown
        std::lock_guard<std::mutex> one(running_);
        job_.store(&job);
        idle_.store(false);
        begin(job, 0);
        take_part(0);
        failed_.store(false);
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

private:
    explicit Threads(int count) : count_(count < 1 ? 1 : count), lanes_(new Lane[size_t(count_)]) {
        try {
            for (int i = 1; i < count_; i++) workers_.emplace_back([this, i] { take_part(i); });
        } catch (...) {  // there are no more to be had
            close();
            throw;
        }
    }

    void close() {
        closing_.store(true);
        wake();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
    }

    // Once one part of a job has thrown, none of the others is begun; their items only count as done.
    template <class Part>
    void attempt(Part part) {
        if (failed_.load()) return;
        try {
            part();
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!error_) error_ = std::current_exception();
            failed_.store(true);
        }
    }

    // The items of a phase are dealt out in equal runs, one for each thread, because a line of memory that two cores write costs as much as a small
    // item. Who is through with its own takes from the others'. A lane says what is left of a run; whoever has moved it on by one owns the item, and
    // until that is counted as done the phase and the job live: so a thread that comes late looks at nothing but lanes.
    //   bits 0-23 next item   24-47 behind the last   48-63 phase
    struct alignas(128) Lane {
        std::atomic<uint64_t> left{0};
    };
    static constexpr uint64_t kItem = (1 << 24) - 1, kPhase = (1 << 16) - 1;  // the largest
    static constexpr int kSpin = 1000;                         // looks before a core is offered to others: some microseconds
    static constexpr std::chrono::microseconds kAwake{1000};  // of looking before it sleeps: to wake up takes up to 100

    static bool open(uint64_t left) { return (left & kItem) < (left >> 24 & kItem); }

    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void begin(Job& job, int phase) {  // the first phase from `phase` on that has items
        int items = 0;
        attempt([&] {
            for (const int phases = job.phases(); phase < phases && (items = job.items(phase)) <= 0;) phase++;
            if (items > 0 && (uint64_t(items) > kItem || uint64_t(phase) > kPhase)) throw std::length_error("too much work for one job");
        });
        if (items > 0 && !failed_.load()) {
            to_do_.store(items);
            for (int t = count_; t-- > 0;) {
                const uint64_t from = uint64_t(items) * t / count_, to = uint64_t(items) * (t + 1) / count_;
                lanes_[t].left.store(uint64_t(phase) << 48 | to << 24 | from);
            }
        } else {
            idle_.store(true);
        }
        wake();
    }

    bool take(Lane& lane, int& phase, int& item) {
        uint64_t left = lane.left.load();
        while (open(left)) {
            if (!lane.left.compare_exchange_weak(left, left + 1)) continue;
            phase = int(left >> 48);
            item = int(left & kItem);
            return true;
        }
        return false;
    }

    bool take(int thread, int& phase, int& item) {
        for (int i = 0; i < count_; i++)
            if (take(lanes_[(thread + i) % count_], phase, item)) return true;
        return false;
    }

    void take_part(int thread) {
        int phase, item, done = 0, now = -1;
        for (;;) {
            const bool found = take(thread, phase, item);
            // what was done is counted when there is no more of that phase, by then nobody can have ended it
            if (done && (!found || phase != now)) {
                Job& job = *job_.load();
                if (to_do_.fetch_sub(done) == done) begin(job, now + 1);
                done = 0;
            }
            if (found) {
                attempt([&] { job_.load()->run(phase, item, thread); });
                now = phase;
                done++;
            } else if (!await(thread)) {
                return;
            }
        }
    }

    // Until there may be an item; false: thread 0 has nothing more to do, or the pool closes.
    bool await(int thread) {
        const auto over = [&] { return thread == 0 ? idle_.load() : closing_.load(); };
        const auto any = [&] {
            for (int t = 0; t < count_; t++)
                if (open(lanes_[t].left.load())) return true;
            return false;
        };
        for (int i = 0; i < kSpin; i++) {
            if (open(lanes_[thread].left.load())) return true;
            if (i % 16 == 0 && any()) return true;
            if (over()) return false;
            pause();
        }
        for (const auto start = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - start < kAwake;) {
            if (any()) return true;
            if (over()) return false;
            std::this_thread::yield();
        }
        sleeping_.fetch_add(1);
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return any() || over(); });
        }
        sleeping_.fetch_sub(1);
        return any() || !over();
    }

    void wake() {  // after lanes or flags changed; a sleeper is counted before it looks at them for the last time
        if (sleeping_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }

    const int count_;
    std::unique_ptr<Lane[]> lanes_;
    alignas(128) std::atomic<int> to_do_{0};  // items of the phase that are not counted as done
    alignas(128) std::atomic<Job*> job_{nullptr};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> idle_{true}, closing_{false}, failed_{false};
    std::exception_ptr error_;
    std::mutex mutex_, running_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace radixrt
