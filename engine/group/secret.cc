// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <set>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/base/tls_files.h>
#include <weft/engine/group/secret.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/prefix.h>
#include <weft/engine/store/store.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::group {

namespace {

// True for the first call with the text.
bool is_new(const std::string& text) {
  static Mutex mutex;
  static std::set<std::string> said;
  MutexLock lock(mutex);
  return said.insert(text).second;
}

void warn_once(const std::string& text) {
  if (is_new(text)) log::warn(text);
}

// Warns that a backend leaves connections to its library.
void warn_of(const std::string& backend, bool has_secret, bool has_tls) {
  const std::string begin =
      "the backend '" + backend + "' leaves connections to its library, which ";
  if (has_secret) {
    warn_once(begin +
              "does not ask for ProcessGroupOptions::secret, so processes that reach their ports "
              "are not kept out (backends that ask for it: weft, shm, tcp, verbs)");
  }
  if (has_tls) {
    warn_once(begin +
              "does not encrypt them, although WEFT_TLS_CERT is set (the backends weft and tcp do, "
              "between hosts)");
  }
}

}  // namespace

void say_open(const std::string& who, const std::string& address, const std::string& danger,
              const std::string& option, bool warns) {
  if (tls_files().given() || is_loopback(address) || !is_new(danger)) return;
  const std::string text = who + " listens on " + address +
                           " and has neither a secret nor TLS: any process that reaches its store "
                           "and its ports can " +
                           danger + " (" + option + "; WEFT_TLS_CERT)";
  warns ? log::warn(text) : log::info(text);
}

// The scope is the group's place in the job's store, also where the group has moved to a store that
// a rank keeps. All ranks know it, and an earlier life of the group had another.
transport::SignedBootstrap signed_store_of(const CoreOptions& group) {
  return {std::make_shared<StoreBootstrap>(group.own_store), group.secret, prefix_of(group.store)};
}

void guard(transport::JoinOptions& join, transport::Transport& backend, const std::string& prefix) {
  if (join.size == 1) return;
  const bool has_secret = !join.secret.empty();
  const bool has_tls = tls_files().given();
  if (!has_secret && !has_tls) {
    say_open("group '" + join.group_name + "'",
             join.interface_address.empty() ? default_address() : join.interface_address, "join it",
             "ProcessGroupOptions::secret", join.rank == 0);
  }
  if (!backend.asks_for_secret()) warn_of(std::string(backend.name()), has_secret, has_tls);
  if (!has_secret) return;
  join.store = std::make_shared<transport::SignedBootstrap>(join.store, join.secret,
                                                            prefix + join.group_name);
}

}  // namespace weft::group
