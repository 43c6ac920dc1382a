// Addresses come from peers too, by way of a store. Any text is an address, and then says the same when it is written and
// read again, or is refused with Caller. The first byte says of which transport.
#include <cstdint>
#include <string>

#include <weft/base/error.h>
#include <weft/transport/shm/address.h>
#include <weft/transport/tcp/address.h>

namespace {

template <class Address>
void check(const std::string& text) {
  std::string written;
  try {
    written = Address::parse(text).text();
  } catch (const weft::Error& error) {
    if (error.blame() != weft::Blame::Caller) weft::broken("an address that cannot be read is not the caller's fault");
    return;
  }
  if (Address::parse(written).text() != written) weft::broken("an address changes when it is written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), bytes - 1);
  if (data[0] % 2 == 0) {
    check<weft::transport::tcp::Address>(text);
  } else {
    check<weft::transport::shm::Address>(text);
  }
  return 0;
}
