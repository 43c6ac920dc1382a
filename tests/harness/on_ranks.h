// SPDX-License-Identifier: Apache-2.0
// For tests that run over several backends, with ranks as threads and as processes.
//
//   class Meshes : public harness::OnRanks {};
//   INSTANTIATE_TEST_SUITE_P(, Meshes, testing::Values(Setting{As::Threads, "tcp"}),
//                            harness::name_of_setting);
//   TEST_P(Meshes, …) { on_ranks(4, [](ProcessGroup& group) { … }); }
#pragma once

#include <string>

#include <gtest/gtest.h>

#include <weft/tests/harness/ranks.h>

namespace weft::harness {

struct Setting {
  As as = As::Threads;
  const char* backend = "";
};

// "tcpThreads"
inline std::string name_of_setting(const testing::TestParamInfo<Setting>& info) {
  return info.param.backend + name(info.param.as);
}

class OnRanks : public testing::TestWithParam<Setting> {
 protected:
  static void on_ranks(int ranks, const Body& body) {
    run_ranks(GetParam().as, ranks, body, {.backend = GetParam().backend});
  }
};

}  // namespace weft::harness
