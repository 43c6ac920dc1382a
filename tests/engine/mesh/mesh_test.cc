// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/group/access.h>
#include <weft/mesh.h>
#include <weft/tests/harness/meet_in.h>
#include <weft/tests/harness/on_ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::Setting;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Axes = std::vector<MeshAxis>;

class Meshes : public harness::OnRanks {};

INSTANTIATE_TEST_SUITE_P(, Meshes,
                         testing::Values(Setting{As::Threads, "tcp"}, Setting{As::Threads, "gloo"},
                                         Setting{As::Processes, "shm"},
                                         Setting{As::Processes, "tcp"},
                                         Setting{As::Processes, "gloo"}),
                         harness::name_of_setting);

// The sum of 10^rank over the ranks of a group, with this rank's rank in the job: 1010 tells that
// ranks 1 and 3 have taken part.
int sum_of(ProcessGroup group, const ProcessGroup& job) {
  int mine = 1;
  for (int i = 0; i < job.rank(); ++i) mine *= 10;
  const auto sum = torch::full({1}, mine, at::kInt);
  group.all_reduce(sum).wait();
  return sum.item<int>();
}

TEST_P(Meshes, GroupsReduceAlongTheirAxes) {
  on_ranks(4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"replicate", 2}, {"shard", -1}});
    const int rank = group.rank();
    EXPECT_EQ(mesh.size("replicate"), 2);
    EXPECT_EQ(mesh.size("shard"), 2);
    EXPECT_EQ(mesh.coordinate("replicate"), rank / 2);
    EXPECT_EQ(mesh.coordinate("shard"), rank % 2);
    EXPECT_EQ(mesh["replicate"].rank(), rank / 2);
    EXPECT_EQ(mesh["shard"].rank(), rank % 2);
    EXPECT_EQ(sum_of(mesh["shard"], group), rank < 2 ? 11 : 1100);
    EXPECT_EQ(sum_of(mesh["replicate"], group), rank % 2 == 0 ? 101 : 1010);
    EXPECT_EQ(sum_of(mesh.group(), group), 1111);
    EXPECT_TRUE(group::are_same(mesh.group(), group));
  });
}

TEST_P(Meshes, EveryShapeHasItsGroups) {
  on_ranks(4, [](ProcessGroup& group) {
    for (const Axes& axes : {Axes{{"a", 4}}, Axes{{"a", 1}, {"b", 4}}, Axes{{"a", 4}, {"b", 1}},
                             Axes{{"a", 2}, {"b", 2}, {"c", 1}}}) {
      const Mesh mesh(group, axes);
      int stride = 4;
      for (const MeshAxis& axis : axes) {
        stride /= axis.ranks;
        EXPECT_EQ(mesh.coordinate(axis.name), group.rank() / stride % axis.ranks);
        std::vector<int> ranks;
        int sum = 0;
        const int first = group.rank() - mesh.coordinate(axis.name) * stride;
        for (int i = 0, rank = first; i < axis.ranks; ++i, rank += stride) {
          ranks.push_back(rank);
          sum += std::vector<int>{1, 10, 100, 1000}[static_cast<std::size_t>(rank)];
        }
        EXPECT_EQ(mesh[axis.name].ranks(), ranks);
        EXPECT_EQ(sum_of(mesh[axis.name], group), sum);
      }
    }
  });
}

TEST_P(Meshes, FlattenedPartsAreKept) {
  on_ranks(4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"a", 2}, {"b", 1}, {"c", 2}});
    const ProcessGroup flat = mesh.flatten({"a", "b"});
    EXPECT_EQ(sum_of(flat, group), group.rank() % 2 == 0 ? 101 : 1010);
    const Mesh copy = mesh;  // NOLINT(performance-unnecessary-copy-initialization)
    EXPECT_TRUE(group::are_same(copy.flatten({"a", "b"}), flat));
    EXPECT_TRUE(group::are_same(mesh.slice({"a", "b"}).group(), flat));
    EXPECT_TRUE(group::are_same(mesh.flatten({"c"}), mesh["c"]));
    EXPECT_TRUE(group::are_same(mesh.flatten({"a", "b", "c"}), group));
    EXPECT_EQ(sum_of(mesh.flatten({"b", "c"}), group), group.rank() < 2 ? 11 : 1100);
  });
}

TEST_P(Meshes, SlicesOfSlicesShareGroups) {
  on_ranks(4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"a", 2}, {"b", 2}, {"c", 1}});
    const Mesh slice = mesh.slice({"b", "c"});
    EXPECT_EQ(slice.axes().size(), 2u);
    EXPECT_EQ(slice.size("b"), 2);
    EXPECT_TRUE(group::are_same(slice["b"], mesh["b"]));
    const Mesh one = slice.slice({"b"});
    EXPECT_TRUE(group::are_same(one.group(), mesh["b"]));
    EXPECT_EQ(one.coordinate("b"), mesh.coordinate("b"));
    EXPECT_EQ(sum_of(one["b"], group), group.rank() < 2 ? 11 : 1100);
    const Error error = error_of([&] { static_cast<void>(one.size("c")); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("there is no axis 'c'; the axes are b (2)"));
  });
}

TEST_P(Meshes, DifferentAxesAreRefusedOnAllRanks) {
  on_ranks(4, [](ProcessGroup& group) {
    const Axes mine = group.rank() == 2 ? Axes{{"a", 4}} : Axes{{"a", 2}, {"b", 2}};
    const Error error = error_of([&] { Mesh(group, mine); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("rank 2 passed a (4)"));
    EXPECT_THAT(error.text(), HasSubstr("ranks 0, 1, 3 passed a (2), b (2)"));
    EXPECT_THAT(error.ranks(), ElementsAre(2));
    const Mesh mesh(group, {{"a", 2}, {"b", 2}});  // the ranks are in step
    EXPECT_EQ(sum_of(mesh["b"], group), group.rank() < 2 ? 11 : 1100);
  });
}

TEST_P(Meshes, AxesRefusedOnOneRankAreToldToAll) {
  on_ranks(2, [](ProcessGroup& group) {
    const Error error = error_of([&] { Mesh(group, {{"a", group.rank() == 1 ? 3 : 2}}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(),
                HasSubstr("a (3) make 3 ranks, and the group has 2; a (2) would fit"));
    if (group.rank() == 0) {
      EXPECT_THAT(error.text(), HasSubstr("rank 1 passed axes that are refused: a (3)"));
      EXPECT_THAT(error.ranks(), ElementsAre(1));
    }
    EXPECT_EQ(sum_of(Mesh(group, {{"a", -1}})["a"], group), 11);
  });
}

TEST_P(Meshes, PlacesAreInErrorsAndInTheFlightRecorder) {
  on_ranks(4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
    const std::string row = std::to_string(mesh.coordinate("replicate"));
    const std::string column = std::to_string(mesh.coordinate("shard"));
    const std::string name = "default/mesh1/shard of replicate[" + row + "]";
    const std::string place = "shard[" + column + "] of replicate[" + row + "]";
    const Error error =
        error_of([&] { static_cast<void>(mesh["shard"].broadcast(torch::ones({1}), 7)); });
    EXPECT_THAT(error.text(),
                HasSubstr("group '" + name + "' (rank " + column + " of 2, " + place + ")"));
    EXPECT_THAT(group.dump(), HasSubstr("\"name\":\"" + name + "\""));
    EXPECT_THAT(group.dump(), HasSubstr("\"name\":\"" + place + "\""));
    // A group that is made of a mesh's group is no part of the mesh.
    const ProcessGroup half = mesh["shard"].split(0, 0);
    EXPECT_THAT(group::place_of(half), Not(HasSubstr(place)));
  });
}

TEST_P(Meshes, FailureOfOneRowLeavesTheOthers) {
  on_ranks(4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
    harness::meet(group);
    if (group.rank() == 0) mesh["shard"].abort("over");
    if (group.rank() == 1) {
      const Error error = error_of([&] { mesh["shard"].barrier().wait(); });
      EXPECT_EQ(error.blame(), Blame::Cancelled);
      EXPECT_THAT(error.text(), HasSubstr("rank 1 of 2, shard[1] of replicate[0])"));
    }
    harness::meet(group);
    if (group.rank() >= 2) {
      EXPECT_EQ(sum_of(mesh["shard"], group), 1100);
    }
    EXPECT_EQ(sum_of(mesh["replicate"], group), group.rank() % 2 == 0 ? 101 : 1010);
  });
}

TEST(MeshOfRanks, UnknownAxesAreRefusedWithTheKnown) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"a", 1}, {"b", 2}});
    const auto expect_refused = [](const std::function<void()>& call, const std::string& why) {
      const Error error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(why));
      EXPECT_THAT(error.text(), HasSubstr("Mesh on group 'default' (rank "));
      EXPECT_THAT(error.text(), HasSubstr("a (1), b (2)"));
    };
    expect_refused([&] { static_cast<void>(mesh["x"]); }, "there is no axis 'x'");
    expect_refused([&] { static_cast<void>(mesh.size("x")); }, "there is no axis 'x'");
    expect_refused([&] { static_cast<void>(mesh.coordinate("")); }, "there is no axis ''");
    expect_refused([&] { mesh.slice({"a", "x"}); }, "there is no axis 'x'");
    expect_refused([&] { mesh.slice({}); }, "slice: no axis is named");
    expect_refused([&] { mesh.slice({"a", "a"}); }, "slice: axis 'a' is named twice");
    expect_refused(
        [&] {
          mesh.slice({"b", "a"});
        },
        "slice: name axes in the mesh's order, 'a' before 'b'");
    expect_refused([&] { mesh.flatten({}); }, "flatten: no axis is named");
    expect_refused([&] { mesh.flatten({"x"}); }, "there is no axis 'x'");
    expect_refused([&] { mesh.flatten({"b", "b"}); }, "flatten: axis 'b' is named twice");
  });
}

TEST(MeshOfRanks, AbsentRankIsNamed) {
  harness::run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    if (group.rank() == 2) return;
    const Error error = error_of([&] { Mesh(group, {{"a", 3}}); });
    EXPECT_EQ(error.blame(), Blame::PeerLost);
    EXPECT_THAT(error.text(), HasSubstr("rank 2 has left group"));
  });
}

TEST(MeshOfRanks, RankThatNeverComesIsATimeout) {
  harness::run_ranks(As::Threads, 2,
                     [](ProcessGroup& group) {
                       if (group.rank() == 0) {
                         const Error error = error_of([&] { Mesh(group, {{"a", 2}}); });
                         EXPECT_EQ(error.blame(), Blame::Timeout);
                         EXPECT_THAT(error.text(),
                                     HasSubstr("Mesh on group 'default' (rank 0 of 2): rank 1 did "
                                               "not call it within 400 ms"));
                         EXPECT_THAT(error.ranks(), ElementsAre(1));
                         group.store()->set("over", std::string("yes"));
                       } else {
                         group.store()->wait({"over"});
                       }
                     },
                     {.timeout = std::chrono::milliseconds(400)});
}

// As a program whose first rank ends by the error that it gets, and with it the store.
TEST(MeshOfRanks, HostOfTheStoreWaitsUntilItsErrorIsRead) {
  harness::Processes ranks(2, [](int rank) {
    auto group = init_process_group({.device = c10::Device(c10::kCPU)});
    harness::Processes::say("joined");
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it comes later
    const Error error = error_of([&] { Mesh(group, {{"a", rank == 0 ? 3 : 2}}); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("a (3) make 3 ranks, and the group has 2"));
    if (rank == 0) std::quick_exit(testing::Test::HasFailure() ? 1 : 0);
  });
  ranks.expect_success();
}

TEST(MeshOfRanks, NeedsAGroup) {
  EXPECT_EQ(error_of([] { Mesh({}, {{"a", 1}}); }).blame(), Blame::Caller);
}

TEST(MeshOfRanks, MovedFromMeshIsACallerError) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    Mesh source(group, {{"a", 2}});
    const Mesh mesh = std::move(source);
    const auto expect_refused = [](const std::function<void()>& call) {
      const Error error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("moved from"));
    };
    // NOLINTBEGIN(bugprone-use-after-move)
    expect_refused([&] { static_cast<void>(source["a"]); });
    expect_refused([&] { static_cast<void>(source.size("a")); });
    expect_refused([&] { static_cast<void>(source.coordinate("a")); });
    expect_refused([&] { static_cast<void>(source.axes()); });
    expect_refused([&] { source.slice({"a"}); });
    expect_refused([&] { source.flatten({"a"}); });
    expect_refused([&] { source.group(); });
    // NOLINTEND(bugprone-use-after-move)
    source = mesh;
    EXPECT_EQ(source.size("a"), 2);
  });
}

TEST(MeshOfRanks, ThreadsFlattenIntoOneGroup) {
  harness::run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"a", 2}, {"b", 2}, {"c", 1}});
    std::vector<ProcessGroup> flat(6);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < flat.size(); ++i) {
      threads.emplace_back([&, i] { flat[i] = mesh.flatten({i % 2 == 0 ? "a" : "b", "c"}); });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 2; i < flat.size(); ++i)
      EXPECT_TRUE(group::are_same(flat[i], flat[i % 2]));
    EXPECT_EQ(flat[0].ranks(), mesh["a"].ranks());
    EXPECT_EQ(flat[1].ranks(), mesh["b"].ranks());
  });
}

TEST(MeshOfRanks, MeshesOfOneGroupAreApart) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const Mesh one(group, {{"a", 2}}), two(group, {{"a", 2}});
    EXPECT_FALSE(group::are_same(one["a"], two["a"]));
    EXPECT_THAT(group::place_of(two["a"]), HasSubstr("'default/mesh2/a'"));
    const Mesh inner(one["a"], {{"b", 2}});  // a mesh of a mesh's group
    EXPECT_EQ(sum_of(inner["b"], group), 11);
  });
}

// A store that puts every second rank on another host.
class TwoHosts final : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    std::string text(value.begin(), value.end());
    if (key.find("Mesh/1/") != std::string::npos && (key.back() - '0') % 2 == 1)
      text.insert(text.find('\n') + 1, "other-");
    HashStore::set(key, {text.begin(), text.end()});
  }
};

TEST(MeshOfRanks, AxisThatCrossesHostsIsWarnedOfOnce) {
  const auto store = c10::make_intrusive<TwoHosts>();
  harness::run_threads(4, [&](int rank) {
    auto group = init_process_group(
        {.rank = rank, .world_size = 4, .store = store, .device = c10::Device(c10::kCPU)});
    harness::meet_in(group, store);
    const Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
    group.barrier().wait();
    const std::string log = harness::LogWatch::current().text();
    const std::string warning = "axis 'shard', the last one, crosses hosts";
    EXPECT_THAT(log, HasSubstr(warning));
    EXPECT_EQ(log.find(warning), log.rfind(warning)) << log;
    EXPECT_THAT(log, HasSubstr("rank 1 on other-"));
    group.barrier().wait();
  });
}

}  // namespace
}  // namespace weft
