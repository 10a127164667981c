// A team of threads that run one function together: the caller is its first member, the others wait for it between
// calls. Threads wait for work, never for a member: a thread whose core is taken away holds up what it has in hand, and
// while it sleeps it is not missed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace eventlm {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Between two looks at what other threads write.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

class Team {
 public:
  // most_yields: how often members that wait for a call offer their processors to other threads before they sleep, for
  // callers that soon call again: to be woken takes longer than a small product.
  explicit Team(int num_members, int most_yields = 0);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Keeps each member but the caller on one of these processors, [size()], where the system has a call for that. The
  // caller's own thread starts others, which would be kept there too.
  void pin(const int* processors);

  // Calls work() here, and on each other member that comes before this call has ended; one that comes late may call it
  // twice. So what is to be done is shared out by Operations. Returns when all that came have returned. Not reentrant.
  // What work throws ends the process: the others would wait for what was not done. So it asks for no memory: what it
  // needs is made before, or lies on the stack (a library's thread_local is made by its first use).
  void run(const std::function<void()>& work) noexcept;

 private:
  void serve(int most_yields);
  void dismiss();

  const std::function<void()>* work_ = nullptr;
  alignas(64) std::atomic<unsigned> round_{0};
  // Members in the present call, and kOpen while it lasts.
  alignas(64) std::atomic<unsigned> inside_{0};
  std::atomic<bool> leaving_{false};
  std::vector<std::thread> threads_;
};

// Pieces of work that the members of a team take until none is left.
class alignas(64) Operation {
 public:
  // Calls work(i) for every i below `count`, here or on other members that call the same, `at_once` of them one after
  // the other, and then finish() on one of them. Returns when all is done.
  template <class Work, class Finish>
  void share(std::size_t count, std::size_t at_once, Work&& work, Finish&& finish) {
    if (count == 0 || is_done()) return;
    std::size_t mine = 0;
    for (;;) {
      const std::size_t begin = next_.fetch_add(at_once, std::memory_order_relaxed);
      if (begin >= count) break;
      const std::size_t end = std::min(begin + at_once, count);
      for (std::size_t i = begin; i < end; i++) work(i);
      mine += end - begin;
    }
    if (mine > 0 && done_.fetch_add(mine, std::memory_order_acq_rel) + mine == count) {
      finish();
      // What wakes the others first looks whether any sleep. Unless both are in one order with this, it may find none
      // while one that has not seen this goes to sleep for good.
      is_done_.store(1, std::memory_order_seq_cst);
      is_done_.notify_all();
    } else {
      wait();
    }
  }

  template <class Work>
  void share(std::size_t count, std::size_t at_once, Work&& work) {
    share(count, at_once, work, [] {});
  }

  bool is_done() const { return is_done_.load(std::memory_order_acquire) != 0; }

  // Not while a call of `share` is under way.
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    is_done_.store(0, std::memory_order_relaxed);
  }

 private:
  void wait() const;

  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> done_{0};
  std::atomic<unsigned> is_done_{0};
};

}  // namespace eventlm
