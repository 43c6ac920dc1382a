// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include <weft/base/cuda_variables.h>

namespace weft {
namespace {

class CudaVariables : public testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    ::unsetenv("CUDA_MODULE_LOADING");
  }
};

TEST_F(CudaVariables, MissingOnesAreSetAndNamed) {
  EXPECT_EQ(set_cuda_variables(), "CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER");
  EXPECT_STREQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "32");
  EXPECT_STREQ(std::getenv("CUDA_MODULE_LOADING"), "EAGER");
  EXPECT_EQ(set_cuda_variables(), "");
}

TEST_F(CudaVariables, KeepTheUsersValues) {
  ::setenv("CUDA_MODULE_LOADING", "LAZY", 1);
  EXPECT_EQ(set_cuda_variables(), "CUDA_DEVICE_MAX_CONNECTIONS=32");
  EXPECT_STREQ(std::getenv("CUDA_MODULE_LOADING"), "LAZY");
}

}  // namespace
}  // namespace weft
