// Threads: the one pool of CPU threads that computes a model, and how they share the work of a job.
//
// A job is a row of phases, a phase a number of items; a phase begins when every item of the one before is done. Nobody is bound to an
// item beforehand and nobody waits for a thread that has none: where another process takes a core away, the others go on with the rest.
// Who finds nothing to do spins for some microseconds and then sleeps, so that the pool never keeps a core from someone who works.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

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
    explicit Threads(int count) : count_(count < 1 ? 1 : count) {
        for (int i = 1; i < count_; i++) workers_.emplace_back([this, i] { work(i); });
    }

    ~Threads() {
        ticket_.store(kClosing);
        wake();
        for (auto& worker : workers_) worker.join();
    }

    int count() const { return count_; }

    void run(Job& job) {  // returns when every item is done
        std::lock_guard<std::mutex> one(running_);
        job_.store(&job);
        begin(job, 0);
        take_part(0, true);
    }

private:
    // A ticket: what comes next in the job that runs. Whoever has moved it on by one owns the item, and until that is done the job lives; so
    // a thread that comes late looks at nothing but the ticket.
    //   bits 0-23 item   24-47 items of the phase   48-61 phase   62 no job   63 closing
    static constexpr uint64_t kIdle = uint64_t(1) << 62, kClosing = uint64_t(1) << 63;
    static constexpr int kMost = (1 << 24) - 1;
    static constexpr int kSpin = 2000;  // some tens of microseconds

    static int item_of(uint64_t ticket) { return int(ticket & kMost); }
    static int items_of(uint64_t ticket) { return int(ticket >> 24 & kMost); }
    static bool open(uint64_t ticket) { return item_of(ticket) < items_of(ticket); }

    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void begin(Job& job, int phase) {  // the first phase from `phase` on that has items
        const int phases = job.phases();
        int items = 0;
        while (phase < phases && (items = job.items(phase)) <= 0) phase++;
        done_.store(0);
        ticket_.store(phase < phases ? uint64_t(phase) << 48 | uint64_t(items) << 24 : kIdle);
        wake();
    }

    void take_part(int thread, bool leads) {
        for (;;) {
            uint64_t ticket = ticket_.load();
            if (ticket & (leads ? kIdle : kClosing)) return;
            if (!open(ticket)) {
                await([&] {
                    const uint64_t now = ticket_.load();
                    return open(now) || (now & (leads ? kIdle : kClosing));
                });
                continue;
            }
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
            Job& job = *job_.load();
            const int phase = int(ticket >> 48);
            job.run(phase, item_of(ticket), thread);
            if (done_.fetch_add(1) + 1 == items_of(ticket)) begin(job, phase + 1);
        }
    }

    template <class Ready>
    void await(Ready ready) {
        for (int i = 0; i < kSpin; i++) {
            if (ready()) return;
            pause();
        }
        sleeping_.fetch_add(1);
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, ready);
        }
        sleeping_.fetch_sub(1);
    }

    void wake() {  // after the ticket changed; a sleeper is counted before it looks at the ticket for the last time
        if (sleeping_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }

    void work(int thread) { take_part(thread, false); }

    const int count_;
    std::mutex mutex_, running_;
    std::condition_variable wake_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<uint64_t> ticket_{kIdle};
    std::atomic<int> done_{0}, sleeping_{0};
    std::vector<std::thread> workers_;
};

}  // namespace radixrt
