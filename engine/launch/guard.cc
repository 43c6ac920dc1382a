// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/engine/launch/guard.h>
#include <weft/engine/launch/process.h>

namespace weft::launch {

namespace {

sigset_t guarded_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGCHLD})
    ::sigaddset(&signals, number);
  return signals;
}

int exit_code_of(int status) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::fprintf(stderr,
               "weft-run: the process that watched the ranks was killed: %s; the ranks are ended\n",
               describe_status(status).c_str());
  return 128 + WTERMSIG(status);
}

}  // namespace

int run_guarded(const std::function<int()>& job) {
  // Some parents leave SIGCHLD ignored; the kernel would then reap the child.
  std::signal(SIGCHLD, SIG_DFL);
  const sigset_t signals = guarded_signals();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  const pid_t self = ::getpid();
  // Becomes a subreaper before the fork: the child may start ranks and be killed before this
  // process runs again.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t child = ::fork();
  if (child < 0) {
    std::fprintf(stderr,
                 "weft-run: cannot start a process (a job needs one more than it has ranks; see "
                 "ulimit -u, pids.max): %s\n",
                 std::strerror(errno));
    return 1;
  }
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    if (::getppid() != self) ::_exit(128 + SIGTERM);
    return job();
  }
  // When the ranks' parent dies, a signal (PR_SET_PDEATHSIG) ends them; this process adopts the
  // processes that they have started.
  Children children(Reach::Sessions);
  children.add(child);
  for (;;) {
    siginfo_t signal{};
    const int number = ::sigwaitinfo(&signals, &signal);
    if (number == SIGCHLD) {
      const auto ended = children.wait(std::chrono::milliseconds(0));
      if (ended.process == 0) continue;  // an adopted orphan
      const int code = exit_code_of(ended.status);
      if (WIFSIGNALED(ended.status)) children.end_all(std::chrono::seconds(2));
      // Exits without destructors. They would end processes that the child has left running on
      // purpose: those in sessions of their own and those of other users.
      ::_exit(code);
    }
    if (number > 0 && signal.si_code != SI_KERNEL) ::kill(child, number);
  }
}

void rename_process(int argc, char** argv, const char* name) {
  ::prctl(PR_SET_NAME, name);
  if (argc < 1) return;
  // The kernel shows this memory, from the start of the first text to the end of the last.
  char* const begin = argv[0];
  const std::size_t room =
      static_cast<std::size_t>(argv[argc - 1] + std::strlen(argv[argc - 1]) - begin);
  std::memset(begin, 0, room);
  std::strncpy(begin, name, room);
}

}  // namespace weft::launch
