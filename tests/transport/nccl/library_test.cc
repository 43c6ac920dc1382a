#include <gtest/gtest.h>

#include <weft/transport/nccl/library.h>

namespace weft::transport::nccl {

TEST(NcclLibrary, SaysForEachPlaceWhyItHasNoUsableLibrary) {
  const auto opened = Library::open({"/nowhere/libnccl.so.2", "libc.so.6"});
  ASSERT_FALSE(opened.ok());
  const std::string text = opened.error().what();
  EXPECT_EQ(opened.error().blame(), Blame::Unsupported);
  EXPECT_NE(text.find("/nowhere/libnccl.so.2: cannot open shared object file"), std::string::npos) << text;
  EXPECT_NE(text.find("libc.so.6: it has no ncclGetVersion"), std::string::npos) << text;
  EXPECT_NE(text.find("nvidia-nccl-cu13"), std::string::npos) << text;
}

TEST(NcclLibrary, HasEveryFunctionOfTheTableInTheInstalledVersion) {
  const auto opened = Library::open();
  if (!opened.ok()) GTEST_SKIP() << opened.error().text();
  EXPECT_TRUE(opened.value()->version().starts_with("2.")) << opened.value()->version();
  EXPECT_FALSE(opened.value()->too_old());
}

TEST(NcclLibrary, RefusesAnOldVersionByName) {
  Library library;
  library.get_version = [](int* version) {
    *version = NCCL_VERSION(2, 18, 3);
    return ncclSuccess;
  };
  const auto old = library.too_old();
  ASSERT_TRUE(old);
  EXPECT_EQ(old->blame(), Blame::Unsupported);
  EXPECT_NE(old->text().find("2.18.3"), std::string::npos) << old->text();
}

}  // namespace weft::transport::nccl
