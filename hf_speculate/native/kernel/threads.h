// Parallel loops on torch's threads.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_FUTEX 1
#endif

// Functions of the OpenMP library that torch uses, so that its threads are ours.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
extern "C" int omp_get_num_threads() __attribute__((weak));
extern "C" int omp_pause_resource_all(int) __attribute__((weak));

namespace {

inline bool has_threads() { return GOMP_parallel && omp_get_num_threads; }

// A forked process has no threads, and OpenMP would wait for them for ever. So a process ends its threads before it
// forks; both processes start new ones when they need them.
const int watches_forks = pthread_atfork(
    [] {
      constexpr int soft = 1;
      if (omp_pause_resource_all) omp_pause_resource_all(soft);
    },
    nullptr, nullptr);

// Threads that do the same steps, each step together.
class Team {
 public:
  // Runs body(team, thread number) in all available threads, at most `threads`.
  template <class Body> static void run(int threads, const Body& body) {
    struct Job {
      const Body& body;
      Team team;
      std::atomic<int> tickets{0};
    } job{body};
    auto work = [](void* data) {
      Job& job = *(Job*)data;
      job.team.size = has_threads() ? omp_get_num_threads() : 1;  // not always the number that was asked for
      job.body(job.team, job.tickets.fetch_add(1));
    };
    if (threads > 1 && has_threads()) GOMP_parallel(work, &job, threads, 0);
    else job.team.size = 1, job.body(job.team, 0);
  }

  // Runs body(i) for 0 .. count. Returns when all are done.
  template <class Body> void each(int64_t count, const Body& body) {
    share(count, [&](int64_t i, int64_t end) {
      for (; i < end; i++) body(i);
    });
  }

  // Runs body(begin, end) over 0 .. count in pieces. Returns when all are done.
  template <class Body> void share(int64_t count, const Body& body) {
    if (size == 1) return body(0, count);
    const int64_t step = count / (8 * size) + 1;
    for (int64_t i; (i = next.fetch_add(step)) < count;) body(i, i + step < count ? i + step : count);
    wait();
  }

 private:
  void wait() {
    const int now = round.load();
    if (arrived.fetch_add(1) + 1 == size) {
      arrived = 0;
      next = 0;
      round.store(now + 1);
      if (sleeping.load()) wake();
      return;
    }
    for (int turns = 0; round.load(std::memory_order_acquire) == now; turns++) {
      if (turns > MOST_TURNS) sleep(now);
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
  }

  // Another process uses the core of a thread that we wait for. Sleeping frees our core for that thread: the system
  // moves a waiting thread to the core of a sleeping one, but not to that of one that only yields.
  static constexpr int MOST_TURNS = 2000;

  void sleep(int now) {
#if HAS_FUTEX
    sleeping++;
    syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
    sleeping--;
#else
    sched_yield();
#endif
  }

  void wake() {
#if HAS_FUTEX
    syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, size.load(), nullptr, nullptr, 0);
#endif
  }

  std::atomic<int> size{1}, arrived{0}, round{0}, sleeping{0};
  std::atomic<int64_t> next{0};
};

// Runs body(i) for 0 .. count on torch's threads.
template <class Body> void parallel(int threads, int64_t count, const Body& body) {
  Team::run(count > 1 ? threads : 1, [&](Team& team, int) { team.each(count, body); });
}

}  // namespace
