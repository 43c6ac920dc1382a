// SPDX-License-Identifier: Apache-2.0
// Helpers for the tests of checkpoints.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"

namespace weft::testing {

inline std::string content_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void put(const std::string& file, const std::string& content) {
  std::ofstream(file, std::ios::binary) << content;
}

inline std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename());
  return names;
}

inline void write_file(const std::string& file, const std::string& content) {
  checkpoint::Draft draft(file);
  draft.write(content.data(), content.size());
  draft.publish();
}

inline std::string read_file(const std::string& file) {
  checkpoint::Reader reader(file);
  std::string content(reader.bytes(), '\0');
  reader.read(content.data());
  return content;
}

inline std::vector<torch::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const auto& tensor : module.parameters()) values.push_back(tensor.detach().clone());
  for (const auto& tensor : module.buffers()) values.push_back(tensor.detach().clone());
  return values;
}

inline void expect_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
}

// Expects that `call` throws on every rank; returns the text of this rank's error.
inline std::string refused(ProcessGroup& group, Blame blame, const std::function<void()>& call) {
  const Error error = harness::error_of(call);
  EXPECT_EQ(error.blame(), blame) << error.what();
  harness::meet(group);
  return error.text();
}

inline void set_gradients(const std::vector<torch::Tensor>& parameters, int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto parameter = parameters[i];
    parameter.mutable_grad() =
        random(parameter.sizes(), static_cast<std::uint64_t>(100 * step) + i);
  }
}

template <class Optimizer>
void steps(const Mlp& net, Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(net->parameters(), step);
    optimizer.step();
  }
}

}  // namespace weft::testing
