// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/engine/rendezvous/lives.h>

namespace weft::group {

NextLife next_life(const c10::intrusive_ptr<c10d::Store>& store, const std::string& who) {
  const auto life = store->add(lives(who), 1);
  if (who == "0") store->set(begun(life), "1");  // read by store_if_of_this_life()
  const auto of = [&](std::int64_t number) -> c10::intrusive_ptr<c10d::Store> {
    if (number <= 1) return store;
    return c10::make_intrusive<c10d::PrefixStore>("life" + std::to_string(number), store);
  };
  return {of(life), life <= 1 ? nullptr : of(life - 1)};
}

}  // namespace weft::group
