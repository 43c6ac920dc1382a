// SPDX-License-Identifier: Apache-2.0
// The file of a checkpoint is whole, the old one or the new one, even if its writer is killed or
// fails.
#include <csignal>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

// Runs `body` in a process of its own, which exits with the value that `body` returns.
pid_t in_process(const std::function<int()>& body) {
  const pid_t process = ::fork();
  if (process == 0) ::_exit(body());
  return process;
}

int exit_code_of(pid_t process) {
  int status = 0;
  ::waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Returns the blame of the error that `call` throws, or 100.
int blame_of(const std::function<void()>& call) {
  try {
    call();
    return 100;
  } catch (const Error& error) {
    return static_cast<int>(error.blame());
  }
}

TEST(CheckpointFile, ReturnsTheWrittenContent) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  for (const std::string& content :
       {std::string(), std::string("\0\n", 2), std::string(100'000, 'x')}) {
    write_file(file, content);
    EXPECT_EQ(read_file(file), content);
  }
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"a"});
}

TEST(CheckpointFile, AnyDamageIsRefused) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "some content");
  const std::string whole = content_of(file);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    put(file, whole.substr(0, bytes));
    EXPECT_EQ(harness::error_of([&] { read_file(file); }).blame(), Blame::Caller) << bytes;
    for (const int bit : {0, 5}) {
      std::string flipped = whole;
      flipped[bytes] = static_cast<char>(flipped[bytes] ^ (1 << bit));
      put(file, flipped);
      EXPECT_EQ(harness::error_of([&] { read_file(file); }).blame(), Blame::Caller) << bytes;
    }
  }
  put(file, whole + "x");
  EXPECT_EQ(harness::error_of([&] { read_file(file); }).blame(), Blame::Caller);
  put(file, whole.substr(1));
  EXPECT_THAT(harness::error_of([&] { read_file(file); }).what(), HasSubstr("is damaged"));
}

TEST(CheckpointFile, StaysWholeIfItsWriterIsKilled) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  const auto content = [](int i) {
    return std::string(300'000, static_cast<char>('a' + i % 26)) + std::to_string(i);
  };
  write_file(file, content(0));
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    const pid_t writer = in_process([&] {
      for (int i = 0;; ++i) write_file(file, content(i));
      return 0;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ::kill(writer, SIGKILL);
    exit_code_of(writer);
    const std::string found = read_file(file);
    EXPECT_EQ(found, content(std::stoi(found.substr(300'000))));
  }
  write_file(file, "next");  // although killed writers have left files
  EXPECT_EQ(read_file(file), "next");
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"a"});
}

TEST(CheckpointFile, FullDiskKeepsTheOldFile) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "old");
  const pid_t writer = in_process([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return blame_of([&] { write_file(file, std::string(200'000, 'x')); });
  });
  EXPECT_EQ(exit_code_of(writer), static_cast<int>(Blame::Busy));
  EXPECT_EQ(read_file(file), "old");
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"a"});
}

TEST(CheckpointFile, KeepsPermissionsAndSymlinks) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "old");
  ::chmod(file.c_str(), 0640);
  fs::create_directory(folder.path() + "/links");
  fs::create_symlink("../second", folder.path() + "/links/first");
  fs::create_symlink("a", folder.path() + "/second");
  write_file(folder.path() + "/links/first", "new");
  EXPECT_EQ(read_file(file), "new");
  EXPECT_TRUE(fs::is_symlink(folder.path() + "/links/first"));
  EXPECT_TRUE(fs::is_symlink(folder.path() + "/second"));
  EXPECT_EQ(fs::status(file).permissions(), fs::perms(0640));
  fs::create_symlink("b", folder.path() + "/dangling");
  write_file(folder.path() + "/dangling", "there");
  EXPECT_EQ(read_file(folder.path() + "/b"), "there");
}

TEST(CheckpointFile, UnwritablePathIsRefused) {
  const harness::Folder folder;
  fs::create_symlink("loop", folder.path() + "/loop");
  for (const std::string& file :
       {std::string(), folder.path(), folder.path() + "/missing/a", std::string("/proc/a"),
        std::string("/dev/null"), folder.path() + "/loop",
        folder.path() + "/" + std::string(252, 'x')}) {
    const Error error = harness::error_of([&] { write_file(file, "x"); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.what(), HasSubstr("the checkpoint '" + file + "' cannot be written: "));
    if (file.ends_with("missing/a")) {
      EXPECT_THAT(error.what(), HasSubstr("there is no folder '" + folder.path() + "/missing'"));
    }
  }
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"loop"});
}

TEST(CheckpointFile, ReadOnlyFileIsNotReplaced) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "old");
  ::chmod(file.c_str(), 0444);
  ::chmod(folder.path().c_str(), 0777);
  const pid_t writer = in_process([&] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::seteuid(kNobody) != 0) return 101;  // root may write everything
    return blame_of([&] { write_file(file, "new"); });
  });
  EXPECT_EQ(exit_code_of(writer), static_cast<int>(Blame::Caller));
  EXPECT_EQ(read_file(file), "old");
}

TEST(CheckpointFile, HasOneWriterAtATime) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  {
    checkpoint::Draft first(file);
    first.write("one", 3);
    const Error error = harness::error_of([&] { checkpoint::Draft second(file); });
    EXPECT_EQ(error.blame(), Blame::Busy);
    EXPECT_THAT(error.what(), HasSubstr("another process is writing it"));
    first.publish();
  }
  EXPECT_EQ(read_file(file), "one");
  write_file(file, "two");
  EXPECT_EQ(read_file(file), "two");
}

}  // namespace
}  // namespace weft::testing
