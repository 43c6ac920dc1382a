// SPDX-License-Identifier: Apache-2.0
// Makes, converts and words errors inside Weft. <weft/weft.h> does not include it.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/export.h>

namespace weft {

// For checking the number of a Blame that another process sent.
inline constexpr Blame kLastBlame = Blame::Protocol;
// Decodes a Blame from a peer; unknown values become Remote.
constexpr Blame blame_from(int said) {
  return said >= 0 && said <= static_cast<int>(kLastBlame) ? static_cast<Blame>(said)
                                                           : Blame::Remote;
}

// Whether an error with this blame ends the connection with the peer, and not one operation alone.
constexpr bool ends_connection(Blame blame) {
  return blame == Blame::PeerLost || blame == Blame::Protocol;
}

// An Error from errno: "text: Connection refused".
WEFT_API Error system_error(Blame blame, const std::string& text, int number,
                            Place place = Place::current());

// Converts a caught exception: an Error stays as it is; any other exception becomes `otherwise`
// with its text.
WEFT_API Error to_error(const std::exception_ptr& caught, Blame otherwise);

// Formats ranks for errors: "rank 1", "ranks 0, 2"; "" for none.
WEFT_API std::string ranks_text(const std::vector<int>& ranks);
// "rank 1 has", "ranks 0, 2 have".
WEFT_API std::string ranks_have(const std::vector<int>& ranks);

// Reports a broken invariant of Weft itself: prints the text and the place, and aborts. Never use
// it for something that a user or peer can cause.
[[noreturn]] WEFT_API void broken(std::string_view text, Place place = Place::current());

}  // namespace weft
