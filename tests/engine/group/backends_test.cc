// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/group/backends.h>

namespace weft::group {
namespace {

using Backends = std::map<c10::DeviceType, std::string>;

TEST(ParseBackends, EmptyMeansWeftAndNccl) {
  EXPECT_EQ(parse_backends(""), (Backends{{c10::kCPU, "weft"}, {c10::kCUDA, "nccl"}}));
  EXPECT_TRUE(is_default_backend(" "));
  EXPECT_FALSE(is_default_backend("gloo"));
}

TEST(ParseBackends, OneNameServesBothDevices) {
  EXPECT_EQ(parse_backends("mpi"), (Backends{{c10::kCPU, "mpi"}, {c10::kCUDA, "mpi"}}));
}

TEST(ParseBackends, TakesOneBackendPerDevice) {
  EXPECT_EQ(parse_backends("cpu:gloo,cuda:nccl"),
            (Backends{{c10::kCPU, "gloo"}, {c10::kCUDA, "nccl"}}));
  EXPECT_EQ(parse_backends(" CUDA : Nccl "), (Backends{{c10::kCUDA, "nccl"}}));
}

TEST(ParseBackends, RefusesMalformedLists) {
  for (const char* text : {"cpu:gloo,", ",cpu:gloo", "cpu:", ":gloo", "cpu:gloo,cpu:tcp",
                           "tpu:gloo", "gloo,nccl", ","}) {
    try {
      parse_backends(text);
      ADD_FAILURE() << "'" << text << "' was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("backend '" + std::string(text) + "'"), std::string::npos)
          << error.text();
    }
  }
}

}  // namespace
}  // namespace weft::group
