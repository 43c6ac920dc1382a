// SPDX-License-Identifier: Apache-2.0
#include <map>

#include <weft/tests/conformance/connection/child.h>
#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/conformance/connection/leaving.h>

namespace weft::conformance {

namespace {

std::optional<std::string> ask(const std::string& backend) {
  Child other([&](Child& self) {
    const auto loop = std::make_shared<EventLoop>("listens");
    const auto transport = transport::open(backend);
    const Harbour harbour(*transport->connector(), loop);
    self.say(harbour.address());
    static_cast<void>(self.hear());
  });
  const std::string address = other.hear();
  if (address.empty()) return std::nullopt;  // it cannot even listen; the tests report that
  auto why = transport::open(backend)->connector()->why_unreachable(address);
  other.say("enough");
  other.expect_success();  // not killed: it may have files to remove
  return why;
}

}  // namespace

std::optional<std::string> why_within_the_process(const std::string& backend) {
  static std::map<std::string, std::optional<std::string>> known;
  const auto found = known.find(backend);
  return found != known.end() ? found->second : known.emplace(backend, ask(backend)).first->second;
}

}  // namespace weft::conformance
