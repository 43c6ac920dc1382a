// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <set>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/secret.h>
#include <weft/engine/store/address.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::group {

namespace {

void say_open(const transport::JoinOptions& join) {
  static std::atomic<bool> is_said{false};
  const std::string address =
      join.interface_address.empty() ? default_address() : join.interface_address;
  if (is_loopback(address) || is_said.exchange(true)) return;
  log::info("group '" + join.group_name + "' listens on " + address +
            " and has no secret: any process that reaches its store and its ports can join it "
            "(ProcessGroupOptions::secret)");
}

void warn_of(const std::string& backend) {
  static Mutex mutex;
  static std::set<std::string> said;
  {
    MutexLock lock(mutex);
    if (!said.insert(backend).second) return;
  }
  log::warn("the backend '" + backend +
            "' leaves connections to its library, which does not ask for "
            "ProcessGroupOptions::secret, so processes that reach their ports are not kept out "
            "(backends that ask for it: weft, shm, tcp, verbs)");
}

}  // namespace

void guard(transport::JoinOptions& join, transport::Transport& backend, const std::string& prefix) {
  if (join.size == 1) return;
  if (join.secret.empty()) return say_open(join);
  join.store = std::make_shared<transport::SignedBootstrap>(join.store, join.secret,
                                                            prefix + join.group_name);
  if (!backend.asks_for_secret()) warn_of(std::string(backend.name()));
}

}  // namespace weft::group
