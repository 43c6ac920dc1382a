// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/transport/shm/copies.h>
#include <weft/transport/shm/segment.h>

namespace weft::transport::shm {

namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::span<const std::byte>;

constexpr std::size_t kRounds = 3;  // the shortest time counts
// it takes some 6 ms, unless other processes run on the same processors.
constexpr auto kLongest = std::chrono::milliseconds(30);
constexpr std::size_t kCopyAtOnce = 32 << 10;  // as ShmStream::read()
constexpr int kSpins = 64;                     // between two looks at the clock
constexpr std::uint64_t kGone = ~std::uint64_t{0};

// Two threads do this in step, as two processes would.
class Side {
 public:
  Side(const Segment& segment, std::atomic<std::uint64_t>& own, std::atomic<std::uint64_t>& other)
      : writer_(segment.writer()),
        reader_(segment.reader()),
        own_(own),
        other_(other),
        from_(kMeasuredBytes, std::byte{1}),
        to_(kMeasuredBytes) {}

  const std::byte* from() const { return from_.data(); }
  // Waits for the other side. False if it takes too long or the other one has given up.
  bool meet(Clock::time_point until) {
    own_.store(++met_, std::memory_order_release);
    for (int turn = 1; other_.load(std::memory_order_acquire) < met_; ++turn) {
      if (turn % kSpins == 0 && Clock::now() > until) return give_up();
    }
    return other_.load(std::memory_order_relaxed) != kGone || give_up();
  }
  bool give_up() {
    own_.store(kGone, std::memory_order_release);
    return false;
  }
  // Writes to each cache line, as a program that computes the bytes does.
  void renew() {
    for (std::size_t at = 0; at < from_.size(); at += 64) from_[at] = std::byte(met_);
  }
  bool copy_twice(bool sends, bool receives, Clock::time_point until) {
    std::size_t sent = sends ? 0 : kMeasuredBytes, received = receives ? 0 : kMeasuredBytes;
    for (int turn = 1; sent + received < 2 * kMeasuredBytes; ++turn) {
      const Bytes rest = Bytes(from_).subspan(sent);
      const std::size_t before = sent + received;
      if (!rest.empty()) sent += writer_.write({&rest, 1});
      for (int part = 0; part < 8 && received < kMeasuredBytes; ++part) received += take(received);
      if (sent + received == before && turn % kSpins == 0 && Clock::now() > until) return false;
    }
    return true;
  }
  bool copy_once(const std::byte* from) {
    const iovec here{to_.data(), to_.size()};
    const iovec there{const_cast<std::byte*>(from), to_.size()};
    return ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) ==
           static_cast<ssize_t>(to_.size());
  }

 private:
  std::size_t take(std::size_t at) {
    const std::size_t count = std::min({reader_.peek(1).size(), kMeasuredBytes - at, kCopyAtOnce});
    if (count == 0) return 0;
    std::memcpy(to_.data() + at, reader_.peek(1).data(), count);
    reader_.consume(count);
    return count;
  }

  RingWriter writer_;
  RingReader reader_;
  std::atomic<std::uint64_t>& own_;
  std::atomic<std::uint64_t>& other_;
  std::uint64_t met_ = 0;
  std::vector<std::byte> from_, to_;
};

// Measures on one of the threads, until it takes too long or the kernel refuses.
void run(Side& side, const std::byte* theirs, bool is_first, Clock::time_point until,
         std::vector<CopyTimes>& rounds) {
  for (std::size_t round = 0; round < kRounds; ++round) {
    CopyTimes times;
    const auto time = [&](CopyTimes::Time& taken, const auto& copy) {
      side.renew();
      if (!side.meet(until)) return false;
      const auto begin = Clock::now();
      if (!copy() || !side.meet(until)) return false;
      taken = Clock::now() - begin;
      return true;
    };
    const bool is_whole =
        time(times.one_both_ways, [&] { return side.copy_once(theirs); }) &&
        time(times.two_both_ways, [&] { return side.copy_twice(true, true, until); }) &&
        time(times.one_one_way, [&] { return is_first || side.copy_once(theirs); }) &&
        time(times.two_one_way, [&] { return side.copy_twice(is_first, !is_first, until); });
    if (!is_whole) {
      side.give_up();
      return;
    }
    rounds.push_back(times);
  }
}

using Time = CopyTimes::Time;
Time later(Time a, Time b) { return std::max(a, b); }
Time sooner(Time a, Time b) { return std::min(a, b); }
CopyTimes each(const CopyTimes& a, const CopyTimes& b, Time (*choose)(Time, Time)) {
  return {choose(a.one_both_ways, b.one_both_ways), choose(a.two_both_ways, b.two_both_ways),
          choose(a.one_one_way, b.one_one_way), choose(a.two_one_way, b.two_one_way)};
}

// Lets the calling thread run on any processor but this one. False if there is none.
bool leave_processor(int processor) {
  cpu_set_t others;
  std::memset(&others, 0xff, sizeof others);
  CPU_CLR(processor, &others);
  return ::sched_setaffinity(0, sizeof others, &others) == 0;
}

}  // namespace

std::optional<CopyTimes> measure_copies() noexcept {
  try {
    const Segment made = Segment::make();
    const Segment taken = Segment::take(Descriptor(::dup(made.memory().get())));
    std::atomic<std::uint64_t> met[2] = {};
    Side first(made, met[0], met[1]), second(taken, met[1], met[0]);
    const auto until = Clock::now() + kLongest;
    std::vector<CopyTimes> rounds, others;
    std::thread other([&, here = ::sched_getcpu()] {
      if (here >= 0 && leave_processor(here)) {
        run(second, first.from(), /*is_first=*/false, until, others);
      } else {
        second.give_up();
      }
    });
    run(first, second.from(), /*is_first=*/true, until, rounds);
    other.join();
    if (rounds.size() != kRounds || others.size() != kRounds) return std::nullopt;
    std::optional<CopyTimes> least;
    for (std::size_t round = 0; round < kRounds; ++round) {
      // A thread that began late has measured too little.
      const CopyTimes times = each(rounds[round], others[round], later);
      least = least ? each(*least, times, sooner) : times;
    }
    return least;
  } catch (const std::exception&) {  // no memory or no thread
    return std::nullopt;
  }
}

}  // namespace weft::transport::shm
