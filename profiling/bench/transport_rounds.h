// SPDX-License-Identifier: Apache-2.0
// Defines how every participant of the transport bench is measured, Weft or peer: which sizes, how
// often, and the output. Uses the standard library only, because the peers' programs are compiled
// separately.
//
// Two processes, rank 0 on core 0 and rank 1 on core 1. Rank 0 measures and prints a line for each
// size: the bytes, then seconds: of each round trip (a message, and one of the same size back), of
// each message whose bytes were written just before (one way, until an answer without bytes is
// back; not counting the writing), or of a message in each batch of a stream (one way, until the
// receiver reports the last one).
//
// Round trips and streams send memory that nobody writes: both cores have its cache lines by then,
// and a receiver that copies once, out of the sender's memory, reads its own cache. Programs send
// data that was just computed; `fresh` measures that.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>

namespace weft::bench {

inline const std::vector<std::size_t> kRoundTripSizes{8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20};
inline const std::vector<std::size_t> kFreshSizes{16 << 10, 64 << 10, 256 << 10,
                                                  1 << 20,  16 << 20, 64 << 20};
inline const std::vector<std::size_t> kStreamSizes{8,       64,       1 << 10,  64 << 10,
                                                   1 << 20, 16 << 20, 64 << 20, 256 << 20};
constexpr double kSecondsPerSize = 0.3;

// The measurements of rank 0. Each returns when all that it started has ended.
struct Participant {
  // Returns the seconds of each of `count` round trips, one after the other.
  std::function<std::vector<double>(std::size_t bytes, int count)> round_trips;
  // Returns the seconds that `count` messages took.
  std::function<double(std::size_t bytes, int count)> stream;
  // Returns the seconds of each of `count` messages that are rewritten and sent, one after the
  // other.
  std::function<std::vector<double>(std::size_t bytes, int count)> fresh = {};
};

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Writes to each cache line, as a program that computes the bytes does.
inline void renew(void* memory, std::size_t bytes) {
  auto* const words = static_cast<volatile unsigned char*>(memory);
  for (std::size_t at = 0; at < bytes; at += 64)
    words[at] = static_cast<unsigned char>(words[at] + 1);
}

inline void pin_to_core_of(int rank) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(rank) % std::max(1u, std::thread::hardware_concurrency()), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

// How many messages of a stream may be open at once: enough to fill the transport's buffers, with
// bounded memory.
inline std::size_t window_of(std::size_t bytes) {
  return bytes <= 1 << 10 ? 64 : bytes <= 16 << 20 ? 16 : 4;
}

inline int count_for(double seconds_wanted, double one, int least) {
  return std::clamp(static_cast<int>(seconds_wanted / std::max(one, 1e-8)), least, 1 << 20);
}

inline void print_line(std::size_t bytes, const std::vector<double>& times) {
  std::printf("%zu", bytes);
  for (const double time : times) std::printf(" %.10f", time);
  std::printf("\n");
  std::fflush(stdout);
}

inline void measure_each(
    const std::function<std::vector<double>(std::size_t bytes, int count)>& times_of,
    const std::vector<std::size_t>& sizes) {
  for (const std::size_t bytes : sizes) {
    times_of(bytes, 3);
    auto some = times_of(bytes, 9);
    std::nth_element(some.begin(), some.begin() + 4, some.end());
    const int count = std::min(20'000, count_for(kSecondsPerSize, some[4], 6));
    times_of(bytes, std::max(1, count / 5));
    print_line(bytes, times_of(bytes, count));
  }
}

inline void measure_stream(const Participant& participant,
                           const std::vector<std::size_t>& sizes = kStreamSizes) {
  for (const std::size_t bytes : sizes) {
    const int first = bytes <= 1 << 10 ? 2000 : 2;
    participant.stream(bytes, first);
    const double one = participant.stream(bytes, first) / first;
    const int count = count_for(kSecondsPerSize / 5, one, 2);
    std::vector<double> times;
    for (int batch = 0; batch < 5; ++batch)
      times.push_back(participant.stream(bytes, count) / count);
    print_line(bytes, times);
  }
}

inline int measure_case(const Participant& participant, const std::string& name) {
  if (name == "stream") {
    measure_stream(participant);
  } else if (name == "fresh") {
    measure_each(participant.fresh, kFreshSizes);
  } else {
    measure_each(participant.round_trips, kRoundTripSizes);
  }
  return 0;
}

}  // namespace weft::bench
