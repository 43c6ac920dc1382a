// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/driver.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Driver, MissingLibraryIsUnsupported) {
  const auto driver = Driver::open("libnothing-like-cuda.so.1");
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error().blame(), Blame::Unsupported);
  EXPECT_THAT(driver.error().text(), AllOf(HasSubstr("no libnothing-like-cuda.so.1"),
                                           HasSubstr("cannot open shared object")));
}

TEST(Driver, MissingFunctionIsUnsupported) {
  const auto driver = Driver::open("libc.so.6");
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error().blame(), Blame::Unsupported);
  EXPECT_THAT(driver.error().text(), AllOf(HasSubstr("libc.so.6 has no cu"), HasSubstr("12.4")));
}

TEST(Driver, FindsEveryFunctionByItsName) {
  const std::string stub = WEFT_CUDA_STUB;
  if (stub.empty()) GTEST_SKIP() << "this CUDA toolkit has no stub of libcuda";
  const auto driver = Driver::open(stub.c_str());
  ASSERT_FALSE(driver.ok());
  EXPECT_THAT(driver.error().text(), HasSubstr("cuInit of "))
      << "all functions were found, and the stub refuses to start";
  EXPECT_EQ(driver.error().native_code(), CUDA_ERROR_STUB_LIBRARY);
}

using Check = FakeCuda;

TEST_F(Check, SortsErrorsIntoBlames) {
  const Driver& driver = device->driver();
  EXPECT_NO_THROW(check(driver, CUDA_SUCCESS, "fine"));
  const auto blame = [&](CUresult result) { return error_of(driver, result, "call").blame(); };
  EXPECT_EQ(blame(CUDA_ERROR_OUT_OF_MEMORY), Blame::Busy);
  EXPECT_EQ(blame(CUDA_ERROR_INVALID_VALUE), Blame::Caller);
  EXPECT_EQ(blame(CUDA_ERROR_NOT_SUPPORTED), Blame::Unsupported);
  EXPECT_EQ(blame(CUDA_ERROR_ILLEGAL_ADDRESS), Blame::Device);
  EXPECT_EQ(blame(CUDA_ERROR_LAUNCH_FAILED), Blame::Device);
}

TEST_F(Check, NamesCallErrorAndPlace) {
  const Error error =
      error_from([&] { check(device->driver(), CUDA_ERROR_INVALID_VALUE, "cuSomething"); });
  EXPECT_EQ(error.text(), "cuSomething: CUDA_ERROR_INVALID_VALUE (invalid argument)");
  EXPECT_EQ(error.native_code(), CUDA_ERROR_INVALID_VALUE);
  EXPECT_THAT(error.place().file, HasSubstr("driver_test.cc"));
}

TEST_F(Check, KeepsUnknownErrorCodes) {
  const Error error = error_of(device->driver(), static_cast<CUresult>(1001), "cuSomething");
  EXPECT_EQ(error.text(), "cuSomething: CUDA error 1001");
  EXPECT_EQ(error.blame(), Blame::Device);
}

TEST_F(Check, OnADeviceNamesTheDevice) {
  const Error error = error_from([&] { device->check(CUDA_ERROR_OUT_OF_MEMORY, "cuSomething"); });
  EXPECT_EQ(error.text(), "cuSomething on cuda:0: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_THAT(error.place().file, HasSubstr("driver_test.cc"));
  EXPECT_FALSE(device->is_lost());
}

}  // namespace
}  // namespace weft::cuda
