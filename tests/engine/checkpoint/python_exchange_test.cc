// SPDX-License-Identifier: Apache-2.0
// Folders that save_async() writes are read by Python's safetensors and PyTorch's
// HuggingFaceStorageReader, and the reverse; and a Python program checks them.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>

#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

// A model with one parameter, of the type that python_exchange.py expects.
struct OneImpl : torch::nn::Module {
  OneImpl()
      : first(register_module("first",
                              torch::nn::Linear(torch::nn::LinearOptions(6, 5).bias(false)))) {
    to(torch::kDouble);
  }
  torch::nn::Linear first;
};
TORCH_MODULE(One);

struct Values {
  One net;
  One sharded;
  // The files go past the page cache, so their headers are padded.
  torch::Tensor large = torch::arange(800'000, torch::kFloat).reshape({400, 2'000});
  std::vector<bool> bits = {true, false, true};
  int epoch = 7;
  torch::Tensor half = torch::full({2, 2}, 1.5, torch::kBFloat16);
  torch::Tensor weight = torch::arange(30, torch::kDouble).reshape({5, 6});

  Values() {
    const torch::NoGradGuard no_grad;
    net->first->weight.copy_(weight);
    sharded->first->weight.copy_(weight);
  }
  std::vector<checkpoint::Part> parts() {
    return {{"model", net}, {"sharded", sharded}, {"large", large},
            {"bits", bits}, {"epoch", epoch},     {"half", half}};
  }
  void clear() {
    const torch::NoGradGuard no_grad;
    net->first->weight.zero_();
    for (auto& shard : sharded->parameters()) shard.zero_();
    large.zero_();
    bits.clear();
    epoch = 0;
    half.zero_();
  }
  void expect_same(const Values& other) const {
    expect_equal({net->first->weight, large, half}, {other.weight, other.large, other.half});
    One whole = sharded;
    const FullParameters full(*whole);
    expect_equal(whole->parameters(), {other.weight});
    EXPECT_EQ(bits, other.bits);
    EXPECT_EQ(epoch, other.epoch);
  }
};

TEST(PythonExchange, BothReadWhatTheOtherWrites) {
  const harness::Folder folder;
  const std::string whole = folder.path() + "/whole";
  const std::string slices = folder.path() + "/slices";
  std::filesystem::create_directory(slices);
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    Values values;
    const FullyShardedDataParallel sharded(values.sharded, group);
    checkpoint::save_async(folder.path() + "/run", group, values.parts()).wait();
  });
  const int status = std::system(
      (WEFT_TEST_PYTHON " " WEFT_TEST_SCRIPT " " + folder.path() + "/run/1 " + whole + " " + slices)
          .c_str());
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
    GTEST_SKIP() << "Python's safetensors is not installed";
  ASSERT_EQ(status, 0);
  harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
    for (const std::string& path : {whole, slices}) {
      EXPECT_TRUE(checkpoint::exists(path, group));
      Values values;
      const FullyShardedDataParallel sharded(values.sharded, group);
      values.clear();
      checkpoint::load(path, group, values.parts());
      values.expect_same(Values());
    }
    // The index that PyTorch's writer makes.
    Values values;
    const FullyShardedDataParallel sharded(values.sharded, group);
    values.clear();
    checkpoint::load_safetensors(
        whole, group, *values.sharded,
        {.name_in_file = [](const std::string& name) { return "sharded." + name; },
         .use_all = false});
    One one = values.sharded;
    const FullParameters full(*one);
    expect_equal(one->parameters(), {values.weight});
  });
}

// Returns the exit code of examples/check_checkpoint.
int check(const std::string& checkpoint) {
  const int status =
      std::system((WEFT_TEST_PYTHON " " WEFT_TEST_CHECK " " + checkpoint + " >/dev/null").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Changes the file's byte at that distance from its end.
void change_byte(const std::string& path, int from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  const int byte = file.get();
  file.seekp(-from_end, std::ios::end);
  file.put(static_cast<char>(byte ^ 1));
  ASSERT_TRUE(file.good());
}

TEST(PythonExchange, ExampleFindsDamageWithoutWeft) {
  if (std::system(WEFT_TEST_PYTHON " -c 'import xxhash' 2>/dev/null") != 0)
    GTEST_SKIP() << "Python's xxhash is not installed";
  const harness::Folder folder;
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    Values values;
    const FullyShardedDataParallel sharded(values.sharded, group);
    checkpoint::save_async(folder.path() + "/run", group, values.parts()).wait();
  });
  const std::string saved = folder.path() + "/run/1";
  EXPECT_EQ(check(saved), 0);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(saved)) {
    const std::string path = entry.path();
    const int from_end = path.ends_with("manifest") ? 200 : 1;
    change_byte(path, from_end);
    EXPECT_EQ(check(saved), 1) << path;
    change_byte(path, from_end);  // as it was
    ++files;
  }
  EXPECT_EQ(files, 3);
  EXPECT_EQ(check(saved), 0);
  EXPECT_EQ(check(folder.path()), 1) << "no manifest";
}

}  // namespace
}  // namespace weft::testing
