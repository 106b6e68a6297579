// Parallel loops on torch's threads.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_FUTEX 1
#endif

namespace {

// Functions of the OpenMP library that torch uses, so that its threads are ours; null: it has none of this name. Python
// fills this (`OpenMP` of binding.py).
struct OpenMP {
  void (*GOMP_parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
  // The same on Windows.
  void (*kmpc_fork_call)(const void* place, int32_t count, void (*work)(int32_t*, int32_t*, void*, void*), ...);
  void (*kmpc_push_num_threads)(const void* place, int32_t thread, int32_t threads);
  int32_t (*kmpc_global_thread_num)(const void* place);
  int (*get_num_threads)();
  void (*set_num_threads)(int);
  int (*pause_resource_all)(int);

  bool has_threads() const { return (GOMP_parallel || kmpc_fork_call) && get_num_threads; }

  // Runs work(data) in some threads.
  void parallel(void (*work)(void*), void* data, int threads) const {
    if (GOMP_parallel) return GOMP_parallel(work, data, threads, 0);
    static const struct {
      int32_t reserved, flags, more[2];
      const char* source;
    } place{0, 2, {}, ";kernel;;0;0;;"};
    kmpc_push_num_threads(&place, kmpc_global_thread_num(&place), threads);
    kmpc_fork_call(&place, 2, [](int32_t*, int32_t*, void* work, void* data) { ((void (*)(void*))work)(data); }, work, data);
  }
};

OpenMP openmp;

inline int64_t nanoseconds(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Nanoseconds in which this thread did not run. Windows counts them in steps of 16 ms, too long to learn from.
inline int64_t off_core() {
#if defined(_WIN32)
  return 0;
#else
  return nanoseconds() - nanoseconds(CLOCK_THREAD_CPUTIME_ID);
#endif
}

// std::mutex without the C++ library at run time, which ziglang would compile first: a minute and a half.
struct Mutex {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

  void lock() { pthread_mutex_lock(&mutex); }
  void unlock() { pthread_mutex_unlock(&mutex); }
};

// The number of threads that the thread pools of this process use.
//
// A thread whose core another process takes holds up all the others, at each of a forward's hundred steps. Two threads
// on one free core are then slower than one. So such waits are counted, and where they cost more than a thread is worth,
// pools go on with one thread less. Later they try again: soon at first, since most disturbances are short.
class ThreadPoolSize {
 public:
  // The number of threads for a pool that begins now and may have `most`.
  int at_most(int most, int64_t now) {
    if (most < 2 || !absent.load(std::memory_order_relaxed)) return most;
    const std::lock_guard<Mutex> lock(mutex);
    if (absent && now >= next_try) {
      absent--;
      last_try = now, next_try = now + pause;
    }
    return of(most);
  }

  // Notes that a pool of `size` threads waited for one of them from `since` to `now`. Returns whether one is to leave.
  bool loses(int64_t since, int64_t now, int size) {
    const std::lock_guard<Mutex> lock(mutex);
    lost = std::max<int64_t>(lost - std::max<int64_t>(since - last_loss, 0) / (2 * size), 0) + (now - since);
    last_loss = now;
    const bool is_trial = last_try && now - last_try < SHORTEST;
    if (lost <= (is_trial ? MOST_LOST / 3 : MOST_LOST)) return false;
    lost = 0;
    absent++;
    pause = last_try && now - last_try <= 4 * pause ? std::min(2 * pause, LONGEST) : SHORTEST;
    next_try = now + pause;
    return true;
  }

  // The present number of threads of a pool that may have `most`.
  int of(int most) const { return std::max(most - absent.load(std::memory_order_relaxed), 1); }

 private:
  static constexpr int64_t MILLISECOND = 1000000, MOST_LOST = 3 * MILLISECOND;
  static constexpr int64_t SHORTEST = 10 * MILLISECOND, LONGEST = 320 * MILLISECOND;

  Mutex mutex;
  std::atomic<int> absent{0};
  // Nanoseconds; 0: never. `lost`: waits, less a fraction of the time that passed: half of what one thread adds.
  int64_t lost = 0, last_loss = 0, last_try = 0, next_try = 0, pause = SHORTEST;
};

ThreadPoolSize thread_pool_size;

// By how much the number of torch's threads is lowered in this thread (`ThreadPool` of forwards.py).
thread_local int lowered = 0;

// A forked process has no threads, and OpenMP would wait for them for ever. So a process ends its threads before it
// forks; both processes start new ones when they need them. Locks of threads that do not exist are never opened.
#if !defined(_WIN32)
const int watches_forks = pthread_atfork(
    [] {
      constexpr int soft = 1;
      if (openmp.pause_resource_all) openmp.pause_resource_all(soft);
    },
    nullptr, [] { new (&thread_pool_size) ThreadPoolSize; });
#endif

// Threads that do the same steps, each step together. Every thread has its own object. The calling thread is number 0.
class ThreadPool {
 public:
  // Runs body(pool, thread number) in all available threads, at most `threads`.
  template <class Body> static void run(int threads, const Body& body) {
    struct Job {
      const Body& body;
      const int* const caller = &lowered;  // every thread has its own
      Shared shared;
      std::atomic<int> others{0};
    } job{body};
    auto work = [](void* data) {
      Job& job = *(Job*)data;
      job.shared.size = openmp.has_threads() ? openmp.get_num_threads() : 1;  // not always the number that was asked for
      const int number = &lowered == job.caller ? 0 : ++job.others;
      ThreadPool pool(job.shared, number);
      job.body(pool, number);
    };
    threads = std::min(threads, thread_pool_size.at_most(threads + lowered, nanoseconds()));
    if (threads > 1 && openmp.has_threads()) {
      openmp.parallel(work, &job, threads);
    } else {
      ThreadPool alone(job.shared, 0);
      job.body(alone, 0);
    }
  }

  // Runs body(i) for 0 .. count. Returns when all are done.
  template <class Body> void each(int64_t count, const Body& body) {
    share(count, [&](int64_t i, int64_t end) {
      for (; i < end; i++) body(i);
    });
  }

  // Runs body(begin, end) over 0 .. count in pieces of some units. Returns when all are done; at once in a thread that has
  // left.
  template <class Body> void share(int64_t count, const Body& body, int64_t unit = 1) {
    const int size = shared.size;
    if (number >= size) return;
    if (size == 1) return body(0, count);
    const int64_t step = (count / (8 * size * unit) + 1) * unit;
    for (int64_t i; (i = shared.next.fetch_add(step)) < count;) body(i, i + step < count ? i + step : count);
    wait();
  }

 private:
  struct Shared {
    std::atomic<int> size{1}, arrived{0}, round{0}, sleeping{0};
    std::atomic<int64_t> next{0}, opened{0}, waiting_since{0};  // 0: nobody waits for long
  };

  ThreadPool(Shared& shared, int number) : shared(shared), number(number) {}

  // The last thread to arrive lets the others go on. They wait meanwhile, so it may change what they share: where waits
  // cost too much, the thread with the highest number leaves.
  void wait() {
    const int now = shared.round, size = shared.size;
    if (shared.arrived.fetch_add(1) + 1 == size) {
      const int64_t time = nanoseconds(), since = shared.waiting_since.exchange(0);
      if (since) {  // work that could not be divided evenly is no loss, only time in which this thread did not run
        const int64_t off = off_core();
        if (off > before && thread_pool_size.loses(std::max(since, time - (off - before)), time, size))
          shared.size = size - 1;
        before = off;
      }
      shared.arrived = 0;
      shared.next = 0;
      shared.opened = time;
      shared.round.store(now + 1);
      if (shared.sleeping.load()) wake();
      return;
    }
    int64_t since = 0;
    int turns = 0;
    for (; shared.round.load(std::memory_order_acquire) == now; turns++) {
      if (turns == FEW_TURNS) since = nanoseconds();
      if (turns > MOST_TURNS) sleep(now, since);
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#elif defined(__aarch64__)
      else __asm__ volatile("isb");  // as long as a pause; `yield` does nothing on most cores
#endif
    }
    // Sleep is no lateness, but the time from the wake-up until a core was free is.
    if (turns > MOST_TURNS) before = off_core() - (nanoseconds() - shared.opened);
  }

  // Another process uses the core of a thread that we wait for. Sleeping frees our core for that thread: the system
  // moves a waiting thread to the core of a sleeping one, but not to that of one that only yields.
  static constexpr int FEW_TURNS = 16, MOST_TURNS = 2000;

  void sleep(int now, int64_t since) {
    int64_t nobody = 0;
    shared.waiting_since.compare_exchange_strong(nobody, since);
#if HAS_FUTEX
    shared.sleeping++;
    syscall(SYS_futex, &shared.round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
    shared.sleeping--;
#else
    sched_yield();
#endif
  }

  void wake() {
#if HAS_FUTEX
    syscall(SYS_futex, &shared.round, FUTEX_WAKE_PRIVATE, shared.size.load() + 1, nullptr, nullptr, 0);
#endif
  }

  Shared& shared;
  const int number;
  int64_t before = off_core();  // what this thread has accounted for
};

// Runs body(i) for 0 .. count on torch's threads.
template <class Body> void parallel(int threads, int64_t count, const Body& body) {
  ThreadPool::run(count > 1 ? threads : 1, [&](ThreadPool& pool, int) { pool.each(count, body); });
}

}  // namespace
