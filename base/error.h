// SPDX-License-Identifier: Apache-2.0
// The one error type. A Blame sorts errors by the caller's best reaction, not by the part that
// failed. Set-up throws errors; data calls deliver them through the Op; the public API throws when
// a caller waits for a failed operation. Errors can be copied, and any thread may use them.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/export.h>

namespace weft {

// What a caller should do about an error.
enum class Blame {
  Caller,       // the call is wrong: fix it
  Busy,         // no room at the moment: retry later
  Timeout,      // a deadline passed
  PeerLost,     // a rank died or cannot be reached: rebuild the group
  Unsupported,  // this backend cannot do it: choose another
  Device,       // a GPU or NIC failed; its context is lost
  Cancelled,    // the operation was withdrawn
  Remote,       // the called function threw on the other worker
  Protocol,     // the peer sent invalid bytes: run one version of Weft everywhere
  // A blame that is added here becomes kLastBlame (make_error.h).
};

// Returns the name of the enumerator: "PeerLost".
WEFT_API std::string_view name(Blame blame);

// Where an error was made: filled in by the default argument of a constructor or a check function.
// (clang 14 has no std::source_location.)
struct Place {
  // The source file, as the compiler names it.
  const char* file = "";
  // The line in it; 0 if the place is not known.
  int line = 0;
  // Returns the place of the call.
  static constexpr Place current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// The exception that Weft throws. Its what() has the blame, the text and the place.
class WEFT_API Error : public std::runtime_error {
 public:
  // Makes an error without a native code.
  Error(Blame blame, const std::string& text, Place place = Place::current());
  // Makes an error with the number that a library or the system has returned.
  Error(Blame blame, const std::string& text, int native_code, Place place = Place::current());

  // What the caller should do about it.
  Blame blame() const noexcept { return blame_; }
  // errno, CUresult, ncclResult_t …, as the text says; 0 if there is none.
  int native_code() const noexcept { return native_code_; }
  // Where the error was made, in Weft's source or the program's.
  Place place() const noexcept { return place_; }
  // The message without blame and place, for use in a longer message.
  const std::string& text() const noexcept { return text_; }

  // The lost or missing ranks that the text names, ascending: ranks of the group that throws the
  // error, or ranks of workers if an agent does. Empty if the error is about no rank, or it is not
  // known which.
  std::vector<int> ranks() const { return ranks_; }

  // The same error one level up: "context: text".
  Error within(const std::string& context) const;
  // The same error with a more detailed text.
  Error with_text(const std::string& text) const;
  // The same error with these ranks.
  Error with_ranks(std::vector<int> ranks) const;

 private:
  Blame blame_;
  int native_code_ = 0;
  Place place_;
  std::string text_;
  std::vector<int> ranks_;
};

// Returns the text of any thrown object: of an exception and the exceptions nested in it, of a
// std::string or a char*; for anything else the name of its type. An exception with a null what()
// is described by its type's name. Long texts are cut.
WEFT_API std::string text_of(const std::exception_ptr& caught);
// Returns the text of an exception and of those nested in it.
WEFT_API std::string text_of(const std::exception& error);

}  // namespace weft
