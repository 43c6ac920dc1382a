// SPDX-License-Identifier: Apache-2.0
// Files that go past the page cache, and the memory that they are written from.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/new_file.h>
#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

thread_local bool takes_nothing = false;

// While it lives, this thread's calls of write() and pwrite() return 0.
struct TakesNothing {
  TakesNothing() { takes_nothing = true; }
  ~TakesNothing() { takes_nothing = false; }
  TakesNothing(const TakesNothing&) = delete;
  TakesNothing& operator=(const TakesNothing&) = delete;
};

}  // namespace
}  // namespace weft::testing

// These replace libc's in this program.
extern "C" ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
  if (weft::testing::takes_nothing) return 0;
  return ::syscall(SYS_pwrite64, file, data, bytes, offset);
}
extern "C" ssize_t write(int file, const void* data, size_t bytes) {
  if (weft::testing::takes_nothing) return 0;
  return ::syscall(SYS_write, file, data, bytes);
}

namespace weft::testing {
namespace {

using checkpoint::KeptBytes;
using checkpoint::NewFile;
using checkpoint::paged_bytes;
using ::testing::HasSubstr;

at::Tensor filled(std::uint64_t bytes, int seed) {
  const at::Tensor memory = paged_bytes(bytes);
  constexpr std::int64_t kPeriod = 251 * 4'099;
  const at::Tensor pattern = (at::arange(kPeriod).remainder(251) + seed).to(at::kByte);
  for (std::int64_t at = 0; at < memory.numel(); at += kPeriod) {
    const std::int64_t part = std::min(kPeriod, memory.numel() - at);
    memory.narrow(0, at, part).copy_(pattern.narrow(0, 0, part));
  }
  return memory;
}

std::string text_of(const at::Tensor& memory) {
  return {static_cast<const char*>(memory.const_data_ptr()), memory.nbytes()};
}

// Appends all, and expects the file to have it.
void expect_written(const std::string& path, const std::vector<std::string_view>& all) {
  NewFile file(path, /*is_large=*/true);
  std::string expected;
  for (const std::string_view part : all) {
    file.append(part.data(), part.size());
    expected += part;
  }
  file.finish();
  ASSERT_EQ(std::filesystem::file_size(path), expected.size());
  std::string found(expected.size(), '\0');
  std::ifstream(path, std::ios::binary)
      .read(found.data(), static_cast<std::streamsize>(found.size()));
  EXPECT_TRUE(found == expected) << path;
}

TEST(NewFileTest, WritesDataOfAnyLength) {
  const harness::Folder folder;
  const std::string front = text_of(filled(2 * NewFile::kBlock, 1));
  const at::Tensor aligned = filled(front.size(), 1);
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, NewFile::kBlock, (std::uint64_t{17} << 20) + 3}) {
    const at::Tensor data = filled(bytes, 2);
    const auto view = [](const at::Tensor& memory) {
      return std::string_view(static_cast<const char*>(memory.const_data_ptr()), memory.nbytes());
    };
    expect_written(folder.path() + "/" + std::to_string(bytes), {view(aligned), view(data)});
  }
}

TEST(NewFileTest, WritesFromAnyAddress) {
  const harness::Folder folder;
  const std::string text = text_of(filled(20'000, 1));
  const std::string_view all = text;
  expect_written(folder.path() + "/odd",
                 {all.substr(1, 10), all.substr(0, 9'000), all.substr(3, 8'192), all});
}

TEST(NewFileTest, RefusalOfDirectIsLoggedAndHelped) {
  const harness::Folder folder;
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("weft", folder.path().c_str(), "ramfs", 0, nullptr) != 0)
    GTEST_SKIP() << "this process cannot mount a file system";
  std::string logged;
  {
    const log::Capture capture([&](LogLevel, std::string_view text) { logged += text; });
    const at::Tensor data = filled(3 << 20, 1);
    for (const std::string name : {"/one", "/two"})
      expect_written(folder.path() + name,
                     {{static_cast<const char*>(data.const_data_ptr()), data.nbytes()}});
  }
  EXPECT_THAT(logged, HasSubstr("the file system of '" + folder.path() +
                                "/one' refuses direct I/O (O_DIRECT: Invalid argument)"));
  EXPECT_EQ(logged.find("/two"), std::string::npos);  // once
  ::umount(folder.path().c_str());
}

TEST(NewFileTest, ExistingFileIsRefused) {
  const harness::Folder folder;
  put(folder.path() + "/old", "x");
  EXPECT_EQ(harness::error_of([&] { const NewFile file(folder.path() + "/old", true); }).blame(),
            Blame::Caller);
  EXPECT_EQ(content_of(folder.path() + "/old"), "x");
}

// No file system is known that takes no bytes and names no reason. The writers must not loop then.
TEST(NewFileTest, DiskThatTakesNothingIsAnError) {
  const harness::Folder folder;
  const at::Tensor data = filled(1 << 20, 1);
  const auto* const bytes = static_cast<const char*>(data.const_data_ptr());
  NewFile file(folder.path() + "/file", true);
  checkpoint::Draft draft(folder.path() + "/draft");
  const TakesNothing disk;
  const Error error = harness::error_of([&] { file.append(bytes, data.nbytes()); });
  EXPECT_EQ(error.blame(), Blame::Busy);
  EXPECT_THAT(error.text(), HasSubstr("/file' cannot be written: Input/output error"));
  const Error of_draft = harness::error_of([&] {
    draft.write(bytes, data.nbytes());
    draft.publish();
  });
  EXPECT_EQ(of_draft.blame(), Blame::Busy);
  EXPECT_THAT(of_draft.text(), HasSubstr("/draft' cannot be written: Input/output error"));
}

TEST(KeptMemory, IsTakenOnceIfItFits) {
  EXPECT_FALSE(KeptBytes::take(1'000).defined());
  auto kept = KeptBytes::make();
  const at::Tensor memory = paged_bytes(1'000);
  kept->keep(memory);
  EXPECT_FALSE(KeptBytes::take(1'001).defined());
  EXPECT_FALSE(KeptBytes::take(500).defined());
  EXPECT_TRUE(KeptBytes::take(950).is_same(memory));
  EXPECT_FALSE(KeptBytes::take(950).defined());
  kept->keep(memory);
  kept.reset();
  EXPECT_FALSE(KeptBytes::take(1'000).defined());
}

}  // namespace
}  // namespace weft::testing
