// SPDX-License-Identifier: Apache-2.0
#include <array>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using Tensors = std::vector<at::Tensor>;

struct Wrong {
  const char* what;
  std::function<void(ProcessGroup&)> call;  // made by rank 0 of 2
  std::string text;                         // part of the error's text
};

at::Tensor ones(std::int64_t count = 2, at::ScalarType dtype = at::kFloat) {
  return torch::ones({count}, dtype);
}

std::vector<Wrong> wrong_calls() {
  const at::Tensor row = torch::ones({2, 2}).t();
  const at::Tensor column = torch::ones({2, 2}).select(1, 0);
  const at::Tensor sparse = torch::eye(2).to_sparse();
  static std::array<char, 9> bytes{};
  const at::Tensor askew = at::from_blob(
      bytes.data() + (reinterpret_cast<std::uintptr_t>(bytes.data()) % 4 == 0 ? 1 : 0), {2},
      at::kFloat);
  return {
      {"undefined", [](auto& g) { static_cast<void>(g.all_reduce(at::Tensor())); },
       "tensor is an undefined tensor"},
      {"not contiguous", [=](auto& g) { static_cast<void>(g.all_reduce(row)); },
       "is not contiguous; make it contiguous before (t = t.contiguous()) and read the result "
       "there"},
      {"not contiguous, to receive", [=](auto& g) { static_cast<void>(g.recv(row, 1 - g.rank())); },
       "is not contiguous; make it contiguous before (t = t.contiguous()) and read the result "
       "there"},
      {"not contiguous, to send", [=](auto& g) { static_cast<void>(g.send(row, 1 - g.rank())); },
       "is not contiguous; pass .contiguous()"},
      {"lazily conjugated",
       [](auto& g) { static_cast<void>(g.all_reduce(torch::ones({2}, at::kComplexFloat).conj())); },
       "resolve it before (t = t.resolve_conj().resolve_neg()) and read the result there"},
      {"lazily negated",
       [](auto& g) {
         static_cast<void>(g.send(torch::imag(torch::ones({1}, at::kComplexFloat).conj()), 1));
       },
       "pass .resolve_conj().resolve_neg()"},
      {"sparse", [=](auto& g) { static_cast<void>(g.broadcast(sparse, 0)); }, "only dense tensors"},
      {"meta device", [](auto& g) { static_cast<void>(g.all_reduce(torch::ones({2}, at::kMeta))); },
       "carries tensors on meta"},
      {"without memory",
       [](auto& g) { static_cast<void>(g.all_reduce(at::_efficientzerotensor({2}))); },
       "has no memory"},
      {"misplaced", [=](auto& g) { static_cast<void>(g.all_reduce(askew)); },
       "is not a multiple of its element size of 4 bytes; pass .clone()"},
      {"misplaced input",
       [=](auto& g) { static_cast<void>(g.reduce_scatter_into(ones(1), askew)); }, "pass .clone()"},
      {"misplaced part",
       [=](auto& g) {
         static_cast<void>(g.reduce_scatter(ones(), {ones(), askew}));
       },
       "pass .clone()"},
      {"quantised", [](auto& g) { static_cast<void>(g.all_reduce(torch::empty({2}, at::kQInt8))); },
       "dtype QInt8"},
      {"an unknown operator",
       [](auto& g) { static_cast<void>(g.all_reduce(ones(), static_cast<ReduceOp>(77))); },
       "no ReduceOp 77"},
      {"root too high", [](auto& g) { static_cast<void>(g.broadcast(ones(), 2)); },
       "root 2 is not a rank of the group"},
      {"root negative", [](auto& g) { static_cast<void>(g.reduce(ones(), -1)); },
       "root -1 is not a rank of the group"},
      {"gather's root", [](auto& g) { static_cast<void>(g.gather({}, ones(), 7)); }, "root 7"},
      {"scatter's root", [](auto& g) { static_cast<void>(g.scatter(ones(), {}, 7)); }, "root 7"},
      {"broadcast's root negative", [](auto& g) { static_cast<void>(g.broadcast(ones(), -1)); },
       "root -1 is not a rank of the group"},
      {"reduce's root too high", [](auto& g) { static_cast<void>(g.reduce(ones(), 2)); },
       "root 2 is not a rank of the group"},
      {"gather's root negative", [](auto& g) { static_cast<void>(g.gather({}, ones(), -1)); },
       "root -1"},
      {"scatter's root negative", [](auto& g) { static_cast<void>(g.scatter(ones(), {}, -1)); },
       "root -1"},
      {"no tensor to broadcast", [](auto& g) { static_cast<void>(g.broadcast(at::Tensor(), 0)); },
       "tensor is an undefined tensor"},
      {"no tensor to reduce", [](auto& g) { static_cast<void>(g.reduce(at::Tensor(), 0)); },
       "tensor is an undefined tensor"},
      {"a column to gather", [=](auto& g) { static_cast<void>(g.gather({}, column, 1)); },
       "is not contiguous; pass .contiguous()"},
      {"a column to all_gather",
       [=](auto& g) {
         static_cast<void>(g.all_gather({ones(), ones()}, column));
       },
       "is not contiguous; pass .contiguous()"},
      {"no outputs", [](auto& g) { static_cast<void>(g.all_gather({}, ones())); },
       "outputs holds 0 tensors; it takes one for each of the 2"},
      {"too many outputs",
       [](auto& g) {
         static_cast<void>(g.all_gather({ones(), ones(), ones()}, ones()));
       },
       "outputs holds 3 tensors"},
      {"output's shape",
       [](auto& g) {
         static_cast<void>(g.all_gather({ones(), ones(3)}, ones()));
       },
       "outputs[1] has shape [3]; it must have [2]"},
      {"output's dtype",
       [](auto& g) {
         static_cast<void>(g.all_gather({ones(), ones(2, at::kInt)}, ones()));
       },
       "dtype and device must agree"},
      {"output not contiguous",
       [=](auto& g) {
         static_cast<void>(g.all_gather({row, row}, torch::ones({2, 2})));
       },
       "outputs[0]"},
      {"flat output", [](auto& g) { static_cast<void>(g.all_gather_into(ones(3), ones())); },
       "output has 3 elements; it takes 2 x 2"},
      {"flat output's dtype",
       [](auto& g) { static_cast<void>(g.all_gather_into(ones(4, at::kInt), ones())); },
       "dtype and device must agree"},
      {"gather without outputs", [](auto& g) { static_cast<void>(g.gather({}, ones(), 0)); },
       "outputs holds 0 tensors"},
      {"gather with outputs off root",
       [](auto& g) {
         static_cast<void>(g.gather({ones(), ones()}, ones(), 1));
       },
       "outputs must be empty"},
      {"gather with too few outputs",
       [](auto& g) { static_cast<void>(g.gather({ones()}, ones(), 0)); },
       "outputs holds 1 tensor;"},
      {"gather's shapes",
       [](auto& g) {
         static_cast<void>(g.gather({ones(), ones(3)}, ones(), 0));
       },
       "outputs[1] has shape [3]; it must have [2]"},
      {"gather's dtypes",
       [](auto& g) {
         static_cast<void>(g.gather({ones(), ones(2, at::kDouble)}, ones(), 0));
       },
       "dtype and device must agree"},
      {"scatter with too many inputs",
       [](auto& g) {
         static_cast<void>(g.scatter(ones(), {ones(), ones(), ones()}, 0));
       },
       "inputs holds 3 tensors"},
      {"scatter's dtypes",
       [](auto& g) {
         static_cast<void>(g.scatter(ones(), {ones(), ones(2, at::kInt)}, 0));
       },
       "dtype and device must agree"},
      {"scatter's undefined part",
       [](auto& g) {
         static_cast<void>(g.scatter(ones(), {ones(), at::Tensor()}, 0));
       },
       "inputs[1] is an undefined tensor"},
      {"scatter without inputs", [](auto& g) { static_cast<void>(g.scatter(ones(), {}, 0)); },
       "inputs holds 0 tensors"},
      {"scatter with inputs off root",
       [](auto& g) {
         static_cast<void>(g.scatter(ones(), {ones(), ones()}, 1));
       },
       "inputs must be empty"},
      {"scatter's shapes",
       [](auto& g) {
         static_cast<void>(g.scatter(ones(), {ones(), ones(3)}, 0));
       },
       "inputs[1] has shape [3]"},
      {"reduce_scatter's list",
       [](auto& g) { static_cast<void>(g.reduce_scatter(ones(), {ones()})); },
       "inputs holds 1 tensor;"},
      {"reduce_scatter's own part",
       [](auto& g) {
         static_cast<void>(g.reduce_scatter(ones(), {ones(3), ones()}));
       },
       "inputs[0] has shape [3]"},
      {"reduce_scatter's dtypes",
       [](auto& g) {
         static_cast<void>(g.reduce_scatter(ones(), {ones(), ones(2, at::kInt)}));
       },
       "dtype"},
      {"flat input", [](auto& g) { static_cast<void>(g.reduce_scatter_into(ones(), ones(5))); },
       "input has 5 elements; it takes 2 x 2"},
      {"flat input's dtype",
       [](auto& g) { static_cast<void>(g.reduce_scatter_into(ones(), ones(4, at::kInt))); },
       "dtype and device must agree"},
      {"all_to_all of nothing", [](auto& g) { static_cast<void>(g.all_to_all({}, {})); },
       "inputs is empty"},
      {"all_to_all's lists",
       [](auto& g) {
         static_cast<void>(g.all_to_all({ones()}, {ones(), ones()}));
       },
       "outputs holds 1 tensor;"},
      {"all_to_all's own part",
       [](auto& g) {
         static_cast<void>(g.all_to_all({ones(3), ones()}, {ones(), ones()}));
       },
       "this rank's own part"},
      {"all_to_all's dtypes",
       [](auto& g) {
         static_cast<void>(g.all_to_all({ones(), ones()}, {ones(), ones(2, at::kInt)}));
       },
       "dtype"},
      {"send to itself", [](auto& g) { static_cast<void>(g.send(ones(), 0)); },
       "rank 0 is this rank"},
      {"send to a rank that does not exist", [](auto& g) { static_cast<void>(g.send(ones(), 2)); },
       "to 2 is not a rank"},
      {"send with a negative tag", [](auto& g) { static_cast<void>(g.send(ones(), 1, -1)); },
       "tag -1 is negative"},
      {"send a tensor that is not contiguous", [=](auto& g) { static_cast<void>(g.send(row, 1)); },
       "not contiguous"},
      {"receive from itself", [](auto& g) { static_cast<void>(g.recv(ones(), 0)); },
       "rank 0 is this rank"},
      {"receive from a rank that does not exist",
       [](auto& g) { static_cast<void>(g.recv(ones(), -2)); }, "from -2 is not a rank"},
      {"receive with a negative tag", [](auto& g) { static_cast<void>(g.recv(ones(), 1, -5)); },
       "tag -5 is negative"},
      {"receive into a tensor that is not contiguous",
       [=](auto& g) { static_cast<void>(g.recv(row, 1)); }, "not contiguous"},
      {"no ranks", [](auto& g) { g.new_group({}); }, "no ranks are given"},
      {"a rank twice",
       [](auto& g) {
         g.new_group({0, 0});
       },
       "rank 0 is named twice"},
      {"a rank that does not exist",
       [](auto& g) {
         g.new_group({0, 2});
       },
       "2 is not a rank"},
      {"a negative rank",
       [](auto& g) {
         g.new_group({0, -1});
       },
       "-1 is not a rank"},
      {"global rank", [](auto& g) { g.global_rank(2); }, "2 is not a rank"},
      {"a wait on another device",
       [](auto& g) {
         Work work = g.send(ones(), 1);
         work.wait(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0)));
       },
       "cannot wait for tensors on cpu"},
  };
}

TEST(Arguments, AreCheckedBeforeAnythingIsSent) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    // Rank 1 takes part in none of these calls; had one sent anything, the calls below would fail.
    if (group.rank() == 0) {
      for (const Wrong& wrong : wrong_calls()) {
        const auto error = error_of([&] { wrong.call(group); });
        EXPECT_EQ(error.blame(), Blame::Caller) << wrong.what << ": " << error.what();
        EXPECT_NE(error.text().find(wrong.text), std::string::npos)
            << wrong.what << ": " << error.text();
      }
    } else {
      const auto received = torch::zeros({2});
      group.recv(received, 0).wait();  // the one call above that was valid until its wait
    }
    const auto tensor = torch::ones({1});
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST(Arguments, EmptyGroupRefusesEveryCall) {
  ProcessGroup none;
  EXPECT_FALSE(none);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { none.rank(); }, [&] { static_cast<void>(none.all_reduce(ones())); },
           [&] { static_cast<void>(none.barrier()); }, [&] { none.split(0, 0); },
           [&] { none.abort("x"); }, [&] { none.store(); }}) {
    const auto error = error_of(call);
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("this process group is empty"), std::string::npos) << error.text();
  }
}

TEST(Arguments, BadOptionsAreRefusedWithoutWaiting) {
  const auto refused = [](ProcessGroupOptions options) {
    options.init_method = "tcp://127.0.0.1:1";
    options.rank = 0;
    options.world_size = 2;
    return error_of([&] { init_process_group(options); });
  };
  const auto expect = [](const Error& error, const std::string& text) {
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_NE(error.text().find(text), std::string::npos) << error.text();
  };
  expect(refused({.backend = "cpu:gloo,"}), "'' is not device:backend");
  expect(refused({.backend = "cpu:gloo,cpu:gloo"}), "names cpu twice");
  expect(refused({.backend = "tpu:gloo"}), "unknown device 'tpu'");
  expect(refused({.backend = "gloo,nccl"}), "'gloo' is not device:backend");
  expect(refused({.timeout = std::chrono::seconds(0)}), "must be positive");
  expect(refused({.timeout = std::chrono::seconds(-1)}), "must be positive");
  expect(refused({.device = c10::Device("meta")}), "a rank's device is a CPU or a CUDA device");
  expect(refused({.device = c10::Device("cuda:63")}), "but this process sees ");
}

TEST(Arguments, UnknownBackendErrorListsKnownOnes) {
  harness::run_threads(1, [](int) {
    ProcessGroupOptions options;
    options.backend = "carrier-pigeon";
    options.init_method = "tcp://127.0.0.1:" + std::to_string(launch::free_port());
    options.rank = 0;
    options.world_size = 1;
    const auto error = error_of([&] { init_process_group(options); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("gloo"), std::string::npos) << error.text();
  });
}

// Otherwise a rank that arrives after rank 0 has failed for this reason would wait for its store.
TEST(Arguments, UnknownBackendNeedsNoRankZero) {
  const auto error = error_of([] {
    init_process_group({.backend = "cpu:carrier-pigeon",
                        .init_method = "tcp://127.0.0.1:" + std::to_string(launch::free_port()),
                        .rank = 1,
                        .world_size = 2});  // rank 0 would have half an hour to join
  });
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_NE(error.text().find("no backend 'carrier-pigeon'"), std::string::npos) << error.text();
}

TEST(Backends, AreListedWithWhyTheyCannotBeUsed) {
  bool has_gloo = false;
  for (const BackendInfo& info : available_backends()) {
    EXPECT_EQ(info.usable, info.why_not.empty()) << info.name;
    has_gloo |= info.name == "gloo" && info.usable;
  }
  EXPECT_TRUE(has_gloo);
}

TEST(Backends, NamesIgnoreCaseAndBlanks) {
  harness::run_ranks(As::Threads, 2,
                     [](ProcessGroup& group) {
                       EXPECT_EQ(group.backend(c10::Device(c10::kCPU)), "gloo");
                       EXPECT_EQ(
                           error_of([&] { group.backend(c10::Device(c10::kCUDA, 0)); }).blame(),
                           Blame::Caller);
                     },
                     {.backend = " CPU : Gloo "});
}

}  // namespace
}  // namespace weft
