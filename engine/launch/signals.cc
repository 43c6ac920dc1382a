// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>

#include <weft/engine/launch/signals.h>

namespace weft::launch {

void listen_for_signals() {
  // Some parents leave SIGCHLD ignored; then no child could be waited for.
  std::signal(SIGCHLD, SIG_DFL);
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int number, siginfo_t* from, void*) {
    const bool is_of_terminal = from->si_code == SI_KERNEL;
    if (received_signal != 0) {  // the first signal ends the job and sets its exit code
      // One Ctrl-C may arrive twice: from the terminal, and from a program around this one that
      // forwards it.
      if (number == SIGINT &&
          (received_signal != SIGINT || is_of_terminal == (signal_of_terminal != 0)))
        is_hurried = 1;
      return;
    }
    signal_of_terminal = is_of_terminal;
    received_signal = number;
  };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  for (const int number : {SIGHUP, SIGQUIT}) {
    struct sigaction before {};
    sigaction(number, nullptr, &before);
    // Keeps the signals that nohup ignores ignored.
    if (before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);
  }
  action.sa_handler = [](int) { asked_for_dumps = 1; };
  action.sa_flags = SA_RESTART;  // continues a write() of a line
  sigaction(SIGUSR1, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace weft::launch
