// Where the members of a group meet, each a process of its own, which compute parts of one thing and exchange them.
//
// A member writes what it has into its slot. All meet. Then each reads the slots of all, in the members' order. There
// are two sets of slots, which meetings use in turns: a member that has come to the next meeting reads no more of this
// one, and only after that are its slots written again. So one barrier is enough for one exchange.
//
// All members must come to the same meetings in the same order. A member that is gone holds up the others until one of
// them ends the group, or their parent ends the processes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>

namespace eventlm {

// Numbers are part of the interface with Python.
enum class Met : std::int32_t {
  all = 0,
  // A member has left, or an exchange has failed: there are no more meetings.
  ended = 2,
  // Members came with different numbers of bytes, so they do not compute the same. It has ended for the others.
  differing = 3,
};

// What a call throws that needs its group, and cannot have it.
struct MeetingEnded : std::exception {
  explicit MeetingEnded(Met how) : how(how) {}
  const Met how;
};

class Meeting {
 public:
  Meeting(int size, int number, std::size_t slot_bytes) : size_(size), number_(number), slot_bytes_(slot_bytes) {}
  virtual ~Meeting() = default;
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  int size() const { return size_; }
  int number() const { return number_; }
  std::size_t slot_bytes() const { return slot_bytes_; }

  // Its own slot of the meeting to come, from a cache line on.
  virtual char* mine() = 0;
  // A member's slot of the last meeting, until this member comes to the next.
  virtual const char* part(int member) const = 0;
  // Waits for all, each with `bytes` in its slot. Once it has given anything but `all`, it does so at once.
  Met meet(std::size_t bytes) noexcept;
  // The same with `bytes` of any number, which are copied; `out` gets [size, bytes].
  Met gather(const char* bytes, std::size_t num_bytes, char* out) noexcept;
  // How the last meeting ended.
  Met state() const { return state_.load(std::memory_order_acquire); }
  std::uint64_t num_meetings() const { return num_meetings_.load(std::memory_order_relaxed); }

  // From any thread.
  virtual void leave() noexcept = 0;

 private:
  virtual Met exchange(std::size_t bytes) noexcept = 0;

  const int size_, number_;
  const std::size_t slot_bytes_;
  std::atomic<Met> state_{Met::all};
  std::atomic<std::uint64_t> num_meetings_{0};
};

// Members that share memory, all zeros before the first of them.
class SharedMeeting : public Meeting {
 public:
  static std::size_t segment_bytes(int size, std::size_t slot_bytes);

  // memory: [segment_bytes], from a page on; it must live longer. spin_ns: how long a member that waits keeps looking
  // before it sleeps: to be woken takes longer than most meetings.
  SharedMeeting(char* memory, int size, int number, std::size_t slot_bytes, std::int64_t spin_ns);

  // False if another has come with this member's number.
  bool is_first() const { return is_first_; }

  char* mine() override { return slot(round_.load(std::memory_order_relaxed), number()); }
  const char* part(int member) const override { return slot(round_.load(std::memory_order_relaxed) - 1, member); }
  void leave() noexcept override;

 private:
  // What a member shows to the others: how many meetings it has come to, and with how many bytes to the last two.
  struct alignas(128) Line {
    std::atomic<std::uint32_t> round, num_sleepers, is_taken;
    std::atomic<std::uint64_t> bytes[2];
  };
  struct alignas(128) Head {
    std::atomic<std::uint32_t> has_ended;
  };

  Met exchange(std::size_t bytes) noexcept override;
  bool wait_for(Line& line, std::uint32_t round);
  bool has_ended() const { return head().has_ended.load(std::memory_order_acquire) != 0; }
  Head& head() const { return *reinterpret_cast<Head*>(memory_); }
  Line& line(int member) const { return reinterpret_cast<Line*>(memory_ + sizeof(Head))[member]; }
  char* slot(std::uint32_t round, int member) const;

  char* const memory_;
  const std::int64_t spin_ns_;
  bool is_first_;
  // Threads that come late to an operation may look at it.
  std::atomic<std::uint32_t> round_{0};
};

// Members whose bytes something else carries. carry(context, mine, all, bytes) puts [size, bytes] of all members, in
// their order, into `all`, and returns 0, or anything else if it cannot.
using Carry = std::int32_t (*)(void* context, const void* mine, void* all, std::size_t bytes);

class CarriedMeeting : public Meeting {
 public:
  // mine: [slot_bytes], all: [size, slot_bytes], from a cache line on each.
  CarriedMeeting(char* mine, char* all, Carry carry, void* context, int size, int number, std::size_t slot_bytes)
      : Meeting(size, number, slot_bytes), mine_(mine), all_(all), carry_(carry), context_(context) {}

  char* mine() override { return mine_; }
  const char* part(int member) const override { return all_ + member * bytes_.load(std::memory_order_relaxed); }
  void leave() noexcept override { has_ended_.store(1, std::memory_order_release); }

 private:
  Met exchange(std::size_t bytes) noexcept override;

  char *const mine_, *const all_;
  const Carry carry_;
  void* const context_;
  std::atomic<std::size_t> bytes_{0};
  std::atomic<std::uint32_t> has_ended_{0};
};

}  // namespace eventlm
