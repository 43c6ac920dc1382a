// SPDX-License-Identifier: Apache-2.0
// Forwards what one rank writes to stdout or stderr to weft-run's own stdout or stderr and to a
// file. Used by weft-run's one thread; blocks while the reader is slow. Once a signal ends the job,
// drops the text that the reader does not take within 1 s.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include <weft/base/descriptor.h>

namespace weft::launch {

// Writes "weft-run: TEXT" and a newline to stderr.
void say(const std::string& text);

// With a prefix, writes whole lines, so that the ranks' lines do not mix; only lines of more than
// 64 KiB are split. A carriage return ends a line as well, as under torchrun: each state of a
// progress bar is a line. Without a prefix, passes all bytes on at once and unchanged.
class Output {
 public:
  // A file that keeps the bytes unchanged.
  struct Log {
    std::string path;         // "": no file
    bool is_instead = false;  // written to the file only
  };
  // Forwards from a pipe's reading end to the descriptor `to` of this process. Throws Caller if the
  // log cannot be written.
  Output(int rank, Descriptor from, int to, bool prefix, Log log);
  Output(int rank, Descriptor from, int to, bool prefix)
      : Output(rank, std::move(from), to, prefix, Log()) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // -1 after the end of the output.
  int descriptor() const { return from_.get(); }
  // Forwards the bytes that are available. Returns whether there may be more.
  bool forward();
  // errno of the first write that failed; 0 if none has failed.
  int failure() const { return failure_; }
  const char* where() const;
  const std::string& log_path() const { return log_.path; }
  // The last lines for the report of the rank's failure: of stderr only, without the frames of
  // libtorch's stack traces.
  const std::deque<std::string>& last_lines() const { return last_; }
  // Whether the last lines contain one of Weft's errors about a lost rank. Ignores lines of Weft's
  // log: a rank that fails by itself may have logged that others are lost.
  bool tells_of_a_lost_rank() const;

 private:
  void take(std::string_view bytes);
  void end_line(const char* ending);
  void write_all(std::string_view text);
  void keep(std::string_view bytes);

  const int rank_;
  Descriptor from_;
  const int to_;
  const bool prefix_;
  const Log log_;
  Descriptor kept_;  // the log
  int failure_ = 0;
  std::string partial_;     // the line that has not ended, so far
  bool is_inside_ = false;  // part of that line has been written
  // The last byte was a carriage return that ended a line; a newline after it ends the same line.
  bool was_return_ = false;
  std::deque<std::string> last_;
};

}  // namespace weft::launch
