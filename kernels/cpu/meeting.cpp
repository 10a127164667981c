#include "meeting.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace eventlm {

namespace {

constexpr std::size_t kPage = 4096;
// How often a member that waits looks at the clock.
constexpr int kLooksOfTime = 64;
// A member sleeps no longer, for who leaves may wake it just before it sleeps.
constexpr std::int64_t kLongestSleepNs = 20'000'000;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Sleeps while it has this value, in another process too. The standard library's wait sees only its own.
void sleep_while(std::atomic<std::uint32_t>& value, std::uint32_t old) {
#if defined(__linux__)
  const timespec longest = {0, kLongestSleepNs};
  syscall(SYS_futex, &value, FUTEX_WAIT, old, &longest, nullptr, 0);
#else
  if (value.load(std::memory_order_acquire) == old) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<std::uint32_t>& value) {
#if defined(__linux__)
  syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)value;
#endif
}

}  // namespace

Met Meeting::meet(std::size_t bytes) noexcept {
  Met how = state();
  if (how != Met::all) return how;
  how = exchange(bytes);
  if (how == Met::all) {
    num_meetings_.fetch_add(1, std::memory_order_relaxed);
  } else {
    state_.store(how, std::memory_order_release);
    leave();
  }
  return how;
}

Met Meeting::gather(const char* bytes, std::size_t num_bytes, char* out) noexcept {
  for (std::size_t begin = 0; begin < num_bytes; begin += slot_bytes_) {
    const std::size_t count = std::min(slot_bytes_, num_bytes - begin);
    std::memcpy(mine(), bytes + begin, count);
    const Met how = meet(count);
    if (how != Met::all) return how;
    for (int member = 0; member < size_; member++) std::memcpy(out + member * num_bytes + begin, part(member), count);
  }
  return Met::all;
}

std::size_t SharedMeeting::segment_bytes(int size, std::size_t slot_bytes) {
  return whole_pages(sizeof(Head) + size * sizeof(Line)) + 2 * size * whole_pages(slot_bytes);
}

SharedMeeting::SharedMeeting(char* memory, int size, int number, std::size_t slot_bytes, std::int64_t spin_ns)
    : Meeting(size, number, slot_bytes), memory_(memory), spin_ns_(spin_ns) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);
  is_first_ = line(number).is_taken.exchange(1) == 0;
}

char* SharedMeeting::slot(std::uint32_t round, int member) const {
  const std::size_t before = static_cast<std::size_t>(round % 2) * size() + member;
  return memory_ + whole_pages(sizeof(Head) + size() * sizeof(Line)) + before * whole_pages(slot_bytes());
}

Met SharedMeeting::exchange(std::size_t bytes) noexcept {
  if (has_ended()) return Met::ended;
  const std::uint32_t round = round_.load(std::memory_order_relaxed);
  Line& own = line(number());
  own.bytes[round % 2].store(bytes, std::memory_order_relaxed);
  // One that sleeps has said so before it looked once more, or sees this.
  own.round.store(round + 1, std::memory_order_seq_cst);
  if (own.num_sleepers.load(std::memory_order_seq_cst) > 0) wake_all(own.round);
  bool is_same = true;
  for (int member = 0; member < size(); member++) {
    if (!wait_for(line(member), round + 1)) return Met::ended;
    is_same &= line(member).bytes[round % 2].load(std::memory_order_relaxed) == bytes;
  }
  if (!is_same) return Met::differing;
  round_.store(round + 1, std::memory_order_relaxed);
  return Met::all;
}

// Returns when that member has come to as many meetings; false if it has not, and the group has ended.
bool SharedMeeting::wait_for(Line& line, std::uint32_t round) {
  auto has_come = [&] { return static_cast<std::int32_t>(line.round.load(std::memory_order_seq_cst) - round) >= 0; };
  if (has_come()) return true;
  const std::int64_t end = now_ns() + spin_ns_;
  do {
    for (int look = 0; look < kLooksOfTime; look++) {
      if (has_come()) return true;
      relax();
    }
    if (has_ended()) return has_come();
  } while (now_ns() < end);
  line.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (!has_come() && !has_ended()) {
    const std::uint32_t old = line.round.load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(old - round) < 0) sleep_while(line.round, old);
  }
  line.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return has_come();
}

void SharedMeeting::leave() noexcept {
  head().has_ended.store(1, std::memory_order_seq_cst);
  for (int member = 0; member < size(); member++) wake_all(line(member).round);
}

Met CarriedMeeting::exchange(std::size_t bytes) noexcept {
  if (has_ended_.load(std::memory_order_acquire) != 0) return Met::ended;
  if (carry_(context_, mine_, all_, bytes) != 0) return Met::ended;
  bytes_.store(bytes, std::memory_order_relaxed);
  return Met::all;
}

}  // namespace eventlm
