// SPDX-License-Identifier: Apache-2.0
// Drives a target without libFuzzer: with its corpus, and with changed inputs that are the same in
// every run. Tests that the target's own checks hold; one that fails aborts.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <weft/tests/harness/all_settings.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

namespace weft {
namespace {

using Input = std::vector<std::uint8_t>;

std::vector<Input> corpus() {
  std::vector<std::filesystem::path> files;
  for (const auto& file : std::filesystem::directory_iterator(FUZZ_CORPUS))
    files.push_back(file.path());
  std::sort(files.begin(), files.end());
  std::vector<Input> inputs;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

void run(const Input& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

TEST(FUZZ_TARGET, WithstandsItsCorpus) {
  ASSERT_FALSE(corpus().empty());
  for (const Input& input : corpus()) run(input);
}

TEST(FUZZ_TARGET, WithstandsChangesOfItsCorpus) {
  std::mt19937 random(20240229);
  const auto upto = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit)(random);
  };
  const auto inputs = corpus();
  const int rounds = harness::runs_all_settings() ? 20'000 : 4'000;
  for (int round = 0; round < rounds; ++round) {
    Input input = inputs[upto(inputs.size() - 1)];
    for (std::size_t changes = upto(5); changes > 0; --changes) {
      if (input.empty()) input.push_back(0);
      const auto at = static_cast<std::ptrdiff_t>(upto(input.size() - 1));
      switch (upto(4)) {
        case 0: input[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(upto(255)); break;
        case 1:
          input[static_cast<std::size_t>(at)] ^= static_cast<std::uint8_t>(1u << upto(7));
          break;
        case 2: input.erase(input.begin() + at); break;
        case 3:
          input.insert(input.begin() + at, upto(9), static_cast<std::uint8_t>(upto(255)));
          break;
        default: input.resize(static_cast<std::size_t>(at)); break;
      }
    }
    run(input);
  }
}

}  // namespace
}  // namespace weft
