#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace eventlm {

namespace {

// Looks at a value for some tens of microseconds before it asks the system to be woken: between the operations of a
// step the others come within a few, and a core whose thread has been preempted must not be kept from it.
constexpr int kSpins = 2000;
constexpr unsigned kOpen = 1u << 31;

void wait_while(const std::atomic<unsigned>& value, unsigned old, int most_yields = 0) {
  for (int spin = 0; spin < kSpins + most_yields; spin++) {
    if (value.load(std::memory_order_acquire) != old) return;
    spin < kSpins ? relax() : std::this_thread::yield();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Operation::wait() const { wait_while(is_done_, 0); }

Team::Team(int num_members, int most_yields) {
  try {
    for (int member = 1; member < num_members; member++) {
      threads_.emplace_back([this, most_yields] { serve(most_yields); });
    }
  } catch (...) {
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
  leaving_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_seq_cst);
  round_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::pin(const int* processors) {
#if defined(__linux__)
  for (std::size_t other = 0; other < threads_.size(); other++) {
    const int processor = processors[other + 1];
    // With no memory for the set, or a processor that has gone meanwhile, the thread runs where it did.
    cpu_set_t* set = CPU_ALLOC(processor + 1);
    if (set == nullptr) return;
    const std::size_t size = CPU_ALLOC_SIZE(processor + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(processor, size, set);
    pthread_setaffinity_np(threads_[other].native_handle(), size, set);
    CPU_FREE(set);
  }
#else
  (void)processors;
#endif
}

void Team::run(const std::function<void()>& work) noexcept {
  if (threads_.empty()) return work();
  work_ = &work;
  inside_.fetch_or(kOpen, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_seq_cst);
  round_.notify_all();
  work();
  inside_.fetch_and(~kOpen, std::memory_order_relaxed);
  // Those inside are at their last lines, unless their cores have been taken from them.
  for (int spin = 0; inside_.load(std::memory_order_acquire) != 0; spin++) {
    spin < kSpins ? relax() : std::this_thread::yield();
  }
}

void Team::serve(int most_yields) {
  unsigned round = 0;
  for (;;) {
    wait_while(round_, round, most_yields);
    round = round_.load(std::memory_order_acquire);
    if (leaving_.load(std::memory_order_relaxed)) return;
    if (inside_.fetch_add(1, std::memory_order_acquire) & kOpen) (*work_)();
    inside_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace eventlm
