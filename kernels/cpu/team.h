// A team of threads that runs one function together: the caller is its first member, the others wait for it between
// calls. Work is handed out by counters, so that a member whose core is taken away holds up only what it has in hand.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace eventlm {

class Team {
 public:
  explicit Team(int num_members);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_members_; }

  // Keeps each member but the caller on one of these processors, [size()], where the system has a call for that. The
  // caller's own thread starts others, which would be kept there too.
  void pin(const int* processors);

  // Calls work(member) on every member and returns when all have. Not reentrant. What work throws ends the process: the
  // others would wait for a member that has.
  void run(const std::function<void(int)>& work) noexcept;

  // Within `run`: returns when every member has come here.
  void barrier();

 private:
  void serve(int member);
  void dismiss();

  const int num_members_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<unsigned> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  alignas(64) std::atomic<int> running_{0};
  bool leaving_ = false;
  std::vector<std::thread> threads_;
};

// Hands out 0, 1, 2 ... to the members of a team.
class alignas(64) Ticket {
 public:
  std::size_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }
  void reset() { next_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<std::size_t> next_{0};
};

}  // namespace eventlm
