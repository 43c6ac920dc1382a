// SPDX-License-Identifier: Apache-2.0
// What the library says about GPU memory, for a CUDA-aware MPI and for one that is not.
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/transport/mpi/library.h>

namespace weft::transport::mpi {
namespace {

using testing::HasSubstr;
using testing::Not;

int say_version(char* text, int* bytes) {
  constexpr char kText[] = "Open MPI v4.1.4, package: of a test";
  std::memcpy(text, kText, sizeof kText);
  *bytes = sizeof kText - 1;
  return MPI_SUCCESS;
}

Library library_that_answers(int (*query)()) {
  Library library;
  library.get_library_version = &say_version;
  library.query_cuda_support = query;
  return library;
}

TEST(MpiLibrary, RefusesGpuMemoryThoughCudaAware) {
  const Library aware = library_that_answers([] { return 1; });
  EXPECT_TRUE(aware.is_cuda_aware());
  EXPECT_THAT(aware.why_no_device_memory(),
              HasSubstr("Open MPI v4.1.4 is CUDA-aware, but knows nothing of streams"));
  EXPECT_THAT(aware.why_no_device_memory(), HasSubstr("stage it"));
}

TEST(MpiLibrary, SaysItWasBuiltWithoutCuda) {
  for (int (*query)() : {+[] { return 0; }, static_cast<int (*)()>(nullptr)}) {
    const Library plain = library_that_answers(query);
    EXPECT_FALSE(plain.is_cuda_aware());
    EXPECT_THAT(plain.why_no_device_memory(), HasSubstr("Open MPI v4.1.4 was built without CUDA"));
    EXPECT_THAT(plain.why_no_device_memory(), Not(HasSubstr("is CUDA-aware")));
  }
}

}  // namespace
}  // namespace weft::transport::mpi
