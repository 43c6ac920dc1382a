// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <csignal>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <weft/engine/launch/output.h>
#include <weft/engine/launch/signals.h>

namespace weft::launch {
namespace {

constexpr int kSmallPipe = 4096;  // bytes

struct Pipe {
  int read = -1;
  int write = -1;
  Pipe() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe(ends), 0);
    read = ends[0];
    write = ends[1];
  }
};

// Forwards a rank's output and reads the result.
class Forwarded {
 public:
  explicit Forwarded(bool prefix) : output_(3, Descriptor(in_.read), out_.write, prefix) {
    ::fcntl(out_.read, F_SETFL, O_NONBLOCK);
    ::fcntl(out_.write, F_SETPIPE_SZ, 1 << 20);
  }
  ~Forwarded() {
    end();
    ::close(out_.write);
    ::close(out_.read);
  }
  Forwarded(const Forwarded&) = delete;
  Forwarded& operator=(const Forwarded&) = delete;

  // Writes `text` as the rank and returns the forwarded output.
  std::string after(const std::string& text) {
    constexpr std::size_t kPiece = 1000;
    for (std::size_t at = 0; at < text.size(); at += kPiece) {
      const std::string piece = text.substr(at, kPiece);
      EXPECT_EQ(::write(in_.write, piece.data(), piece.size()), static_cast<ssize_t>(piece.size()));
      EXPECT_TRUE(output_.forward());
    }
    return take();
  }
  std::string at_the_end() {
    end();
    EXPECT_FALSE(output_.forward());
    return take();
  }

 private:
  void end() {
    if (in_.write >= 0) ::close(in_.write);
    in_.write = -1;
  }
  std::string take() const {
    std::string text;
    char buffer[4096];
    for (ssize_t count = 0; (count = ::read(out_.read, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(count));
    return text;
  }

  Pipe in_;
  const Pipe out_;
  Output output_;
};

TEST(Output, WithoutPrefixPassesUnchanged) {
  Forwarded rank(/*prefix=*/false);
  EXPECT_EQ(rank.after("half"), "half");
  EXPECT_EQ(rank.after("\r 10%\r 20%"), "\r 10%\r 20%");
  EXPECT_EQ(rank.after("\r\n\n"), "\r\n\n");
  EXPECT_EQ(rank.after("unended"), "unended");
  EXPECT_EQ(rank.at_the_end(), "");
}

TEST(Output, PrefixMakesProgressBarsLines) {
  Forwarded rank(/*prefix=*/true);
  EXPECT_EQ(rank.after("10%\r20%\r"), "[rank 3] 10%\n[rank 3] 20%\n");
  EXPECT_EQ(rank.after("\r30%"), "");
  EXPECT_EQ(rank.after("\r"), "[rank 3] 30%\n");
  EXPECT_EQ(rank.after("\n\n"), "[rank 3] \n")
      << "the first newline belongs to the carriage return";
  EXPECT_EQ(rank.after("of another system\r\n"), "[rank 3] of another system\n");
  EXPECT_EQ(rank.after("unended"), "");
  EXPECT_EQ(rank.at_the_end(), "[rank 3] unended\n");
}

TEST(Output, LongLineIsNotHeldBack) {
  Forwarded rank(/*prefix=*/true);
  const std::string half(100'000, 'x');
  std::string text = rank.after(half);
  EXPECT_GT(text.size(), 64'000u);
  text += rank.after(half + "\nnext");
  text += rank.at_the_end();
  EXPECT_EQ(text, "[rank 3] " + half + half + "\n[rank 3] next\n");
}

// Forwards `text` into a small non-blocking pipe and returns what arrives. Some programs leave a
// pipe or terminal non-blocking that they share with programs they start. Reading begins when
// `before` has returned.
std::string through_a_full_pipe(const std::string& text,
                                const std::function<void(int pipe)>& before) {
  const Pipe in, out;
  ::fcntl(out.write, F_SETPIPE_SZ, kSmallPipe);
  ::fcntl(out.write, F_SETFL, O_NONBLOCK);
  std::string read;
  std::thread reader([&] {
    before(out.read);
    char buffer[1000];
    for (ssize_t count = 0; (count = ::read(out.read, buffer, sizeof buffer)) > 0;)
      read.append(buffer, static_cast<std::size_t>(count));
  });
  EXPECT_EQ(::write(in.write, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  ::close(in.write);
  Output output(3, Descriptor(in.read), out.write, /*prefix=*/false);
  while (output.forward()) {
  }
  ::close(out.write);
  reader.join();
  ::close(out.read);
  EXPECT_EQ(output.failure(), 0);
  return read;
}

// True if the thread of this process sleeps or has ended.
bool is_at_rest(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto name_end = text.rfind(')');
  return name_end == std::string::npos || text.compare(name_end, 3, ") S") == 0;
}

TEST(Output, WaitsForANonBlockingDescriptor) {
  const std::string text(50'000, 'x');
  EXPECT_EQ(through_a_full_pipe(text, [](int) {}), text);
}

// SIGUSR1, which asks for dumps, arrives while the reader is slow.
TEST(Output, LosesNothingToAHarmlessSignal) {
  static std::atomic<int> handled;
  handled = 0;
  struct sigaction action {};
  struct sigaction former {};
  action.sa_handler = [](int) { ++handled; };
  action.sa_flags = SA_RESTART;
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &former), 0);
  const pthread_t writer = ::pthread_self();
  const pid_t number = ::gettid();
  const std::string text(50'000, 'x');
  const auto interrupt = [&](int pipe) {  // ctest's timeout limits it
    for (int waiting = 0; waiting < kSmallPipe || !is_at_rest(number);) {
      ::ioctl(pipe, FIONREAD, &waiting);
      std::this_thread::yield();
    }
    ::pthread_kill(writer, SIGUSR1);
    while (handled == 0) std::this_thread::yield();
  };
  EXPECT_EQ(through_a_full_pipe(text, interrupt), text);
  ::sigaction(SIGUSR1, &former, nullptr);
}

// Nobody reads the pipe, and no other signal interrupts a write that blocks.
TEST(Output, StoppedReaderDoesNotHoldUpASignalledEnd) {
  const Pipe in, out;
  ::fcntl(out.write, F_SETPIPE_SZ, kSmallPipe);
  const std::string text(50'000, 'x');
  EXPECT_EQ(::write(in.write, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  ::close(in.write);
  Output output(3, Descriptor(in.read), out.write, /*prefix=*/true);
  received_signal = SIGTERM;
  while (output.forward()) {  // ctest's timeout limits it
  }
  received_signal = 0;
  EXPECT_EQ(output.failure(), 0);
  ::close(out.write);
  ::close(out.read);
}

}  // namespace
}  // namespace weft::launch
