// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <strings.h>
#include <ucontext.h>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/crash.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/stack_trace.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WEFT_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define WEFT_SANITIZED 1
#endif
#endif

namespace weft::crash {

namespace {

constexpr std::array kSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
// The demangler needs much stack for names such as libtorch's; unused pages are never allocated.
constexpr std::size_t kStackBytes = 1 << 20;
// With libtorch loaded it takes 1 s, and longer on an overloaded machine.
constexpr unsigned kSecondsForStack = 30;
constexpr unsigned kSecondsForMore = 10;

std::atomic<bool> reports{false};
std::atomic<bool> installing{false};
std::atomic<AtCrash> more{nullptr};
std::atomic<pid_t> crashed{0};  // the thread that crashed first
std::array<char, 16> rank{};    // from RANK; read early, because a crash may damage the environment

// Does not use config(), which may throw, because this runs before main.
bool variable_is(const char* value) noexcept {
  const char* const text = std::getenv("WEFT_CRASH_TRACE");
  return text != nullptr && ::strcasecmp(text, value) == 0;
}

std::string_view name_of(int number) {
  switch (number) {
    case SIGSEGV: return "SIGSEGV, invalid access to memory";
    case SIGBUS: return "SIGBUS, access to memory that its file or device does not back";
    case SIGFPE: return "SIGFPE, invalid arithmetic";
    case SIGILL: return "SIGILL, illegal instruction";
    case SIGABRT: return "SIGABRT, abort() or a failed check";
    default: return "a signal";
  }
}

struct Registers {
  std::uintptr_t instruction = 0;
  std::uintptr_t stack = 0;
  std::uintptr_t link = 0;  // the return address, on processors that keep it in a register
};

Registers registers_of(const void* context) {
  const mcontext_t& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return {static_cast<std::uintptr_t>(machine.gregs[REG_RIP]),
          static_cast<std::uintptr_t>(machine.gregs[REG_RSP]), 0};
#elif defined(__aarch64__)
  return {machine.pc, machine.sp, machine.regs[30]};
#else
#error "weft::crash knows the registers of x86-64 and aarch64"
#endif
}

void write_cause(Text& text, int number, const siginfo_t& about, const Registers& at) {
  text << "weft: " << (rank[0] != '\0' ? "rank " : "process ") << rank.data();
  if (rank[0] != '\0') text << ", process ";
  std::array<char, 17> thread{};
  ::prctl(PR_GET_NAME, thread.data());
  text << static_cast<std::int64_t>(::getpid()) << ", crashed in thread '" << thread.data()
       << "': " << name_of(number);
  if (about.si_code <= 0) {
    if (about.si_pid != ::getpid())
      text << ", sent by process " << static_cast<std::int64_t>(about.si_pid);
  } else if (number == SIGSEGV || number == SIGBUS) {
    constexpr std::uintptr_t kNear = 64 << 10;
    const auto address = reinterpret_cast<std::uintptr_t>(about.si_addr);
    text << ", at address ";
    text.hex(address);
    const bool is_near = address + kNear > at.stack && address < at.stack + kNear;
    if (number == SIGSEGV && is_near) text << ": the thread's stack has overflowed";
  }
  text << "\n";
}

// Makes a process with this one's memory and none of its other threads. It runs no fork() handlers
// of the program, because they take locks that this thread may hold; and none of the C library's
// bookkeeping, so a lock that this thread holds is still its own in the copy. The program gets no
// SIGCHLD for the copy, and none of its wait() calls finds it.
pid_t copy_process() {
  return static_cast<pid_t>(::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
}

void set_to_default(int number) {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(number, &action, nullptr);
}

// Runs `task` in a copy of this process. True if it returned true within the time limit.
template <class Task>
bool in_copy(unsigned seconds, const Task& task) {
  const pid_t copy = copy_process();
  if (copy < 0) return false;
  if (copy == 0) {
    ForkMutex::switch_all_off();
    ::prctl(PR_SET_DUMPABLE, 0);  // a crash of the copy leaves no core dump
    for (const int number : kSignals) set_to_default(number);
    set_to_default(SIGALRM);
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::alarm(seconds);
    ::_exit(task() ? 0 : 1);
  }
  int status = 0;
  while (::waitpid(copy, &status, __WALL) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool write_frames(const Registers& at, Names names) {
  Stack stack;
  if (!stack.begin_at(at.instruction)) {
    stack = Stack(at.instruction,
                  at.link != 0 ? at.link : *reinterpret_cast<const std::uintptr_t*>(at.stack));
  }
  Text text(STDERR_FILENO);
  write_stack(text, stack, names);
  return true;
}

void report(int number, const siginfo_t& about, const void* context) {
  const Registers at = registers_of(context);
  {
    Text text(STDERR_FILENO);
    write_cause(text, number, about, at);
  }
  if (!in_copy(kSecondsForStack, [&] { return write_frames(at, Names::Functions); })) {
    Text(STDERR_FILENO) << "weft: reading the symbols failed; the stack without them:\n";
    if (!in_copy(kSecondsForStack, [&] { return write_frames(at, Names::Modules); })) {
      Text(STDERR_FILENO)
          << "weft: the stack is damaged, or the process cannot be copied (ulimit -u, pids.max)\n";
    }
  }
  const AtCrash function = more.load();
  if (function != nullptr &&
      !in_copy(kSecondsForMore, [&] { return function(name_of(number).data()); })) {
    Text(STDERR_FILENO) << "weft: the flight recorder was not written\n";
  }
}

void on_crash(int number, siginfo_t* about, void* context) {
  const int before = errno;
  const auto self = static_cast<pid_t>(::syscall(SYS_gettid));
  pid_t nobody = 0;
  if (crashed.compare_exchange_strong(nobody, self)) {
    report(number, *about, context);
  } else if (nobody != self) {
    for (;;) ::pause();  // another thread reports and ends the process
  }
  for (const int any : kSignals) set_to_default(any);
  // A signal that a process has sent is sent again and arrives when this handler returns; a fault
  // occurs again when it returns.
  if (about->si_code <= 0) ::syscall(SYS_tgkill, ::getpid(), self, number);
  errno = before;
}

// Frees the handler's stack when the thread ends.
struct HandlerStack {
  void* memory = nullptr;
  ~HandlerStack() {
    if (memory == nullptr) return;
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    ::sigaltstack(&none, nullptr);
    ::munmap(memory, kStackBytes);
  }
};
thread_local HandlerStack handler_stack;

// Runs before main, because a program may crash before it joins anything.
const bool kAtStart = [] {
  const bool is_wanted = variable_is("on");
  if (is_wanted) report_crashes();
  return is_wanted;
}();

}  // namespace

void prepare_thread() noexcept {
  if (!reports.load(std::memory_order_acquire) || handler_stack.memory != nullptr) return;
  stack_t present{};
  if (::sigaltstack(nullptr, &present) != 0 || (present.ss_flags & SS_DISABLE) == 0)
    return;  // the program has set its own
  void* const memory = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) return;
  stack_t wanted{};
  wanted.ss_sp = memory;
  wanted.ss_size = kStackBytes;
  if (::sigaltstack(&wanted, nullptr) == 0) {
    handler_stack.memory = memory;
  } else {
    ::munmap(memory, kStackBytes);
  }
}

void report_crashes() noexcept {
#ifndef WEFT_SANITIZED
  if (!installing.exchange(true) && !variable_is("off")) {
    if (const char* const number = std::getenv("RANK"))
      std::strncpy(rank.data(), number, rank.size() - 1);
    Stack warm_up;  // the first unwind loads what the unwinder needs
    struct sigaction action {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    // Keeps the signal that ends the other ranks from cutting the report short.
    ::sigfillset(&action.sa_mask);
    for (const int number : kSignals) {
      struct sigaction present {};
      if (::sigaction(number, nullptr, &present) != 0) continue;
      const bool is_free = (present.sa_flags & SA_SIGINFO) == 0 && present.sa_handler == SIG_DFL;
      if (is_free) ::sigaction(number, &action, nullptr);
    }
    reports.store(true, std::memory_order_release);
  }
  prepare_thread();
#endif
}

void at_crash(AtCrash function) noexcept { more.store(function); }

}  // namespace weft::crash
