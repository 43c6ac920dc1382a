// SPDX-License-Identifier: Apache-2.0
// A group that goes on with other ranks: reconfigure, shrink, split.
#include <algorithm>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/python/backend/backend.h>
#include <weft/python/backend/creation.h>
#include <weft/python/backend/device_groups.h>
#include <weft/python/backend/errors.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

c10::intrusive_ptr<c10d::Backend> Backend::part(const c10::intrusive_ptr<c10d::Store>& store,
                                                const std::vector<int>& ranks,
                                                const c10::intrusive_ptr<Options>& options) {
  const bool is_member = std::find(ranks.begin(), ranks.end(), getRank()) != ranks.end();
  if (!is_member) return nullptr;
  const auto timeout = options ? std::min(options->timeout, place().timeout) : place().timeout;
  weft::ProcessGroupOptions wanted;
  wanted.group_name = options ? options->group_name : "";
  wanted.timeout = timeout;
  auto made = make_subgroup(group(), ranks, wanted);
  const Place place{made.rank(), made.size(), wanted.group_name, timeout};
  return c10::make_intrusive<Backend>(std::move(made), store, place);
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  return translated("split_group", [&] { return part(store, ranks, options); });
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<std::int64_t>& ranks_to_exclude,
                                                  int, const c10::intrusive_ptr<Options>& options) {
  return translated("shrink_group", [&] {
    std::vector<int> ranks;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) ==
          ranks_to_exclude.end())
        ranks.push_back(rank);
    }
    auto smaller = part(store(), ranks, options);
    if (!smaller) {
      throw Error(Blame::Caller, "shrink_group: rank " + std::to_string(getRank()) +
                                     " is itself excluded, and does not call it");
    }
    follow_world(*this, c10::static_intrusive_pointer_cast<Backend>(smaller));
    return smaller;
  });
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace {

// The handles in the order of the new ranks.
std::vector<std::string> ordered(const c10d::ReconfigureOptions& options) {
  if (const auto* const list = std::get_if<std::vector<std::string>>(&options.handles))
    return *list;
  const auto& set = std::get<std::unordered_set<std::string>>(options.handles);
  std::vector<std::string> handles(set.begin(), set.end());
  std::sort(handles.begin(), handles.end());  // by the ranks that they begin with
  return handles;
}

std::string key(int rank) { return "came/" + std::to_string(rank); }

// Throws Caller if ranks have met with this uuid before: their keys are still in the store.
void refuse_used(c10d::Store& store, int rank, std::uint64_t uuid) {
  const WithoutGil unlocked;
  if (!store.check({key(rank)})) return;
  throw Error(Blame::Caller, "reconfigure: the uuid " + std::to_string(uuid) +
                                 " is already used; take a new one for each reconfiguration");
}

// A store on which one may wait: a TCPStore holds up its other users meanwhile, so it is given
// another connection.
c10::intrusive_ptr<c10d::Store> to_wait_on(const c10::intrusive_ptr<c10d::PrefixStore>& store) {
  const auto inner = store->getUnderlyingNonPrefixStore();
  if (dynamic_cast<const c10d::TCPStore*>(inner.get()) == nullptr) return store;
  return store->clone();
}

// Blocks until each of the ranks has set its key.
void meet(const c10::intrusive_ptr<c10d::PrefixStore>& store, int rank, int size,
          std::chrono::milliseconds timeout) {
  store->set(key(rank), std::vector<std::uint8_t>{1});
  std::vector<std::string> keys;
  for (int other = 0; other < size; ++other) keys.push_back(key(other));
  const auto end = std::chrono::steady_clock::now() + timeout;
  try {
    return to_wait_on(store)->wait(keys, timeout);
  } catch (const std::exception&) {  // each store throws others when the time is over
    if (std::chrono::steady_clock::now() < end) throw;
  }
  std::vector<int> missing;
  std::string names;
  for (int other = 0; other < size; ++other) {
    if (store->check({key(other)})) continue;
    missing.push_back(other);
    names += (names.empty() ? "" : ", ") + std::to_string(other);
  }
  if (missing.empty()) return;
  throw Error(Blame::Timeout, (missing.size() == 1 ? "reconfigure: rank " : "reconfigure: ranks ") +
                                  names + " of " + std::to_string(size) +
                                  " did not come after a timeout of " +
                                  std::to_string(timeout.count()) + " ms")
      .with_ranks(missing);
}

}  // namespace

std::string new_handle(int rank) {
  std::random_device random;
  std::ostringstream text;
  text << "weft:";
  text.width(8);
  text.fill('0');
  text << rank << ":" << std::hex << random() << random();
  return text.str();
}

WorkPointer Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  return translated("reconfigure", [&] {
    const std::vector<std::string> handles = ordered(options);
    const auto own = std::find(handles.begin(), handles.end(), get_reconfigure_handle());
    if (own == handles.end()) {
      throw Error(
          Blame::Caller,
          "reconfigure: the handle of this rank (get_reconfigure_handle) is not among the " +
              std::to_string(handles.size()) + " that are given");
    }
    Place place = this->place();
    place.rank = static_cast<int>(own - handles.begin());
    place.size = static_cast<int>(handles.size());
    const auto meeting = c10::make_intrusive<c10d::PrefixStore>(
        "reconfigure/" + std::to_string(options.uuid), store());
    refuse_used(*meeting, place.rank, static_cast<std::uint64_t>(options.uuid));
    auto made = made_by([meeting, place, old = taken_groups(),
                         timeout = options.timeout.value_or(place.timeout)]() mutable {
      meet(meeting, place.rank, place.size, timeout);
      old.clear();  // waits for the others, unless a loss has broken them
      return join(meeting, place, std::nullopt);
    });
    replace(std::move(made), place);
    auto work = c10::make_intrusive<IssuedWork>(
        getRank(), CallName{c10d::OpType::UNKNOWN, "reconfigure", "weft:reconfigure"}, Cause(),
        place.timeout, Tensors(), Tensors());
    work->issued({});
    return WorkPointer(std::move(work));
  });
}

#endif

}  // namespace weft::python
