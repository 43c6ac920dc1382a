// SPDX-License-Identifier: Apache-2.0
// Owners of a job's values that do what they were told after the caller has given up.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/checkpoint.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/open_folder.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/rpc.h>
#include <weft/tests/engine/checkpoint/checkpoints.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/folder.h>

namespace late_owners {

// Keeps functions of the workers, which are threads of this process, from returning.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return is_open_; });
  }
  void wait_until_reached() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }
  void open() {
    const std::scoped_lock lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void reset() {
    const std::scoped_lock lock(mutex_);
    is_open_ = false;
    waiting_ = 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  int waiting_ = 0;
};

Gate first_gate, second_gate;
std::atomic<weft::rpc::Agent*> first{nullptr};  // the first owner, worker 1

at::Tensor made_of(double value) { return torch::full({4}, value); }
void overwrite(at::Tensor& tensor, double value) { tensor.fill_(value); }
double first_element(at::Tensor& tensor) { return tensor[0].item<double>(); }
void hold_first() { first_gate.pass(); }
void hold_second() { second_gate.pass(); }

}  // namespace late_owners

namespace weft::testing {
namespace {

using namespace late_owners;
using harness::error_of;
using ::testing::HasSubstr;

// Worker 0 saves and loads a value of worker 1 and one of worker 2, each of which has one thread.
class LateOwners : public ::testing::Test {
 protected:
  // Calls `begin`, which asks both owners to stage their values, in a thread. Worker 1 does, and is
  // busy when worker 0 tells it what comes next. Worker 2 stages so much later.
  template <class Begin>
  std::future<void> hold_after_staging(rpc::Agent& agent, const Begin& begin,
                                       std::chrono::milliseconds later = {}) {
    first_gate.reset();
    second_gate.reset();
    const auto second =
        agent.async<&hold_second>(rpc::Destination(2).timeout(std::chrono::minutes(1)));
    second_gate.wait_until_reached();
    const auto served = first.load()->debug_info().calls_served;
    auto begun = std::async(std::launch::async, begin);
    // The part's reference and the order to stage have come: they run before what comes next.
    EXPECT_TRUE(
        harness::comes_true([&] { return first.load()->debug_info().calls_served >= served + 2; }));
    blocked_ = agent.async<&hold_first>(rpc::Destination(1).timeout(std::chrono::minutes(1)));
    first_gate.wait_until_reached();
    std::this_thread::sleep_for(later);
    second_gate.open();
    second.get();
    return begun;
  }
  void release_first() {
    first_gate.open();
    blocked_.get();
  }
  void run(const std::function<void(rpc::Agent&, RRef<at::Tensor>, RRef<at::Tensor>)>& body) {
    harness::run_workers({harness::As::Threads, "inproc", 3},
                         [&](rpc::Agent& agent) {
                           if (agent.self().rank == 1) first = &agent;
                           if (agent.self().rank != 0) return;
                           auto a = agent.remote<&made_of>(1, 1.0),
                                b = agent.remote<&made_of>(2, 2.0);
                           a.to_here();
                           b.to_here();
                           ASSERT_TRUE(harness::comes_true([] { return first.load() != nullptr; }));
                           agent.set_timeout(kLimit);
                           body(agent, a, b);
                           agent.set_timeout(std::chrono::minutes(1));
                           first = nullptr;
                         },
                         {.worker_threads = 1});
  }

  static constexpr std::chrono::milliseconds kLimit{1000};
  const harness::Folder folder_;
  const std::string path_ = folder_.path() + "/run";
  Future<void> blocked_;
};

TEST_F(LateOwners, WriteIntoNoLaterCheckpoint) {
  run([&](rpc::Agent& agent, const RRef<at::Tensor>& a, const RRef<at::Tensor>& b) {
    checkpoint::Saving saving;
    hold_after_staging(agent, [&] {
      saving = checkpoint::save_async(path_, agent, {{"a", a}, {"b", b}});
    }).get();
    const Error error = error_of([&] { saving.wait(); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("worker1"));
    EXPECT_EQ(files_in(path_), std::set<std::string>{});
    checkpoint::save_async(path_, agent, {{"b", b}}).wait();
    EXPECT_EQ(files_in(path_), std::set<std::string>{"2"});
    release_first();
    a.sync<&overwrite>(3.0);  // runs behind the late write
    EXPECT_EQ(files_in(path_), std::set<std::string>{"2"});
    EXPECT_EQ(files_in(path_ + "/2"), (std::set<std::string>{"manifest", "rank00002.safetensors"}));
    checkpoint::save_async(path_, agent, {{"a", a}, {"b", b}}).wait();
    EXPECT_EQ(files_in(path_), std::set<std::string>{"3"});
  });
}

// Worker 1 is told to change its value when twice the limit is over since it has staged it: for all
// that it knows, its caller waits no longer.
TEST_F(LateOwners, LoadNothingAfterTwiceTheLimit) {
  run([&](rpc::Agent& agent, const RRef<at::Tensor>& a, const RRef<at::Tensor>& b) {
    const std::vector<checkpoint::JobPart> parts = {{"a", a}, {"b", b}};
    checkpoint::save_async(path_, agent, parts).wait();
    b.sync<&overwrite>(5.0);
    std::optional<Error> failure;
    auto loading = hold_after_staging(
        agent, [&] { failure = error_of([&] { checkpoint::load(path_, agent, parts); }); },
        kLimit / 2);
    std::this_thread::sleep_for(kLimit * 3 / 2 + kLimit / 4);  // the order itself is not too old
    a.sync<rpc::inline_<&overwrite>>(7.0);  // before the late order, for which there is no thread
    release_first();
    loading.get();
    EXPECT_EQ(failure->blame(), Blame::Timeout) << failure->what();
    EXPECT_THAT(failure->text(), HasSubstr("worker1"));
    EXPECT_EQ(a.sync<&first_element>(), 7);
    EXPECT_EQ(b.to_here()[0].item<float>(), 2);
    checkpoint::load(path_, agent, parts);
    EXPECT_EQ(a.to_here()[0].item<float>(), 1);
  });
}

// As if another worker saved next, which does not know the number of the save that failed.
TEST(RemovedFolder, TakesNoFileAndNeitherDoesItsSuccessor) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/1";
  std::filesystem::create_directory(path);
  const checkpoint::OpenFolder late(path);
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  const Error error = error_of([&] { checkpoint::write_slices(late, "file", {}, nullptr, 0); });
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("its folder was removed"));
  EXPECT_EQ(files_in(path), std::set<std::string>{});
}

}  // namespace
}  // namespace weft::testing
