// SPDX-License-Identifier: Apache-2.0
// A corpus that a test can write again: the output of real encoders, so that changes of it reach
// beyond the first checks.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace weft::fuzz {

// Checks that the corpus's files of these names hold these bytes. With WEFT_FUZZ_WRITE in the
// environment it writes the files first.
inline void expect_corpus(const std::map<std::string, std::vector<std::byte>>& files) {
  for (const auto& [name, bytes] : files) {
    const std::string path = std::string(FUZZ_CORPUS) + "/" + name;
    const std::string expected(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (std::getenv("WEFT_FUZZ_WRITE") != nullptr)
      std::ofstream(path, std::ios::binary) << expected;
    std::ifstream file(path, std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), expected) << name;
  }
}

}  // namespace weft::fuzz
