// SPDX-License-Identifier: Apache-2.0
// Anything that lies in the store of a group with a secret is refused, or is a value that the
// secret's holder writes as the same bytes.
#include <cstdint>
#include <memory>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/transport/signed_bootstrap.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  using namespace weft;
  using namespace weft::transport;
  const SignedBootstrap store(nullptr, "a secret of the fuzzer", "scope");
  const auto* begin = reinterpret_cast<const std::byte*>(data);
  const Bootstrap::Bytes stored(begin, begin + count);
  try {
    const auto value = store.unsealed("key", stored);
    if (store.sealed("key", value) != stored) broken("bytes change when they are read and written");
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller) broken("a refusal is not a Caller error");
  }
  return 0;
}
