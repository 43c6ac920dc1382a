// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <future>

#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/harness/interface.h>

namespace weft::conformance {

std::vector<std::string> connecting_backends() {
  std::vector<std::string> names;
  for (const transport::Backend& backend : transport::backends()) {
    const auto opened = backend.open();
    if (opened.ok() && opened.value()->connector() != nullptr) names.emplace_back(backend.name);
  }
  return names;
}

std::vector<std::pair<std::string, std::string>> unusable_backends() {
  std::vector<std::pair<std::string, std::string>> result;
  for (const transport::Backend& backend : transport::backends()) {
    const auto opened = backend.open();
    if (!opened.ok()) result.emplace_back(backend.name, opened.error().text());
  }
  return result;
}

struct Harbour::Kept {
  std::mutex mutex;
  std::vector<std::shared_ptr<Connection>> waiting;
};

Harbour::Harbour(transport::Connector& connector, std::shared_ptr<EventLoop> loop)
    : loop_(std::move(loop)), kept_(std::make_shared<Kept>()) {
  listener_ = connector.listen(
      {loop_, harness::interface_or(""), [kept = kept_](std::shared_ptr<Connection> connection) {
         std::lock_guard lock(kept->mutex);
         kept->waiting.push_back(std::move(connection));
       }});
}

std::shared_ptr<Connection> Harbour::next() {
  const auto has = [this] {
    std::lock_guard lock(kept_->mutex);
    return !kept_->waiting.empty();
  };
  if (!loop_->drive(has, patience())) {
    ADD_FAILURE() << "nobody connected";
    return nullptr;
  }
  std::lock_guard lock(kept_->mutex);
  auto first = std::move(kept_->waiting.front());
  kept_->waiting.erase(kept_->waiting.begin());
  return first;
}

ConnectionPair open_pair(transport::Connector& connector) {
  ConnectionPair pair;
  pair.near_loop = std::make_shared<EventLoop>("near");
  pair.far_loop = std::make_shared<EventLoop>("far");
  Harbour harbour(connector, pair.far_loop);
  pair.near = connector.connect(harbour.address(), {pair.near_loop, patience()});
  pair.far = harbour.next();
  return pair;
}

void warm_up(const ConnectionPair& pair, Mailbox& near_mail, Mailbox& far_mail) {
  pair.near->send(bytes_of("ping"), {}, nullptr, {});
  EXPECT_EQ(far_mail.next().header, "ping");
  pair.far->send(bytes_of("pong"), {}, nullptr, {});
  EXPECT_EQ(near_mail.next().header, "pong");
}

void flush(EventLoop& loop) {
  std::promise<void> reached;
  loop.post([&] { reached.set_value(); });
  reached.get_future().wait();
}

bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace weft::conformance
