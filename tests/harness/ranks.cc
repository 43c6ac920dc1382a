// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/base/cuda_variables.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/spawn.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/tests/harness/ranks.h>
#include <weft/tests/harness/stacks.h>

namespace weft::harness {

namespace {

// Aborts the process at its time limit, and prints what hangs and where. It uses a signal, because
// all threads may be stuck.
class Watchdog {
 public:
  explicit Watchdog(const std::string& who) {
    std::snprintf(message(), kBytes, "harness: %s still runs after %d s; it hangs\n", who.c_str(),
                  static_cast<int>(kLimit.count()));
    prepare_stacks();
    std::signal(SIGALRM, [](int) {
      [[maybe_unused]] const auto written =
          ::write(STDERR_FILENO, message(), std::char_traits<char>::length(message()));
      print_stacks();
      std::abort();
    });
    ::alarm(static_cast<unsigned>(kLimit.count()));
  }
  ~Watchdog() { ::alarm(0); }

 private:
  static constexpr std::size_t kBytes = 128;
  static char* message() {
    static char text[kBytes];
    return text;
  }
};

// Runs a rank in its own process; failed expectations become an exception.
void guarded(const std::string& who, const std::function<void()>& body) {
  {
    const Watchdog watchdog(who);
    LogWatch watch;
    body();
  }
  if (testing::Test::HasFailure())
    throw Error(Blame::Remote, who + " has failed expectations (above)");
}

int report_descriptor = -1;  // set in a forked rank

// Set early: tests ask libtorch for GPUs, which starts the CUDA driver, before they make their
// first group.
[[maybe_unused]] const std::string kSetForCuda = set_cuda_variables();

}  // namespace

struct LogWatch::Lines {
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::string> allowed;
  std::string text;
};

namespace {
std::atomic<LogWatch*> watching{nullptr};
}  // namespace

LogWatch& LogWatch::current() { return *watching.load(); }

LogWatch::LogWatch()
    : lines_(std::make_shared<Lines>()),
      capture_([lines = lines_](LogLevel level, std::string_view text) {
        if (level != LogLevel::Error && level != LogLevel::Warn) return;
        std::fprintf(stderr, "log: %.*s\n", static_cast<int>(text.size()), text.data());
        std::lock_guard lock(lines->mutex);
        lines->text += std::string(text) + "\n";
        if (level == LogLevel::Error) lines->errors.emplace_back(text);
      }) {
  watching = this;
}

LogWatch::~LogWatch() {
  watching = nullptr;
  std::lock_guard lock(lines_->mutex);
  for (const std::string& error : lines_->errors) {
    bool expected = false;
    for (const std::string& text : lines_->allowed)
      expected |= error.find(text) != std::string::npos;
    if (!expected) ADD_FAILURE() << "unexpected error in the log: " << error;
  }
}

void LogWatch::allow(const std::string& text) {
  std::lock_guard lock(lines_->mutex);
  lines_->allowed.push_back(text);
}

std::string LogWatch::text() const {
  std::lock_guard lock(lines_->mutex);
  return lines_->text;
}

void run_threads(int ranks, const std::function<void(int)>& body) {
  const Watchdog watchdog("a rank of " + std::to_string(ranks) + " threads");
  LogWatch watch;
  // If several threads are the first to use MKL's tanh, some get results that are right to 16 bits
  // only. libtorch alone shows it too. So this thread uses it first.
  at::linspace(0, 1, 12).tanh_();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_ranks(As as, int ranks, const Body& body, ProcessGroupOptions options) {
  if (!options.device) options.device = c10::Device(c10::kCPU);
  if (as == As::Threads) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    return run_threads(ranks, [&](int rank) {
      ProcessGroupOptions mine = options;
      mine.store = store;
      mine.rank = rank;
      mine.world_size = ranks;
      auto group = init_process_group(mine);
      body(group);
    });
  }
  try {
    spawn(ranks, [&](int rank, int) {
      guarded("rank " + std::to_string(rank), [&] {
        auto group = init_process_group(options);
        body(group);
      });
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

void meet(ProcessGroup& group) {
  group.barrier().wait();
  const auto store = group.store();
  const std::string place =
      "harness/met/" +
      std::to_string(store->add("harness/meetings/" + std::to_string(group.rank()), 1));
  store->set(place + "/" + std::to_string(group.rank()), std::string("here"));
  for (int rank = 0; rank < group.size(); ++rank)
    store->wait({place + "/" + std::to_string(rank)}, kLimit);
  // Rank 0 may host the store, so it must not end while others still use it.
  if (group.rank() != 0)
    return store->set(place + "/through/" + std::to_string(group.rank()), std::string("it is"));
  for (int rank = 1; rank < group.size(); ++rank)
    store->wait({place + "/through/" + std::to_string(rank)}, kLimit);
}

Processes::Processes(int ranks, const std::function<void(int)>& body) {
  const std::string port = std::to_string(launch::free_port());
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw system_error(Blame::Busy, "pipe", errno);
    const pid_t process = ::fork();
    if (process < 0) throw system_error(Blame::Busy, "fork", errno);
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(ends[0]);
      for (const Rank& other : ranks_) ::close(other.from);
      report_descriptor = ends[1];
      for (const auto& [name, value] :
           std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                              {"LOCAL_RANK", std::to_string(rank)},
                                              {"WORLD_SIZE", std::to_string(ranks)},
                                              {"MASTER_ADDR", "127.0.0.1"},
                                              {"MASTER_PORT", port}}) {
        ::setenv(name.c_str(), value.c_str(), 1);
      }
      int code = 0;
      try {
        guarded("rank " + std::to_string(rank), [&] { body(rank); });
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        code = 1;
      }
      std::fflush(nullptr);
      trace::timeline::finish();
      ::_exit(code);
    }
    ::close(ends[1]);
    ranks_.push_back({process, ends[0], "", true});
    children_.add(process);
  }
}

Processes::~Processes() {
  for (const Rank& rank : ranks_) {
    if (rank.running) ::kill(rank.process, SIGKILL);
    ::close(rank.from);
  }
}

void Processes::say(const std::string& word) {
  const std::string line = word + "\n";
  [[maybe_unused]] const auto written = ::write(report_descriptor, line.data(), line.size());
}

std::string Processes::next_word(int rank) {
  Rank& one = ranks_.at(static_cast<std::size_t>(rank));
  for (;;) {
    const auto end = one.said.find('\n');
    if (end != std::string::npos) {
      const std::string word = one.said.substr(0, end);
      one.said.erase(0, end + 1);
      return word;
    }
    char buffer[256];
    const auto count = ::read(one.from, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      throw Error(Blame::PeerLost, "rank " + std::to_string(rank) + " ended and said nothing more");
    one.said.append(buffer, static_cast<std::size_t>(count));
  }
}

void Processes::wait_for(int rank, const std::string& word) {
  while (next_word(rank) != word) {
  }
}

void Processes::signal(int rank, int number) {
  ::kill(ranks_.at(static_cast<std::size_t>(rank)).process, number);
}

void Processes::expect_success(const std::set<int>& but) {
  std::size_t left = ranks_.size() - but.size();
  while (left > 0) {
    const auto ended = children_.wait(std::chrono::hours(1));  // each rank has its own watchdog
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i].process != ended.process) continue;
      ranks_[i].running = false;
      if (but.contains(static_cast<int>(i))) continue;
      --left;
      if (ended.status != 0)
        ADD_FAILURE() << "rank " << i << " ended with " << launch::describe_status(ended.status);
    }
  }
}

void unset_rank_variables() {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
}

bool comes_true(const std::function<bool()>& condition, std::chrono::seconds limit) {
  const auto deadline = Deadline::in(limit);
  while (!deadline.passed()) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return condition();
}

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw no weft::Error: " << error.what();
    return {Blame::Cancelled, error.what()};
  }
  ADD_FAILURE() << "no error was thrown";
  return {Blame::Cancelled, "no error was thrown"};
}

}  // namespace weft::harness
