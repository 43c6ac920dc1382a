// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/tests/harness/again.h>
#include <weft/tests/harness/start_again.h>

namespace weft::harness {

namespace {

constexpr const char* kRank = "WEFT_TEST_RANK_AGAIN";
constexpr const char* kFolder = "WEFT_TEST_FOLDER_AGAIN";

std::string name_of(const testing::TestInfo& test) {
  return std::string(test.test_suite_name()) + "." + test.name();
}

// The tests that are to run and whose names end with `end`, from the current one on.
std::vector<std::string> tests_from_here(const std::string& end) {
  const auto& all = *testing::UnitTest::GetInstance();
  const std::string here = name_of(*all.current_test_info());
  std::vector<std::string> names;
  for (int suite = 0; suite < all.total_test_suite_count(); ++suite) {
    const auto& tests = *all.GetTestSuite(suite);
    for (int i = 0; i < tests.total_test_count(); ++i) {
      const auto& test = *tests.GetTestInfo(i);
      const std::string name = name_of(test);
      if (test.should_run() && name.size() >= end.size() &&
          name.substr(name.size() - end.size()) == end)
        names.push_back(name);
    }
  }
  names.erase(names.begin(), std::find(names.begin(), names.end(), here));
  return names;
}

std::filesystem::path folder_of(const std::filesystem::path& all, std::string test) {
  std::replace(test.begin(), test.end(), '/', '.');
  return all / test;
}

std::filesystem::path report_of(const std::filesystem::path& folder, int rank) {
  return folder / ("ended.rank" + std::to_string(rank));
}

std::filesystem::path begin_of(const std::filesystem::path& folder) { return folder / "begin"; }

std::string log_of(const std::string& folder, int rank) {
  return folder + "/rank" + std::to_string(rank) + ".log";
}

// A rank's result of a test, written to a file.
class Report {
 public:
  Report(const std::filesystem::path& folder, int rank) : path_(report_of(folder, rank)) {}
  ~Report() {
    const bool failed = testing::Test::HasFailure() || std::uncaught_exceptions() > 0;
    auto draft = path_;
    draft += ".draft";
    std::ofstream(draft) << (failed ? "failed" : "passed");
    std::filesystem::rename(draft, path_);  // the file appears complete
  }
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

 private:
  std::filesystem::path path_;
};

}  // namespace

Again::Again(int ranks, std::string tests, Options options)
    : ranks_(ranks), tests_(std::move(tests)), options_(std::move(options)) {}

bool Again::is_rank() { return std::getenv(kRank) != nullptr; }

void Again::run(const std::function<void(int, const std::string&)>& body) {
  if (is_rank()) return be(std::atoi(std::getenv(kRank)), body);
  if (children_ == nullptr) start();
  wait_for(name_of(*testing::UnitTest::GetInstance()->current_test_info()));
}

void Again::be(int rank, const std::function<void(int, const std::string&)>& body) const {
  static const pid_t parent = ::getppid();
  const auto folder = folder_of(std::getenv(kFolder),
                                name_of(*testing::UnitTest::GetInstance()->current_test_info()));
  while (!std::filesystem::exists(begin_of(folder))) {
    if (::getppid() != parent)
      throw Error(Blame::PeerLost, "the process that started this rank has ended");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Report report(folder, rank);
  try {
    body(rank, folder);
  } catch (const std::exception& error) {  // logged before the report appears
    ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
  }
}

void Again::start() {
  std::string filter;
  for (const std::string& test : tests_from_here(tests_))
    filter += (filter.empty() ? "" : ":") + test;
  folder_ = std::make_unique<Folder>();
  children_ = std::make_unique<launch::Children>();
  processes_.clear();
  ends_.assign(static_cast<std::size_t>(ranks_), std::nullopt);
  for (int rank = 0; rank < ranks_; ++rank) {
    auto variables = options_.variables(rank);
    variables.push_back(kRank + ("=" + std::to_string(rank)));
    variables.push_back(kFolder + ("=" + folder_->path()));
    processes_.push_back(start_again(log_of(folder_->path(), rank), variables, filter));
    children_->add(processes_.back());
  }
}

void Again::wait_for(const std::string& test) {
  const auto folder = folder_of(folder_->path(), test);
  std::filesystem::create_directories(folder);
  const std::ofstream begin(begin_of(folder));  // only the file's existence matters
  const Deadline deadline = Deadline::in(options_.limit);
  const bool is_last = tests_from_here(tests_).size() == 1;
  for (;;) {
    const auto ended = children_->running().empty() ? launch::Children::Ended()
                                                    : children_->wait(std::chrono::milliseconds(5));
    int left = 0;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank] == ended.process) ends_[rank] = ended.status;
      const bool has_report = std::filesystem::exists(report_of(folder, static_cast<int>(rank)));
      if (has_report && text_of_file(report_of(folder, static_cast<int>(rank))) != "passed")
        return fail("a rank failed");
      if (ends_[rank] && (!has_report || (is_last && *ends_[rank] != 0))) {
        return fail("rank " + std::to_string(rank) + " ended with " +
                    launch::describe_status(*ends_[rank]));
      }
      if (is_last ? !ends_[rank].has_value() : !has_report) ++left;
    }
    if (left == 0) break;
    if (deadline.passed()) return fail("the ranks did not end within " + describe(options_.limit));
  }
  if (is_last) children_.reset();
}

// Fails the current test and ends the ranks; the next test starts new ones.
void Again::fail(const std::string& why) {
  children_->end_all(std::chrono::seconds(1));
  std::string text = why;
  for (int rank = 0; rank < ranks_; ++rank) {
    text += "\nrank " + std::to_string(rank) + ":\n" + text_of_file(log_of(folder_->path(), rank));
  }
  ADD_FAILURE() << text;
  children_.reset();
}

void run_again(int ranks, const std::function<void(int, const std::string&)>& body) {
  Again(ranks, name_of(*testing::UnitTest::GetInstance()->current_test_info())).run(body);
}

}  // namespace weft::harness
