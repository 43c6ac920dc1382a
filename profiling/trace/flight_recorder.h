// SPDX-License-Identifier: Apache-2.0
// The last operations of this process, for dumps: a ring of fixed size in static memory, which
// every thread writes without locks. A slot whose operation has not ended is skipped a few times
// before it is used again, because an operation that hangs is worth more than later ones that
// ended.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/profiling/trace/description.h>

namespace weft::trace {

constexpr std::size_t kRecords = 4096;
constexpr std::size_t kErrorBytes = 160;

enum class State : std::uint8_t { Open, Done, Failed };

struct Record {
  std::uint64_t ticket = 0;  // in the order in which operations began
  Member member;
  Kind kind = Kind::Collective;
  State state = State::Open;
  bool runs = false;  // a function that is served has begun, and has not ended
  const char* name = "";
  std::uint64_t sequence = 0;
  int peer = -1;
  int tag = 0;
  std::uint64_t bytes = 0;
  const char* dtype = "";
  std::uint8_t dims = 0;
  std::array<std::int64_t, kMostDims> shape{};
  const char* reduction = "";
  const char* called_by = "";  // CalledBy::name()
  std::int64_t begun = 0;      // now()
  std::int64_t ended = 0;      // 0 while the operation is open
  std::uint8_t blame = 0;      // a Blame, if the operation failed
  std::array<char, kErrorBytes> error{};
};

class FlightRecorder {
 public:
  static_assert((kRecords & (kRecords - 1)) == 0);
  constexpr FlightRecorder() = default;
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Records the beginning of an operation. Returns the ticket for end(), or 0 if other threads were
  // writing to every slot that it tried.
  std::uint64_t begin(const Member& member, Kind kind, const About& about,
                      std::int64_t time) noexcept;
  // Records that the function of a call that is served has begun: until then it waits for a thread.
  void run(std::uint64_t ticket) noexcept;
  // Records the end. False if the record has ended before or its slot was used again.
  bool end(std::uint64_t ticket, std::int64_t time, const Error* error, int peer,
           std::uint64_t sequence) noexcept;
  // The records of the ring, oldest first, except those that are being written at this moment.
  // Allocates only from `memory`.
  std::pmr::vector<Record> read(
      std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const;
  // Forgets all records, which a forked process has from its parent.
  void forget() noexcept { first_.store(next_.load() + 1); }

 private:
  // A Record's fields, each in words that are read and written atomically.
  static constexpr std::size_t kWords = 13 + kMostDims + kErrorBytes / 8;
  struct Slot {
    std::atomic<std::uint64_t> version{0};  // the ticket, and in the low bits a phase
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };
  static void write(Slot& slot, const Record& record) noexcept;
  static Record read(const Slot& slot) noexcept;

  // All zero at first, so that the ring takes no space in the program's file.
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> first_{0};
  std::array<Slot, kRecords> slots_{};
};

// The flight recorder of this process.
FlightRecorder& flight_recorder() noexcept;

}  // namespace weft::trace
