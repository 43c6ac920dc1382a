// What one rank writes to stdout or stderr, on its way to weft-run's own and to a file. Used by
// weft-run's one thread; writing blocks while the reader is slow.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include <weft/base/descriptor.h>

namespace weft::launch {

// With a prefix lines are written whole, so that ranks do not mix inside one, but for lines of more
// than 64 KiB; a carriage return ends a line as well, as under torchrun: each state of a progress
// bar is a line. Without, all passes at once and as it is.
class Output {
 public:
  // Where it is kept as it is.
  struct Log {
    std::string path;         // "": nowhere
    bool is_instead = false;  // and goes nowhere else
  };
  // From a pipe's reading end to one of this process's descriptors. Throws Caller where the log
  // cannot be written.
  Output(int rank, Descriptor from, int to, bool prefix, Log log);
  Output(int rank, Descriptor from, int to, bool prefix)
      : Output(rank, std::move(from), to, prefix, Log()) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // -1 when all has come.
  int descriptor() const { return from_.get(); }
  // Moves what is there. Returns whether there may be more.
  bool forward();
  // errno of the first write that failed; 0: none has.
  int failure() const { return failure_; }
  const char* where() const;
  const std::string& log_path() const { return log_.path; }
  // The last lines, of stderr only and without the frames of libtorch's stacks: what a report of
  // the rank's failure shows.
  const std::deque<std::string>& last_lines() const { return last_; }
  // Whether they say that the rank lost another one, as Weft's own errors do. Lines of Weft's log
  // do not count: a rank that fails by itself may have logged that the others are gone.
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
  std::string partial_;     // of the line that has not ended
  bool is_inside_ = false;  // the beginning of that line has been written
  bool was_return_ =
      false;  // the last byte ended a line, and a newline after it is of the same end
  std::deque<std::string> last_;
};

}  // namespace weft::launch
