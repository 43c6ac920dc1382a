// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include <execinfo.h>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/tests/harness/stacks.h>

namespace weft::harness {

namespace {

constexpr int kFrames = 64;
constexpr int kMomentsOf1ms = 200;

std::atomic<bool> printed{false};

int signal_to_print() { return SIGRTMIN + 7; }

void print(std::string_view text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

void print_own(int) {
  const int before = errno;
  void* frames[kFrames];
  ::backtrace_symbols_fd(frames, ::backtrace(frames, kFrames), STDERR_FILENO);
  printed.store(true);
  errno = before;
}

void print_thread(const char* id) {
  print("thread ");
  print(id);
  print("\n");
  const long thread = std::strtol(id, nullptr, 10);
  if (thread == ::syscall(SYS_gettid)) return print_own(0);
  printed.store(false);
  if (::syscall(SYS_tgkill, ::getpid(), thread, signal_to_print()) != 0) return;
  const timespec moment{0, 1'000'000};
  for (int i = 0; i < kMomentsOf1ms && !printed.load(); ++i) ::nanosleep(&moment, nullptr);
}

}  // namespace

void prepare_stacks() {
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads the library that backtrace() needs
  struct sigaction action {};
  action.sa_handler = print_own;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal_to_print(), &action, nullptr);
}

// Does not use opendir(), which allocates memory: a thread that hangs may hold the allocator's
// lock.
void print_stacks() {
  const int folder = ::open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  struct Entry {
    std::uint64_t inode;
    std::int64_t next;
    unsigned short bytes;
    unsigned char type;
    char name[1];
  };
  alignas(Entry) static char entries[4096];
  long bytes = 0;
  while ((bytes = ::syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0) {
    for (long at = 0; at < bytes;) {
      const auto* const entry = reinterpret_cast<const Entry*>(entries + at);
      if (entry->name[0] != '.') print_thread(entry->name);
      at += entry->bytes;
    }
  }
  ::close(folder);
}

}  // namespace weft::harness
