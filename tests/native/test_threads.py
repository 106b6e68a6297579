"""Thread pools, compiled alone: they get smaller where waiting for a thread costs too much, and grow again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_speculate_gguf.native import binding


pytestmark = pytest.mark.usefixtures("needs_kernel")

# "late": one of two threads is late at each of 200 steps; prints how many threads came to the end, at which step the
# late one was when the caller did, the size of the next pool, and the sum of what was done. "waits": each further word
# is a wait of that many microseconds ("w" of 2 threads, "q" of 4), or a pause ("p") after which a pool begins; prints
# the size of a pool of 4 after each. Time is simulated. "uneven": of two threads one has work at every step, 5 ms in
# all; prints in how many of 40 runs a thread left.
PROGRAM = r"""
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include "threads.h"

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" int omp_get_num_threads();

// Stands in for the functions that torch's OpenMP library has on Windows.
int pushed = 1;

void push_num_threads(const void*, int32_t thread, int32_t threads) { pushed = thread == 7 ? threads : 1; }

void fork_call(const void*, int32_t count, void (*work)(int32_t*, int32_t*, void*, void*), ...) {
  struct Call {
    void (*work)(int32_t*, int32_t*, void*, void*);
    void* arguments[2];
  } call{work, {}};
  va_list given;
  va_start(given, work);
  for (int i = 0; i < count; i++) call.arguments[i] = va_arg(given, void*);
  va_end(given);
  GOMP_parallel([](void* data) {
    const Call& call = *(Call*)data;
    int32_t number = omp_get_num_threads();
    call.work(&number, &number, call.arguments[0], call.arguments[1]);
  }, &call, pushed, 0);
}

void late() {
  std::atomic<int64_t> done{0};
  std::atomic<int> ended{0}, late_step{0}, late_step_at_end{0};
  ThreadPool::run(2, [&](ThreadPool& pool, int number) {
    for (int step = 0; step < 200; step++) {
      if (number) late_step = step, std::this_thread::sleep_for(std::chrono::milliseconds(1));
      pool.each(64, [&](int64_t i) { done += i + step; });
    }
    if (!number) late_step_at_end = late_step.load();
    ended++;
  });
  printf("%d %d %d %lld\n", ended.load(), late_step_at_end.load(), thread_pool_size.of(2), (long long)done.load());
}

void uneven() {
  int departures = 0;
  for (int run = 0; run < 40; run++) {
    new (&thread_pool_size) ThreadPoolSize;
    ThreadPool::run(2, [&](ThreadPool& pool, int) {
      for (int step = 0; step < 25; step++)
        pool.each(1, [&](int64_t) {
          for (const int64_t end = nanoseconds() + 200000; nanoseconds() < end;) {}
        });
    });
    departures += thread_pool_size.of(2) == 1;
  }
  printf("%d\n", departures);
}

int main(int count, char** given) {
  openmp.get_num_threads = omp_get_num_threads;
  if (!getenv("HAS_KMPC")) openmp.GOMP_parallel = GOMP_parallel;
  openmp.kmpc_fork_call = fork_call;
  openmp.kmpc_push_num_threads = push_num_threads;
  openmp.kmpc_global_thread_num = [](const void*) { return 7; };
  if (std::string(given[1]) == "late") return late(), 0;
  if (std::string(given[1]) == "uneven") return uneven(), 0;
  ThreadPoolSize size;
  int64_t now = 1000000000;
  for (int i = 2; i < count; i++) {
    const int64_t time = atof(given[i] + 1) * 1000;
    now += time;
    if (*given[i] == 'p') size.at_most(4, now);
    else size.loses(now - time, now, *given[i] == 'q' ? 4 : 2);
    printf("%d ", size.of(4));
  }
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[..., list[int]]:
    """Runs the program; returns the numbers that it prints."""
    folder = tmp_path_factory.mktemp("threads")
    source, program = folder / "pools.cpp", folder / "pools"
    source.write_text(PROGRAM)
    headers = Path(binding.__file__).parent / "kernel"
    command = [*binding.find_compiler(), "-std=c++17", "-O1", "-pthread", f"-I{headers}", "-o", program, source]
    subprocess.run([*command, "-Wl,--no-as-needed", "-lgomp"], check=True, capture_output=True)

    def run(*given: str) -> list[int]:
        printed = subprocess.run([program, *given], check=True, capture_output=True, text=True, timeout=60).stdout
        return [int(number) for number in printed.split()]

    return run


@pytest.mark.parametrize("way", ["GOMP", "KMPC"])
def test_pool_works_without_a_late_thread(run, way, monkeypatch):
    monkeypatch.setenv(f"HAS_{way}", "1")
    ended, late_step, size, done = run("late")
    assert (ended, size) == (2, 1)
    assert late_step < 150, "the caller has waited for a thread that is not needed"
    assert done == sum(i + step for step in range(200) for i in range(64))


def test_pool_keeps_its_size_while_work_cannot_be_divided(run):
    (departures,) = run("uneven")
    assert departures < 36, "in some runs no other process takes the core of the thread that works"


def test_pool_keeps_its_size_after_rare_short_waits(run):
    assert set(run("waits", *["w900", "p9100"] * 50)) == {4}  # 9 % of the time


def test_pool_shrinks_after_frequent_short_waits(run):
    sizes = run("waits", *["w40", "p30"] * 300)
    assert 3 in sizes[: 2 * 3000 // 20]
    assert sizes[0] == 4


def test_pool_shrinks_by_one_thread_per_long_wait(run):
    assert run("waits", "q4000", "q4000", "q4000", "q4000") == [3, 2, 1, 1]


def test_pool_retries_growth_with_longer_and_longer_pauses(run):
    failing = ["w4000", "p10000", "w1100", "p20000", "w1100", "p40000", "w1100"]
    assert run("waits", *failing) == [3, 4, 3, 4, 3, 4, 3]
    assert run("waits", *failing[:3], "p19000") == [3, 4, 3, 3]
    for_long = ["w4000", *["p320000", "w1100"] * 20]
    assert run("waits", *for_long)[-2:] == [4, 3], "no pause is longer than 320 ms"


def test_pool_shortens_pauses_after_a_quiet_time(run):
    failing = ["w4000", "p10000", "w1100", "p20000", "w1100", "p40000"]
    assert run("waits", *failing, "p900000", "w4000", "p10000")[-2:] == [3, 4]
