// SPDX-License-Identifier: Apache-2.0
// The rules of rpc::Options::device_maps and devices, on machines with and without a GPU.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/engine/call/device_maps.h>
#include <weft/rpc.h>
#include <weft/tests/harness/ranks.h>

namespace weft::call {
namespace {

using harness::error_of;
using Pairs = std::vector<std::pair<c10::Device, c10::Device>>;

const c10::Device kHost(c10::kCPU);

c10::Device gpu(int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }

bool says(const Error& error, std::initializer_list<std::string> texts) {
  for (const std::string& text : texts) {
    if (error.text().find(text) != std::string::npos) continue;
    ADD_FAILURE() << "'" << text << "' is not in: " << error.text();
    return false;
  }
  return error.blame() == Blame::Caller;
}

// Return the error of worker0's map for worker1: checked alone, or together with the devices of
// both workers, where worker0 has 2 GPUs and worker1 has 1.
Error alone(const Pairs& pairs) {
  return error_of([&] { check_device_maps("worker0", {{"worker1", pairs}}, {}); });
}
Error together(const Pairs& pairs, const std::vector<c10::Device>& here = {},
               const std::vector<c10::Device>& there = {}) {
  return error_of([&] {
    check_device_maps({{"worker0", {2, here, {{"worker1", pairs}}}}, {"worker1", {1, there, {}}}},
                      /*more_may_come=*/false);
  });
}

TEST(DeviceMaps, UnknownWorkerIsNamed) {
  const std::vector<KnownDevices> workers{{"worker0", {1, {}, {{"worker7", {{gpu(0), gpu(0)}}}}}},
                                          {"worker1", {1, {}, {}}}};
  EXPECT_TRUE(says(error_of([&] { check_device_maps(workers, false); }),
                   {"worker0's", "'worker7'", "worker0, worker1"}));
  check_device_maps(workers, /*more_may_come=*/true);
}

TEST(DeviceMaps, MissingGpuIsNamedWithItsWorker) {
  EXPECT_TRUE(says(together({{gpu(2), gpu(0)}}), {"maps cuda:2 to cuda:0", "worker0 has 2 GPUs"}));
  EXPECT_TRUE(says(together({{gpu(0), gpu(1)}}), {"maps cuda:0 to cuda:1", "worker1 has 1 GPUs"}));
}

TEST(DeviceMaps, MapMustBeOneToOne) {
  EXPECT_TRUE(says(alone({{gpu(0), gpu(0)}, {gpu(1), gpu(0)}}),
                   {"cuda:1 to cuda:0", "and cuda:0 to cuda:0", "one to one"}));
  EXPECT_TRUE(
      says(alone({{gpu(0), gpu(0)}, {gpu(0), gpu(1)}}), {"cuda:0 to cuda:1", "one to one"}));
  EXPECT_TRUE(says(alone({{kHost, gpu(0)}, {c10::Device("cpu:0"), gpu(1)}}), {"one to one"}));
  EXPECT_TRUE(says(alone({{kHost, gpu(0)}, {gpu(0), gpu(0)}}), {"one to one"}));
  check_device_maps("worker0", {{"worker1", {{gpu(0), gpu(1)}, {gpu(1), gpu(0)}, {kHost, kHost}}}},
                    {});
}

TEST(DeviceMaps, InvalidDevicesAreRefused) {
  EXPECT_TRUE(says(alone({{c10::Device(c10::kCUDA, -1), gpu(0)}}), {"negative", "cuda:0"}));
  EXPECT_TRUE(says(alone({{gpu(0), c10::Device(c10::kCUDA, -1)}}), {"negative"}));
  EXPECT_TRUE(says(alone({{c10::Device(c10::kMeta), gpu(0)}}), {"meta"}));
  EXPECT_TRUE(
      says(error_of([] { check_device_maps("worker0", {}, {kHost}); }), {"devices", "cpu"}));
}

TEST(DeviceMaps, DeviceListMustCoverTheMaps) {
  EXPECT_TRUE(says(together({{gpu(1), gpu(0)}}, {gpu(0)}), {"devices of worker0", "cuda:1"}));
  const std::vector<KnownDevices> workers{{"worker0", {2, {}, {{"worker1", {{gpu(0), gpu(0)}}}}}},
                                          {"worker1", {2, {gpu(1)}, {}}}};
  EXPECT_TRUE(
      says(error_of([&] { check_device_maps(workers, false); }), {"devices of worker1", "cuda:0"}));
  EXPECT_TRUE(says(together({}, {gpu(2)}), {"list cuda:2", "2 GPUs"}));
}

TEST(DeviceMaps, MapToOneselfMovesNothing) {
  check_device_maps("worker0", {{"worker0", {{gpu(0), gpu(0)}}}}, {});
  EXPECT_TRUE(says(error_of([] {
                     check_device_maps("worker0", {{"worker0", {{gpu(0), gpu(1)}}}}, {});
                   }),
                   {"oneself"}));
}

TEST(DeviceMaps, FindsDevicesInBothDirections) {
  const DeviceMap none;
  EXPECT_EQ(none.find(kHost), kHost);
  EXPECT_EQ(none.find(gpu(0)), std::nullopt);
  EXPECT_FALSE(DeviceMap({{kHost, kHost}}).has_gpus());
  const DeviceMap map({{gpu(0), gpu(1)}, {kHost, gpu(0)}});
  EXPECT_TRUE(map.has_gpus());
  EXPECT_EQ(map.find(gpu(0)), gpu(1));
  EXPECT_EQ(map.find(kHost), gpu(0));
  EXPECT_EQ(map.find(gpu(1)), std::nullopt);
  EXPECT_EQ(map.inverse().find(gpu(1)), gpu(0));
  EXPECT_EQ(map.inverse().find(gpu(0)), kHost);
  EXPECT_EQ(map.inverse().find(kHost), kHost);
}

TEST(DeviceMaps, UsedGpusComeFromMapsOrTheList) {
  const std::vector<KnownDevices> workers{
      {"worker0", {4, {}, {{"worker1", {{gpu(3), gpu(1)}, {kHost, gpu(2)}}}}}},
      {"worker1", {4, {}, {{"worker0", {{gpu(0), gpu(0)}}}}}},
      {"worker2", {4, {gpu(3), gpu(1)}, {}}}};
  EXPECT_EQ(gpus_used("worker0", workers), (std::vector<int>{0, 3}));
  EXPECT_EQ(gpus_used("worker1", workers), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(gpus_used("worker2", workers), (std::vector<int>{1, 3}));
}

TEST(DeviceMaps, StoreRecordKeepsAllFields) {
  const WorkerDevices devices{4, {gpu(3)}, {{"worker1", {{gpu(3), kHost}, {kHost, gpu(127)}}}}};
  const WorkerDevices again = unstored(stored(devices));
  EXPECT_EQ(again.gpus, 4);
  EXPECT_EQ(again.devices, devices.devices);
  EXPECT_EQ(again.maps, devices.maps);
  for (const int number : {-2, 128}) {
    EXPECT_EQ(error_of([&] { unstored({0, {number}, {}}); }).blame(), Blame::Caller) << number;
  }
}

at::Tensor doubled(at::Tensor tensor) { return tensor * 2; }

// Returns the errors of two workers that join with these maps for each other.
std::vector<std::string> errors_of_joining(const std::function<DeviceMaps(int rank)>& maps) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> texts(2);
  harness::run_threads(2, [&](int rank) {
    const Error error = error_of([&] {
      rpc::init("worker" + std::to_string(rank), {.rank = rank,
                                                  .world_size = 2,
                                                  .store = store,
                                                  .timeout = std::chrono::seconds(20),
                                                  .transports = {"inproc"},
                                                  .device_maps = maps(rank)});
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    texts[static_cast<std::size_t>(rank)] = error.text();
  });
  return texts;
}

TEST(DeviceMapsOfWorkers, OneWrongMapFailsAllWithOneText) {
  const auto texts = errors_of_joining([](int rank) {
    return rank == 0 ? DeviceMaps{{"nobody", {{kHost, kHost}}}} : DeviceMaps();
  });
  EXPECT_NE(texts[0].find("'nobody'"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(DeviceMapsOfWorkers, GpuBeyondTheCountFailsJoining) {
  const auto texts = errors_of_joining([](int rank) {
    return rank == 1 ? DeviceMaps{{"worker0", {{gpu(100), gpu(0)}}}} : DeviceMaps();
  });
  EXPECT_NE(texts[0].find("maps cuda:100 to cuda:0, and worker1 has"), std::string::npos)
      << texts[0];
  EXPECT_EQ(texts[0], texts[1]);
}

// Most maps are refused for their shape, whether or not this machine has a GPU.
TEST(DeviceMapsOfWorkers, InvalidMapFailsJoining) {
  const std::vector<std::pair<Pairs, std::string>> wrong{
      {{{kHost, gpu(100)}}, "maps cpu to cuda:100, and worker1 has"},
      {{{kHost, gpu(0)}, {gpu(0), gpu(0)}}, "one to one"},
      {{{gpu(0), gpu(0)}, {gpu(0), kHost}}, "one to one"},
      {{{c10::Device(c10::kCUDA, -1), kHost}}, "negative"},
      {{{kHost, c10::Device(c10::kCUDA, -1)}}, "negative"}};
  for (const auto& [pairs, text] : wrong) {
    // A map whose shape is wrong is refused before the worker joins, so no other worker is needed.
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const bool needs_both = text.starts_with("maps");
    harness::run_threads(needs_both ? 2 : 1, [&](int rank) {
      Options options{.rank = rank, .world_size = 2, .store = store, .transports = {"inproc"}};
      if (rank == 0) options.device_maps = {{"worker1", pairs}};
      EXPECT_TRUE(
          says(error_of([&] { rpc::init("worker" + std::to_string(rank), options); }), {text}));
    });
    // The refused attempt leaves nothing behind.
    harness::run_threads(2, [&](int rank) {
      Agent agent =
          rpc::init("worker" + std::to_string(rank),
                    {.rank = rank, .world_size = 2, .store = store, .transports = {"inproc"}});
      EXPECT_TRUE(at::equal(agent.sync<&doubled>(1 - rank, at::ones({3})), at::full({3}, 2.0)));
      agent.shutdown({.timeout = std::chrono::seconds(30)});
    });
  }
}

TEST(DeviceMapsOfWorkers, HostToHostMapNeedsNoGpu) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  harness::run_threads(2, [&](int rank) {
    const std::string other = "worker" + std::to_string(1 - rank);
    Agent agent =
        rpc::init("worker" + std::to_string(rank), {.rank = rank,
                                                    .world_size = 2,
                                                    .store = store,
                                                    .transports = {"inproc"},
                                                    .device_maps = {{other, {{kHost, kHost}}}}});
    const at::Tensor sum = agent.sync<&doubled>(other, at::ones({3}));
    EXPECT_TRUE(sum.device().is_cpu());
    EXPECT_TRUE(at::equal(sum, at::full({3}, 2.0)));
    agent.shutdown({.timeout = std::chrono::seconds(30)});
  });
}

}  // namespace
}  // namespace weft::call
