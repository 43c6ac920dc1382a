// SPDX-License-Identifier: Apache-2.0
// A rank's address of the backend "weft" comes from a peer. Any text is either such an address,
// which is the same when it is written again, or is refused with Caller.
#include <cstdint>
#include <string>

#include <weft/base/make_error.h>
#include <weft/transport/weft/offers.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  const auto offers = transport::weft::decode(text);
  if (!offers) {
    if (offers.error().blame() != Blame::Caller) broken("a refusal is not a Caller error");
  } else if (transport::weft::encode(offers.value()) != text) {
    broken("an address changes when it is written");
  }
  return 0;
}
