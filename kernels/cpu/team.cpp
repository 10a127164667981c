#include "team.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace eventlm {

namespace {

// Looks at a value for some tens of microseconds before it asks the system to be woken: between the operations of a
// step the others come within a few, and a core whose thread has been preempted must not be kept from it.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

void wait_while(const std::atomic<unsigned>& value, unsigned old) {
  for (int spin = 0; spin < kSpins; spin++) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int num_members) : num_members_(num_members) {
  try {
    for (int member = 1; member < num_members_; member++) {
      threads_.emplace_back([this, member] { serve(member); });
    }
  } catch (...) {
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
  leaving_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::pin(const int* processors) {
#if defined(__linux__)
  run([processors](int member) {
    if (member == 0) return;
    cpu_set_t* set = CPU_ALLOC(processors[member] + 1);
    const std::size_t size = CPU_ALLOC_SIZE(processors[member] + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(processors[member], size, set);
    // One that has gone meanwhile is no loss.
    sched_setaffinity(0, size, set);
    CPU_FREE(set);
  });
#else
  (void)processors;
#endif
}

void Team::run(const std::function<void(int)>& work) noexcept {
  if (num_members_ > 1) {
    work_ = &work;
    running_.store(num_members_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  work(0);
  // The others are at their last lines, unless their cores have been taken from them.
  for (int spin = 0; running_.load(std::memory_order_acquire) != 0; spin++) {
    spin < kSpins ? relax() : std::this_thread::yield();
  }
}

void Team::serve(int member) {
  unsigned round = 0;
  for (;;) {
    wait_while(round_, round);
    round++;
    if (leaving_) return;
    (*work_)(member);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

void Team::barrier() {
  if (num_members_ == 1) return;
  const unsigned phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_members_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    phase_.notify_all();
  } else {
    wait_while(phase_, phase);
  }
}

}  // namespace eventlm
