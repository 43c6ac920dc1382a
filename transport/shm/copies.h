// SPDX-License-Identifier: Apache-2.0
// Chooses how long payloads travel: copied into the ring and out of it by two processors at a time,
// or once, out of the sender's memory, which costs a call of the kernel for each part and lets the
// sender's processor do other work. Which is faster depends on the machine: on how far apart its
// processors are and on the kernel's cost of finding pages. So it is measured at first use and kept
// in a file, once for each start of the machine.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>

namespace weft::transport::shm {

// How long a payload of kMeasuredBytes takes.
struct CopyTimes {
  using Time = std::chrono::nanoseconds;
  Time one_both_ways{}, two_both_ways{};  // one copy, two copies, if both ends send
  Time one_one_way{}, two_one_way{};      // if only one end sends
  friend bool operator==(const CopyTimes&, const CopyTimes&) = default;
};
constexpr std::size_t kMeasuredBytes = 1 << 20;

// For which payloads one copy is used.
struct OneCopy {
  bool both_ways = false;
  bool one_way = false;
};

OneCopy choose(const CopyTimes& times) noexcept;

// Measures with two threads for some 10 ms. Nothing if this process may use only one processor, the
// kernel refuses the call, or other processes kept the threads waiting.
std::optional<CopyTimes> measure_copies() noexcept;

// The file in which this user's processes keep what they have measured: in XDG_RUNTIME_DIR, else in
// the folder for temporary files.
std::string file_of_copy_times();
// Returns what the file says about `machine`. Nothing if there is no such file, or it belongs to
// another user or can be written by one, or is damaged.
std::optional<CopyTimes> read_copy_times(const std::string& path,
                                         const std::string& machine) noexcept;
using Measure = std::function<std::optional<CopyTimes>()>;
// Returns what the file says, or else what `measure` returns, and writes it. Nothing while another
// process measures.
std::optional<CopyTimes> find_copy_times(const std::string& path, const std::string& machine,
                                         const Measure& measure);

// For this process, by WEFT_SHM_COPIES or as measured. The first call for a long payload may
// measure. Thread-safe.
OneCopy one_copy() noexcept;
// False if WEFT_SHM_COPIES rules one copy out. Throws the errors of config().
bool may_copy_once();

}  // namespace weft::transport::shm
