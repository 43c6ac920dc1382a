// SPDX-License-Identifier: Apache-2.0
// The keys and values that this rank keeps for groups in which it is the first member, so that
// these groups do not need the job's store (member_store.h). Thread-safe; nothing blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/membership/store_message.h>

namespace weft::group {

class StoreKeeper {
 public:
  using Answer = std::function<void(StoreMessage)>;
  // Does what a rank asks, and answers at once, or a Get when all its keys exist, perhaps on
  // another thread. A rank that has no answer may ask again with the same number: that is done
  // once.
  void handle(int asker, const StoreMessage& request, const Answer& answer);

 private:
  struct Waiting {
    int asker = 0;
    StoreMessage request;
    Answer answer;
  };
  struct Answered {
    StoreMessage message;
    Answer answer;
  };
  // Returns false if the request waits.
  bool perform(const StoreMessage& request, StoreMessage& reply) WEFT_REQUIRES(mutex_);
  std::vector<Answered> answerable() WEFT_REQUIRES(mutex_);
  bool has_all(const std::vector<std::string>& keys) const WEFT_REQUIRES(mutex_);

  Mutex mutex_;
  std::map<std::string, std::string> values_ WEFT_GUARDED_BY(mutex_);
  std::list<Waiting> waiting_ WEFT_GUARDED_BY(mutex_);
  // The latest answers to each rank's requests that change keys, by their numbers.
  std::map<int, std::map<std::uint64_t, StoreMessage>> given_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::group
