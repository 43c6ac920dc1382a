#include <initializer_list>

#include <weft/engine/launch/signals.h>

namespace weft::launch {

void listen_for_signals() {
  std::signal(SIGCHLD,
              SIG_DFL);  // ignored, as some parents leave it, nobody could wait for a child
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int number, siginfo_t* from, void*) {
    const bool is_of_terminal = from->si_code == SI_KERNEL;
    if (received_signal != 0) {  // the first is what ends the job, and what the exit code says
      // One Ctrl-C may come twice: from the terminal, and from a program around this one that
      // passes it on.
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
    if (before.sa_handler != SIG_IGN)
      sigaction(number, &action, nullptr);  // nohup stays what it is
  }
  action.sa_handler = [](int) { asked_for_dumps = 1; };
  action.sa_flags = SA_RESTART;  // a line that is being written goes on
  sigaction(SIGUSR1, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace weft::launch
