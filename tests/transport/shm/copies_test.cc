// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/tests/harness/folder.h>
#include <weft/transport/shm/copies.h>

namespace weft::transport::shm {
namespace {

using Time = CopyTimes::Time;

constexpr CopyTimes kTimes{Time(1000), Time(2000), Time(300'000), Time(400)};

struct Measuring {
  int count = 0;
  Measure measure = [this]() -> std::optional<CopyTimes> {
    ++count;
    return kTimes;
  };
};

std::string text_in(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Copies, OneIsChosenUnlessItIsSlower) {
  const OneCopy first = choose({Time(1040), Time(1000), Time(1060), Time(1000)});
  EXPECT_TRUE(first.both_ways);
  EXPECT_FALSE(first.one_way);
  const OneCopy second = choose({Time(1200), Time(1000), Time(500), Time(1000)});
  EXPECT_FALSE(second.both_ways);
  EXPECT_TRUE(second.one_way);
}

TEST(Copies, AreMeasuredOnceAMachine) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/copies";
  Measuring measuring;
  EXPECT_EQ(read_copy_times(path, "here"), std::nullopt);
  EXPECT_EQ(find_copy_times(path, "here", measuring.measure), kTimes);
  EXPECT_EQ(find_copy_times(path, "here", measuring.measure), kTimes);
  EXPECT_EQ(read_copy_times(path, "here"), kTimes);
  EXPECT_EQ(measuring.count, 1);
  // The machine has been started again, or the file comes from another one.
  EXPECT_EQ(read_copy_times(path, "there"), std::nullopt);
  EXPECT_EQ(find_copy_times(path, "there", measuring.measure), kTimes);
  EXPECT_EQ(measuring.count, 2);
}

TEST(Copies, DamagedFilesAreMeasuredAgain) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/copies";
  Measuring measuring;
  find_copy_times(path, "here", measuring.measure);
  const std::string whole = text_in(path);
  std::vector<std::string> texts{"",
                                 "\n",
                                 std::string(5000, 'x'),
                                 std::string(600, '\0'),
                                 "weft-copies-2 here 1 2 3 4 end\n",
                                 "weft-copies-1 here 1 2 0 4 end\n",
                                 "weft-copies-1 here 1 2 -3 4 end\n",
                                 "weft-copies-1 here 1 2 x 4 end\n"};
  for (std::size_t bytes = 0; bytes + 1 < whole.size(); bytes += 3)
    texts.push_back(whole.substr(0, bytes));
  for (const std::string& text : texts) {
    std::ofstream(path) << text;
    EXPECT_EQ(read_copy_times(path, "here"), std::nullopt) << text;
    measuring.count = 0;
    EXPECT_EQ(find_copy_times(path, "here", measuring.measure), kTimes);
    EXPECT_EQ(measuring.count, 1) << text;
    EXPECT_EQ(text_in(path), whole);
  }
}

TEST(Copies, NothingIsKnownWhileAnotherProcessMeasures) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/copies";
  Measuring measuring;
  {
    const Descriptor other(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
    EXPECT_EQ(find_copy_times(path, "here", measuring.measure), std::nullopt);
    EXPECT_EQ(measuring.count, 0);
  }
  EXPECT_EQ(find_copy_times(path, "here", measuring.measure), kTimes);
}

TEST(Copies, UntrustedFilesAreNotUsed) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/copies";
  Measuring measuring;
  find_copy_times(path, "here", measuring.measure);
  const std::string before = text_in(path);
  ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(read_copy_times(path, "here"), std::nullopt);
  EXPECT_EQ(find_copy_times(path, "there", measuring.measure), kTimes);
  EXPECT_EQ(text_in(path), before);
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(read_copy_times(path, "here"), kTimes);
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
    EXPECT_EQ(read_copy_times(path, "here"), std::nullopt);
  }
  const std::string link = folder.path() + "/link";
  std::filesystem::create_symlink(path, link);
  EXPECT_EQ(read_copy_times(link, "here"), std::nullopt);
  EXPECT_EQ(find_copy_times(folder.path(), "here", measuring.measure), kTimes);  // a folder
}

TEST(Copies, FailedMeasurementWritesNothing) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/copies";
  EXPECT_EQ(find_copy_times(path, "here", [] { return std::optional<CopyTimes>(); }), std::nullopt);
  EXPECT_EQ(text_in(path), "");
}

TEST(Copies, MeasuringEndsWithTimesOrNothing) {
  const auto times = measure_copies();
  if (!times) GTEST_SKIP() << "one processor, a busy machine, or process_vm_readv is not allowed";
  EXPECT_GT(times->one_both_ways.count(), 0);
  EXPECT_GT(times->two_both_ways.count(), 0);
  EXPECT_GT(times->one_one_way.count(), 0);
  EXPECT_GT(times->two_one_way.count(), 0);
  RecordProperty("both_ways", std::to_string(times->one_both_ways.count()) + " and " +
                                  std::to_string(times->two_both_ways.count()) + " ns");
}

}  // namespace
}  // namespace weft::transport::shm
