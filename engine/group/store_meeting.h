// SPDX-License-Identifier: Apache-2.0
// Meetings of all ranks of a group over its store, to which each rank comes by setting a key.
// Internal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/meeting.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/operation.h>

namespace weft::group {

// The remedy if a rank does not come to a call.
constexpr const char* kAllCall = "all ranks of the group must call it, in the same order of calls";

// Finds the ranks of the group that have not set the key base + their rank. Owns the store. Throws
// Timeout if the store does not answer within kStoreAnswers.
Meeting::Missing absent_from(const CoreOptions& group, std::string base);

// One meeting, to which each rank comes by setting the key base + its rank. Used by the thread that
// waits in it; wait reports show it as long as it lives.
class StoreMeeting {
 public:
  // `what`: the call in which the ranks meet. The others are the group's, and outlive this object.
  StoreMeeting(const CoreOptions& options, StoreBootstrap& group_store, const Ledger& ledger,
               Failure& failure, const std::string& base, std::string what);
  StoreMeeting(const StoreMeeting&) = delete;
  StoreMeeting& operator=(const StoreMeeting&) = delete;

  // The group's store. Waits on it also end when the group breaks, and when a rank has left without
  // having come.
  StoreBootstrap& store() { return store_; }

 private:
  Meeting wait_;
  StoreBootstrap store_;
};

// Runs `meet`, in which ranks meet over the store, as a recorded operation, so that the flight
// recorder shows it and the rank that has not come.
template <class Meet>
auto recorded(const trace::Member& member, const char* name, std::uint64_t number,
              const std::string& place, const Meet& meet) {
  auto traced =
      trace::Operation::begin(member, trace::Kind::Meeting, {.name = name, .sequence = number});
  try {
    auto made = meet();
    traced.end();
    return made;
  } catch (...) {
    const Error error = to_error(std::current_exception(), Blame::PeerLost);
    traced.fail(error);
    if (trace::is_worth_a_dump(error)) trace::dump_after(place, error);
    throw;
  }
}

}  // namespace weft::group
