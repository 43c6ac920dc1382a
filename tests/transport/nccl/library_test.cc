// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/transport/nccl/library.h>

namespace weft::transport::nccl {

using testing::HasSubstr;
using testing::Not;

// A library that reports the version of this code.
template <int kCode>
Library library_of_version() {
  Library library;
  library.get_version = [](int* version) {
    *version = kCode;
    return ncclSuccess;
  };
  return library;
}

TEST(NcclLibrary, SaysWhyEachPlaceIsUnusable) {
  const auto opened = Library::open({"/nowhere/libnccl.so.2", "libc.so.6"});
  ASSERT_FALSE(opened.ok());
  const std::string text = opened.error().what();
  EXPECT_EQ(opened.error().blame(), Blame::Unsupported);
  EXPECT_THAT(text, HasSubstr("/nowhere/libnccl.so.2: cannot open shared object file"));
  EXPECT_THAT(text, HasSubstr("libc.so.6: it has no ncclGetVersion, which came with NCCL 2.3"));
  EXPECT_THAT(text, HasSubstr("install NCCL 2.26 or newer: the wheel nvidia-nccl-cu13 has one"));
}

TEST(NcclLibrary, InstalledVersionHasEveryFunction) {
  const auto opened = Library::open();
  if (!opened.ok()) GTEST_SKIP() << opened.error().text();
  EXPECT_TRUE(opened.value()->version().starts_with("2.")) << opened.value()->version();
  EXPECT_FALSE(opened.value()->too_old());
}

TEST(NcclLibrary, RefusesAnOldVersionByName) {
  const auto old = library_of_version<NCCL_VERSION(2, 18, 3)>().too_old();
  ASSERT_TRUE(old);
  EXPECT_EQ(old->blame(), Blame::Unsupported);
  EXPECT_EQ(old->text(), "NCCL 2.18.3 is too old; Weft needs 2.26 or newer");
  EXPECT_FALSE(library_of_version<NCCL_VERSION(2, 26, 2)>().too_old());
}

TEST(NcclLibrary, ReadsTheShorterVersionCodeBefore29) {
  EXPECT_EQ(library_of_version<NCCL_VERSION(2, 8, 4)>().version(), "2.8.4");
  EXPECT_EQ(library_of_version<NCCL_VERSION(2, 9, 6)>().version(), "2.9.6");
}

TEST(NcclLibrary, OldLibraryIsRefusedByItsVersion) {
  const auto opened = Library::open({WEFT_TEST_OLD_NCCL});
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().blame(), Blame::Unsupported);
  EXPECT_THAT(opened.error().text(),
              HasSubstr(": NCCL 2.13.4 is too old; Weft needs 2.26 or newer; install NCCL"));
  EXPECT_THAT(opened.error().text(), Not(HasSubstr("has no")));
}

TEST(NcclLibrary, MissingRequiredFunctionIsNamed) {
  const auto opened = Library::open({WEFT_TEST_NCCL_WITH_FEW});
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().blame(), Blame::Unsupported);
  EXPECT_THAT(
      opened.error().text(),
      HasSubstr(
          ": NCCL 2.28.9 has no ncclCommInitRankConfig, which came with NCCL 2.14; install NCCL"));
}

TEST(NcclLibrary, MissingFunctionIsNamedWithRelease) {
  Library library = library_of_version<NCCL_VERSION(2, 28, 9)>();
  const auto missing = library.lacks(&Library::send);
  ASSERT_TRUE(missing);
  EXPECT_EQ(missing->blame(), Blame::Unsupported);
  EXPECT_EQ(missing->text(), "NCCL 2.28.9 has no ncclSend, which came with NCCL 2.7");
  // These two functions have the same type in the table.
  EXPECT_THAT(library.lacks(&Library::comm_finalize)->text(),
              HasSubstr("ncclCommFinalize, which came with NCCL 2.14"));
  EXPECT_THAT(library.lacks(&Library::comm_abort)->text(),
              HasSubstr("ncclCommAbort, which came with NCCL 2.4"));
  EXPECT_FALSE(library.lacks(&Library::get_version));
}

}  // namespace weft::transport::nccl
