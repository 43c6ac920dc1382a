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
  std::signal(SIGCHLD,
              SIG_DFL);  // ignored, as some parents leave it, the kernel would reap the child
  const sigset_t signals = guarded_signals();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  const pid_t self = ::getpid();
  // Before there is a child: it may have started ranks, and be killed, before this process runs
  // again.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t child = ::fork();
  if (child < 0) {
    std::fprintf(
        stderr,
        "weft-run: cannot start a process, of which the job needs one more than it has ranks "
        "(ulimit -u, pids.max): %s\n",
        std::strerror(errno));
    return 1;
  }
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    if (::getppid() != self) ::_exit(128 + SIGTERM);
    return job();
  }
  // The ranks end by the signal that their parent's death gives them, and leave what they have
  // started as orphans.
  Children children(Reach::Sessions);
  children.add(child);
  for (;;) {
    siginfo_t signal{};
    const int number = ::sigwaitinfo(&signals, &signal);
    if (number == SIGCHLD) {
      const auto ended = children.wait(std::chrono::milliseconds(0));
      if (ended.process == 0) continue;  // an orphan
      const int code = exit_code_of(ended.status);
      if (WIFSIGNALED(ended.status)) children.end_all(std::chrono::seconds(2));
      // Not by destructors, which would end what the child has left on purpose: sessions of their
      // own, other users' processes.
      ::_exit(code);
    }
    if (number > 0 && signal.si_code != SI_KERNEL) ::kill(child, number);
  }
}

void rename_process(int argc, char** argv, const char* name) {
  ::prctl(PR_SET_NAME, name);
  if (argc < 1) return;
  // The kernel shows what lies here, from the first text's beginning to the last one's end.
  char* const begin = argv[0];
  const std::size_t room =
      static_cast<std::size_t>(argv[argc - 1] + std::strlen(argv[argc - 1]) - begin);
  std::memset(begin, 0, room);
  std::strncpy(begin, name, room);
}

}  // namespace weft::launch
