// SPDX-License-Identifier: Apache-2.0
// Addresses come from peers too, by way of a store. Any text is either an address, which is
// unchanged when it is written and read again, or is refused with Caller. The first byte chooses
// the transport.
#include <cstdint>
#include <string>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/registry.h>
#include <weft/transport/shm/address.h>
#include <weft/transport/tcp/address.h>
#ifdef WEFT_FUZZ_VERBS
#include <weft/transport/verbs/verbs.h>
#endif

namespace {

using namespace weft;

void check_blame(const Error& error) {
  if (error.blame() != Blame::Caller)
    broken("an address that cannot be read is not blamed on the caller");
}

template <class Address>
void check(const std::string& text) {
  std::string written;
  try {
    written = Address::parse(text).text();
  } catch (const Error& error) {
    return check_blame(error);
  }
  if (Address::parse(written).text() != written) broken("an address changes when it is written");
}

// Only inproc itself can read its addresses: its answers show how it has read one.
void check_inproc(const std::string& text) {
  static const auto transport = transport::open("inproc");
  static const auto loop = std::make_shared<EventLoop>("fuzz");
  static const auto listener = transport->connector()->listen({loop, "", [](const auto&) {}});
  transport::Connector& connector = *transport->connector();
  if (connector.why_unreachable(listener->address())) broken("a listener cannot be reached");
  // Digits behind a real address lead to places that do not exist.
  for (const std::string& address : {text, listener->address() + text}) {
    const auto why = connector.why_unreachable(address);
    if (why && why->find("'" + address + "'") == std::string::npos)
      broken("a refusal does not name the address");
    const bool is_no_address = why && why->ends_with("is not an inproc address");
    try {
      connector.connect(address, {loop, Deadline::never()})
          ->close(Error(Blame::Cancelled, "enough"));
      if (is_no_address) broken("connect() accepts what is not an address");
    } catch (const Error& error) {
      check_blame(error);
      if (!is_no_address) broken("connect() cannot read an address that why_unreachable() can");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), bytes - 1);
  switch (data[0] % 4) {
    case 0: check<transport::tcp::Address>(text); break;
    case 1: check<transport::shm::Address>(text); break;
    case 2: check_inproc(text); break;
    default:
#ifdef WEFT_FUZZ_VERBS
      check<transport::verbs::Address>(text);
#endif
      break;
  }
  return 0;
}
