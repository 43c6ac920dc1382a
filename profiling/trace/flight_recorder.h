// The last operations of this process, for when it is asked what it was doing: a ring of fixed size
// in static memory, written without locks by every thread. A slot whose operation has not ended is
// passed over a few times before it is used again: what hangs is worth more than what has happened
// since.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <vector>

#include <weft/profiling/trace/operation.h>

namespace weft::trace {

constexpr std::size_t kRecords = 4096;
constexpr std::size_t kErrorBytes = 160;

enum class State : std::uint8_t { Open, Done, Failed };

struct Record {
  std::uint64_t ticket = 0;  // grows with the beginnings
  Member member;
  Kind kind = Kind::Collective;
  State state = State::Open;
  const char* name = "";
  std::uint64_t sequence = 0;
  int peer = -1;
  int tag = 0;
  std::uint64_t bytes = 0;
  const char* dtype = "";
  std::uint8_t dims = 0;
  std::array<std::int64_t, kMostDims> shape{};
  const char* reduction = "";
  std::int64_t begun = 0;  // now()
  std::int64_t ended = 0;  // 0 while it is open
  std::uint8_t blame = 0;  // of a failure
  std::array<char, kErrorBytes> error{};
};

class FlightRecorder {
 public:
  static_assert((kRecords & (kRecords - 1)) == 0);
  constexpr FlightRecorder() = default;
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // The ticket to end it with; 0 where all of several slots were being written at this moment.
  std::uint64_t begin(const Member& member, Kind kind, const About& about,
                      std::int64_t time) noexcept;
  // False where the record has ended before, or its slot has been used again.
  bool end(std::uint64_t ticket, std::int64_t time, const Error* error, int peer,
           std::uint64_t sequence) noexcept;
  // What the ring holds, oldest first; records that are written at this moment are left out.
  // Allocates from `memory` only.
  std::pmr::vector<Record> read(
      std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const;
  // Forgets what was recorded (by the process that this one was forked from).
  void forget() noexcept { first_.store(next_.load() + 1); }

 private:
  // A Record's fields, each a word that is read and written whole.
  static constexpr std::size_t kWords = 12 + kMostDims + kErrorBytes / 8;
  struct Slot {
    std::atomic<std::uint64_t> version{0};  // the ticket, and below it a Phase
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };
  static void write(Slot& slot, const Record& record) noexcept;
  static Record read(const Slot& slot) noexcept;

  // All zero at first, so that the ring takes no room in the program's file.
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> first_{0};
  std::array<Slot, kRecords> slots_{};
};

// This process's.
FlightRecorder& flight_recorder() noexcept;

}  // namespace weft::trace
