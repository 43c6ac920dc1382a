// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/profiling/bench/gpu_streams.h>
#include <weft/profiling/bench/workers.h>

namespace weft::bench {

namespace {

// Round trips behind a closed gate: a stream accepts about a thousand operations before it blocks.
constexpr int kRounds = 50;

class Streams {
 public:
  // Enqueues operations that make the second stream wait for the first one.
  using Hop = std::function<void(const cuda::StreamRef& from, const cuda::StreamRef& to)>;

  explicit Streams(cuda::Device& device)
      : device_(device), flags_(device), here_(device), there_(device) {
    // Makes all flags first: pinning memory while the gate is closed could wait for the device.
    std::vector<std::shared_ptr<cuda::MappedFlag>> slots(2 * kRounds + 8);
    for (auto& slot : slots) slot = flags_.make();
    for (const auto& slot : slots) slot->raise();
    device_.events().reserve(slots.size());
  }

  void by_flag(const cuda::StreamRef& from, const cuda::StreamRef& to) {
    fences_.push_back(flags_.signal(from));
    fences_.back().wait(to);
  }

  void by_host(const cuda::StreamRef& from, const cuda::StreamRef& to) {
    raised_.push_back(flags_.make());
    const cuda::DeviceGuard guard(device_);
    const CUresult result = device_.driver().launch_host_func(
        from.native(), [](void* flag) { static_cast<cuda::MappedFlag*>(flag)->raise(); },
        raised_.back().get());
    device_.check(result, "cuLaunchHostFunc");
    raised_.back()->wait(to);
  }

  void by_event(const cuda::StreamRef& from, const cuda::StreamRef& to) {
    fences_.push_back(cuda::record(from));
    fences_.back().wait(to);
  }

  // Returns the seconds of one hop.
  double run(const Hop& hop) {
    const auto gate = flags_.make();
    gate->wait(here_);
    for (int i = 0; i < kRounds; ++i) {
      hop(here_, there_);
      hop(there_, here_);
    }
    const Fence last = cuda::record(here_), end = cuda::record(there_);
    const double start = now();
    gate->raise();
    while (!last.query()) {
    }
    const double took = now() - start;
    // The host function that raised the last flag may still be running.
    if (!end.synchronize()) broken("a fence without a deadline timed out");
    fences_.clear();
    raised_.clear();
    return took / (2 * kRounds);
  }

 private:
  cuda::Device& device_;
  cuda::FlagPool flags_;
  cuda::Stream here_;
  cuda::Stream there_;
  std::vector<Fence> fences_;  // used by the present run
  std::vector<std::shared_ptr<cuda::MappedFlag>> raised_;
};

}  // namespace

void bench_streams(Report& report, const std::shared_ptr<cuda::Device>& device) {
  const std::string name = "stream to stream";
  if (!report.wants(name)) return;
  Streams streams(*device);
  const std::vector<std::pair<std::string, Streams::Hop>> ways = {
      {"weft", [&](const auto& from, const auto& to) { streams.by_flag(from, to); }},
      {"host function", [&](const auto& from, const auto& to) { streams.by_host(from, to); }},
      {"event", [&](const auto& from, const auto& to) { streams.by_event(from, to); }}};
  std::vector<Samples> samples(ways.size());
  for (const auto& [peer, hop] : ways) streams.run(hop);
  for (int run = 0; run < report.runs(); ++run) {
    for (std::size_t i = 0; i < ways.size(); ++i) samples[i].add(streams.run(ways[i].second));
  }
  for (std::size_t i = 0; i < ways.size(); ++i)
    report.add(time_row(name, ways[i].first, 0, samples[i], 1e6, "us"));
}

}  // namespace weft::bench
