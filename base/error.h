// The one error type. Errors are values sorted by what the caller should do about them, not by who
// failed: set-up throws them, data calls deliver them through the Op, the public API throws when a
// failed operation is waited for. Copyable, usable from every thread.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/export.h>

namespace weft {

enum class Blame {
  Caller,       // the call is wrong: fix it
  Busy,         // no room at the moment: retry later
  Timeout,      // a deadline passed
  PeerLost,     // a rank died or cannot be reached: rebuild the group
  Unsupported,  // this backend cannot do it: choose another
  Device,       // a GPU or NIC failed; its context is lost
  Cancelled,    // somebody withdrew the operation
  Remote,       // the called function threw on the other side
};

WEFT_API std::string_view name(Blame blame);

// Where an error was made. Filled in by the default argument of a constructor or a check function.
// (std::source_location is missing from clang 14.)
struct Place {
  const char* file = "";
  int line = 0;
  static constexpr Place current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

class WEFT_API Error : public std::runtime_error {
 public:
  Error(Blame blame, const std::string& text, Place place = Place::current());
  Error(Blame blame, const std::string& text, int native_code, Place place = Place::current());

  Blame blame() const noexcept { return blame_; }
  // errno, CUresult, ncclResult_t …, as the text says; 0 if there is none.
  int native_code() const noexcept { return native_code_; }
  Place place() const noexcept { return place_; }
  // The message without blame and place, for building a longer one.
  const std::string& text() const noexcept { return text_; }

  // The ranks that are lost or missing, as the text names them: ranks of the group that throws
  // this, of workers where an agent does. Ascending; empty where the error is about none, or it is
  // not known which.
  std::vector<int> ranks() const { return ranks_; }

  // The same error seen one level up: "context: text".
  Error within(const std::string& context) const;
  // The same error with another text, which says more.
  Error with_text(const std::string& text) const;
  // The same error, about these ranks.
  Error with_ranks(std::vector<int> ranks) const;

 private:
  Blame blame_;
  int native_code_ = 0;
  Place place_;
  std::string text_;
  std::vector<int> ranks_;
};

// An Error from errno: "text: Connection refused".
WEFT_API Error system_error(Blame blame, const std::string& text, int number,
                            Place place = Place::current());

// What was caught, as an Error: itself, or any other exception as `otherwise` with its text.
WEFT_API Error to_error(const std::exception_ptr& caught, Blame otherwise);

// Gives the text of whatever was thrown: of an exception and of those nested in it, of a
// std::string or a char*; else it names the type. An exception whose what() is null gets its type's
// name, and a long text is cut.
WEFT_API std::string text_of(const std::exception_ptr& caught);
WEFT_API std::string text_of(const std::exception& error);

// "rank 1", "ranks 0, 2", as ranks stand in errors; "" for none.
WEFT_API std::string ranks_text(const std::vector<int>& ranks);
// "rank 1 has", "ranks 0, 2 have".
WEFT_API std::string ranks_have(const std::vector<int>& ranks);

// A broken invariant of Weft itself: prints the text and the place, and aborts. Never for what a
// user or peer can cause.
[[noreturn]] WEFT_API void broken(std::string_view text, Place place = Place::current());

}  // namespace weft
