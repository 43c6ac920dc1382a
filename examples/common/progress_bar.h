// SPDX-License-Identifier: Apache-2.0
// A progress bar on a terminal. If stdout is no terminal: nothing, or a line for each quarter.
#pragma once

#include <cstdio>
#include <string>

#include <unistd.h>

namespace examples {

enum class Elsewhere { Nothing, Lines };

class ProgressBar {
 public:
  // Draws only if `shown` is true; the other ranks pass false.
  ProgressBar(std::string title, std::size_t steps, bool shown,
              Elsewhere elsewhere = Elsewhere::Nothing)
      : title_(std::move(title)),
        steps_(steps),
        shown_(shown && isatty(STDOUT_FILENO) == 1),
        lines_(shown && !shown_ && steps > 0 && elsewhere == Elsewhere::Lines) {}
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void step(const std::string& note) {
    ++done_;
    if (lines_ && done_ * 4 / steps_ > (done_ - 1) * 4 / steps_) {
      std::printf("%s: %zu/%zu  %s\n", title_.c_str(), done_, steps_, note.c_str());
      std::fflush(stdout);
    }
    if (!shown_) return;
    constexpr std::size_t kWidth = 30;
    const std::size_t filled = steps_ == 0 ? kWidth : done_ * kWidth / steps_;
    std::string bar(filled, '=');
    if (filled < kWidth) bar += '>';
    bar.resize(kWidth, ' ');
    std::printf("\r\033[K%s [%s] %zu/%zu  %s", title_.c_str(), bar.c_str(), done_, steps_,
                note.c_str());
    std::fflush(stdout);
  }

  // Prints a line in place of the bar, which the next step draws again below it.
  void print(const std::string& line) const {
    std::printf("%s%s\n", shown_ ? "\r\033[K" : "", line.c_str());
    std::fflush(stdout);
  }

  // Removes the bar from the line, so that a summary can replace it.
  void clear() {
    if (!shown_ || done_ == 0) return;
    std::printf("\r\033[K");
    std::fflush(stdout);
    done_ = 0;
  }

 private:
  std::string title_;
  std::size_t steps_;
  std::size_t done_ = 0;
  bool shown_;
  bool lines_;
};

}  // namespace examples
